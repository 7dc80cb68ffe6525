"""Load the C code of this folder, which is compiled on first use. Select tokens in C (`best_scores.c`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import ClassVar, ParamSpec, TypeVar, cast

import torch

from ..utils import native_libraries
from ..utils.allocator import RecycledMemory
from ..utils.native_code import check_structure, processor_level
from . import team
from .pages import BLOCK

WORTH_A_THREAD = 1 << 16
"""Smallest number of scores per thread: 20 to 60 us of work, many times the cost of waking a thread."""

RANKED_TOKENS = 4096
"""Number of tokens that the C code ranks at a time. The intermediate results fit in the first-level cache."""

PADDING = 64
"""Number of elements beyond the end of an array that `best_scores.c` may read or write."""

SCRATCH = RecycledMemory()
"""Memory for intermediate values of all tokens of a context. All layers of the process reuse it."""

P = ParamSpec("P")
T = TypeVar("T")

_caches: list[Callable[[], None]] = []


class _Ranking(ctypes.Structure):
    """The structure `Ranking` of best_scores.c."""

    _fields_: ClassVar = [
        ("scores", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("stride", "heads", "group", "n", "per_part")),
        ("peaks", ctypes.c_void_p),
        ("lses", ctypes.c_void_p),
        ("alpha", ctypes.c_float),
        ("most", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("values", "passing", "within", "best", "tokens", "chosen")),
    ]


def select(
    scores: torch.Tensor, peak: torch.Tensor, lse: torch.Tensor | None, alpha: float, limit: int
) -> torch.Tensor | None:
    """Select at most `limit` tokens per KV head, as `selection.select_tokens` does.

    Args:
        scores: Float32 scores `[Hkv, G, n]`.
        peak: Largest score of each query, `[Hkv, G]`.
        lse: Log-sum-exp of each query's scores, `[Hkv, G]`, or None if G = 1.
        alpha: Largest distance between a selected token's score and `peak`.
        limit: Maximum number of tokens to select per KV head.

    Returns:
        Token indices int64 `[Hkv, m]`, ascending. None if the C code is not available.
    """
    library = _best_scores()
    if library is None:
        return None
    heads, group, n = scores.shape
    if scores.stride(2) != 1 or scores.stride(0) != group * scores.stride(1):
        scores = scores.contiguous()
    lse = torch.zeros(heads, group) if lse is None else lse.contiguous()
    peak, parts, size, words = peak.contiguous(), -(-n // RANKED_TOKENS), heads * (n + PADDING), -(-n // BLOCK)
    room = SCRATCH.empty((2 * (words + parts) + 3 * size,), torch.int32)
    chosen = torch.empty(heads * min(limit, n), dtype=torch.int64)
    within = room.data_ptr() + 8 * words
    values = within + 8 * parts
    call = _Ranking(
        scores.data_ptr(), scores.stride(1), heads, group, n, RANKED_TOKENS, peak.data_ptr(), lse.data_ptr(), alpha,
        0, values, room.data_ptr(), within, values + 4 * size, values + 8 * size, chosen.data_ptr(),
    )  # fmt: skip
    most = library.select_all(
        ctypes.byref(call), limit, team.runner(), team.threads(heads * group * n // WORTH_A_THREAD)
    )
    return chosen[: heads * most].view(heads, most)


def level_cache(function: Callable[P, T]) -> Callable[P, T]:
    """Cache the results of `function` until `forget` is called.

    The results depend on the processor level: the instruction sets that compiled code may use.
    """
    cached = functools.cache(function)
    _caches.append(cached.cache_clear)
    return cast("Callable[P, T]", cached)


@level_cache
def _best_scores() -> ctypes.CDLL | None:
    library = compiled("best_scores", _Ranking)
    if library is not None:
        library.select_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
        library.select_all.restype = ctypes.c_int64
    return library


def forget() -> None:
    """Unload the compiled code. The next call loads it for the current processor level."""
    for clear in _caches:
        clear()


def has_tiles() -> bool:
    """Return whether torch multiplies bfloat16 matrices with AMX on this processor. AMX is faster than our C code."""
    return processor_level() == "avx512_bf16" and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


@level_cache
def compiled(name: str, *structures: type[ctypes.Structure], **constants: int) -> ctypes.CDLL | None:
    """Load `name`.c of this folder, compiled with the macros `constants`. Return None if it cannot be compiled.

    Raises:
        RuntimeError: One of `structures` differs from its definition in C.
    """
    library = native_libraries.load(name, **constants)
    if library is not None:
        for structure in structures:
            check_structure(library, structure)
    return library
