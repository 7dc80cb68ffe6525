"""Load the C code of this folder, which is compiled on first use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from ..utils import native_libraries
from ..utils.allocator import RecycledMemory
from ..utils.native_code import check_structure, processor_level

MIN_SCORES_PER_THREAD = 1 << 16
"""Smallest number of scores per thread: 20 to 60 us of work, many times the cost of waking a thread."""

SCRATCH = RecycledMemory()
"""Memory for intermediate values that cover all tokens of a context. All layers in the process reuse it."""

P = ParamSpec("P")
T = TypeVar("T")

_caches: list[Callable[[], None]] = []


def level_cache(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that caches results that depend on the instruction sets of the C code. `unload` clears the cache."""
    cached = functools.cache(function)
    _caches.append(cached.cache_clear)
    return cast("Callable[P, T]", cached)


def unload() -> None:
    """Forget the loaded code, so that the next call loads it for the current instruction sets."""
    for clear in _caches:
        clear()


def has_amx() -> bool:
    """Return whether torch multiplies bfloat16 matrices with AMX. It is then faster than the C code of this package."""
    return processor_level() == "avx512_bf16" and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


@level_cache
def compiled(name: str, *structures: type[ctypes.Structure], **constants: int) -> ctypes.CDLL | None:
    """Compile and load `name`.c with the macros `constants`. Return None if that fails.

    Raises:
        RuntimeError: One of `structures` differs from its definition in C.
    """
    library = native_libraries.load(name, **constants)
    if library is not None:
        for structure in structures:
            check_structure(library, structure)
    return library
