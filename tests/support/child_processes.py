"""Forked processes. Unlike a new interpreter, a fork does not import torch and transformers again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkProcess

from offload_rt.cli import main


def fork_until_killed(steps: Iterator[None]) -> int:
    """Run a generator in a forked process until it is killed. Return its id after the first step."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a multi-threaded process
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


def fork_command(
    *argv: str, stdin: int | None = None, stdout: int, stderr: int, close: Sequence[int] = ()
) -> ForkProcess:
    """Run `offload-rt` with its arguments in a forked process, which reads and writes the given file descriptors.

    The process closes its copies of the descriptors `close`. It handles Ctrl-C even if this process ignores it, like a
    background job of a shell.
    """

    def run() -> None:
        os.setsid()
        for descriptor in close:
            os.close(descriptor)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            if source is not None:
                os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.exit(main(argv))

    process = multiprocessing.get_context("fork").Process(target=run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about a fork in a multi-threaded process
        process.start()
    return process
