"""Child processes that work until they are killed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator


def fork_until_killed(steps: Iterator[None]) -> int:
    """Run a generator in a forked process until it is killed. Return the process id after the first step."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about forking a multi-threaded process
        child = os.fork()
    if child == 0:
        try:
            next(steps)
            os.write(writing, b"x")
            for _ in steps:
                pass
        finally:
            os._exit(1)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return child
