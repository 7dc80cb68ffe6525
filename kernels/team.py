"""Run the parts of a C call by a persistent team of threads (`team.c`).

A kernel exports `void name(const Call *call, int64_t part)`, which computes one part and is safe to call for different
parts at once. It starts no threads itself.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from ..utils.native_code import load_library

FLAGS = ("-O2", "-std=gnu11", "-pthread")


def run(function: Any, call: ctypes.Structure, parts: int, threads: int) -> None:
    """Call `function(call, part)` for each part in `range(parts)`, by at most `threads` threads including this one.
    `function` is a function of a `ctypes.CDLL`."""
    library = _library()
    assert library is not None, "the library of `function` was compiled, so this one can be"
    library.team_run(function, ctypes.byref(call), parts, threads)


@cache
def _library() -> ctypes.CDLL | None:
    library = load_library(Path(__file__).with_name("team.c"), FLAGS, "kernels run on one thread")
    if library is not None:
        library.team_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        library.team_run.restype = None
    return library
