"""Forked processes. They start without the seconds that a new interpreter needs to import torch and transformers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator


def fork(work: Callable[[], object]) -> int:
    """Call `work` in a forked process, which then exits with code 0, or 1 after an exception. Return its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a multi-threaded process
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def fork_until_killed(steps: Iterator[None]) -> int:
    """Run a generator in a forked process until it is killed. Return its id after the first step."""
    reading, writing = os.pipe()

    def work() -> None:
        next(steps)
        os.write(writing, b"x")
        for _ in steps:
            pass

    child = fork(work)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return child
