"""Programs in processes of their own that begin where this one is: a fresh one takes five seconds to import torch and
transformers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

OTHERS = 3
"""The first file that is not a process' own input or output."""


def forked(program: Callable[[], int], **streams: Any) -> subprocess.Popen[bytes]:
    """Runs `program`, which returns an exit code, in a fork of this process, with these `stdin`, `stdout` and `stderr`
    of `Popen`. It has no file but them, and Ctrl-C is what it is in a shell. Nothing is tidied up at its end but what
    it has printed, which fails where nobody reads it."""

    def run() -> None:
        code = 1
        try:
            os.closerange(OTHERS, os.sysconf("SC_OPEN_MAX"))  # Popen waits for one of them
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = program()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads: none is waited for
        return subprocess.Popen("forked", preexec_fn=run, **streams)
