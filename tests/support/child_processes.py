"""Forked processes: they need no imports, which take most of the time of a new process."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence

from offload_rt.cli import main


def _fork(child: Callable[[], int]) -> int:
    """Run `child` in a forked process, and exit with its result. Return the id of the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a multi-threaded process
        process = os.fork()
    if process == 0:
        code = 1
        try:
            code = child()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return process


def fork_until_killed(steps: Iterator[None]) -> int:
    """Run a generator in a forked process until it is killed. Return its id after the first step."""
    reading, writing = os.pipe()

    def child() -> int:
        next(steps)
        os.write(writing, b"x")
        for _ in steps:
            pass
        return 1

    process = _fork(child)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return process


def fork_command(arguments: Sequence[str], *descriptors: int) -> int:
    """Run `offload-rt` in a forked process with these descriptors of stdin, stdout and stderr. Return its id."""

    def child() -> int:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        sys.stdin, sys.stdout, sys.stderr = (open(i, "w" if i else "r", buffering=1) for i in range(3))  # noqa: SIM115
        code = main(arguments)
        sys.stdout.flush()  # as the interpreter does at its end
        return code

    return _fork(child)
