"""This room's C code, compiled on first use (`native_code.py`): where it cannot be, callers take their torch path."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ..utils.allocator import RecycledMemory
from ..utils.native_code import load_library, processor_level
from .pages import BLOCK, PAGE_BLOCKS, Pages

FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-std=gnu11", "-pthread")
MOST_QUERIES = 32
"""The largest group that it takes."""

WORTH_A_THREAD = 1 << 18
"""Scores for each thread that computes them, or weighs values by them, in about half a millisecond: beginning a thread
is not felt then."""

SCRATCH = RecycledMemory()
"""Of one value or more for each token of a context, in every layer; one for the process, as its allocator is."""


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """scores `[Hkv, G, n]`, and each query's largest and lse over them `[Hkv, G]`."""

    scores: torch.Tensor
    peak: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, eq=False)
class LowBitLibrary:
    """`low_bit.c` for one head dimension and one number of bits of a value, and `best_scores.c`."""

    library: ctypes.CDLL
    ranking: ctypes.CDLL
    head_dim: int

    def score(self, q: torch.Tensor, mean: torch.Tensor, pages: Pages, tokens: range) -> ScoredTokens:
        """Of queries q `[Hkv, G, d]` and what was taken from the keys, mean `[Hkv, d]`."""
        heads, group, _ = q.shape
        first, stop = tokens.start // BLOCK * BLOCK, -(-tokens.stop // BLOCK) * BLOCK
        scores = SCRATCH.empty((heads, group, stop - first), torch.float32)
        peak, lse = torch.empty(2, heads, group)

        def some(own: slice) -> None:
            self.library.score(
                *_pages(pages, own.start), own.stop - own.start, group, _pointer(q[own]), _pointer(mean[own]),
                *_ends(tokens), *(_pointer(found[own]) for found in (scores, peak, lse)),
            )  # fmt: skip

        _by_heads(heads, group * len(tokens), some)
        return ScoredTokens(scores[:, :, tokens.start - first : tokens.stop - first], peak, lse)

    def select(self, found: ScoredTokens, alpha: float, limit: int) -> torch.Tensor:
        """What `selection.select_tokens` selects by these scores, at most `limit` tokens, rising: int64 `[Hkv, m]`."""
        heads, group, n = found.scores.shape
        values, passing = SCRATCH.empty((heads + 1, n), torch.float32), SCRATCH.empty((2, n), torch.uint8)
        tokens, chosen = SCRATCH.empty((n,), torch.int64), torch.empty(heads, limit, dtype=torch.int64)
        count = self.ranking.select_best(
            _pointer(found.scores), ctypes.c_int64(found.scores.stride(1)), heads, group, ctypes.c_int64(n),
            *map(_pointer, (found.peak, found.lse)), ctypes.c_float(alpha), ctypes.c_int64(limit),
            *map(_pointer, (values, values[heads], passing, tokens, chosen)),
        )  # fmt: skip
        return chosen[:, :count]

    def mix(
        self, found: ScoredTokens, pages: Pages, tokens: range, skip: torch.Tensor, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention with the scores of `tokens` that are not in skip int64 `[Hkv, m]`, capped: out `[Hkv, G, d]` and
        lse `[Hkv, G]`."""
        heads, group, _ = found.scores.shape
        before, skip = tokens.start % BLOCK * found.scores.element_size(), skip.contiguous()
        hidden = SCRATCH.empty((heads, found.scores.stride(1)), torch.uint8)
        out, lse = torch.empty(heads, group, self.head_dim), torch.empty(heads, group)

        def some(own: slice) -> None:
            scores = ctypes.c_void_p(found.scores[own].data_ptr() - before)
            self.library.mix(
                *_pages(pages, own.start), own.stop - own.start, group, scores, _pointer(found.peak[own]),
                *_ends(tokens), _pointer(skip[own]), ctypes.c_int64(skip.shape[1]), ctypes.c_float(softcap or 0.0),
                *(_pointer(room[own]) for room in (hidden, out, lse)),
            )  # fmt: skip

        _by_heads(heads, group * len(tokens), some)
        return out, lse

    def store(self, pages: Pages, rows: torch.Tensor, start: int, *, values: bool) -> None:
        """Rows `[Hkv, m, d]` take the slots from `start` on, as keys or as values."""
        rows = rows.contiguous()
        count = ctypes.c_int64(rows.shape[1])
        self.library.store(*_pages(pages), len(rows), ctypes.c_int64(start), count, _pointer(rows), int(values))


def _by_heads(heads: int, scores: int, some: Callable[[slice], None]) -> None:
    """Does `some` of all heads, each of which has so many scores: by as many threads as torch has, where that is worth
    beginning them."""
    threads = min(torch.get_num_threads(), heads, heads * scores // WORTH_A_THREAD)
    if threads <= 1:
        some(slice(0, heads))
        return
    edges = [heads * thread // threads for thread in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, map(slice, edges, edges[1:])))


def _pages(pages: Pages, head: int = 0) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    """Where the rows of the heads from `head` on lie."""
    return _pointer(pages.addresses), ctypes.c_int64(pages.offset + head * pages.tensors[0].stride(1))


def _ends(tokens: range) -> tuple[ctypes.c_int64, ctypes.c_int64]:
    return ctypes.c_int64(tokens.start), ctypes.c_int64(tokens.stop)


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def low_bit(head_dim: int, value_bits: int, group: int) -> LowBitLibrary | None:
    """The library for these shapes; None where the code does not take them, or cannot be compiled."""
    if head_dim % 32 or group > MOST_QUERIES:
        return None
    library = compiled("low_bit", HEAD_DIM=head_dim, VALUE_BITS=value_bits, PAGE_BLOCKS=PAGE_BLOCKS)
    ranking = compiled("best_scores")
    if library is None or ranking is None:
        return None
    ranking.select_best.restype = ctypes.c_int64
    return LowBitLibrary(library, ranking, head_dim)


def has_bfloat16_vectors() -> bool:
    """Whether bfloat16 is multiplied in vectors of AVX-512. False on processors with AMX, which torch uses."""
    tiles = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    return processor_level() == "avx512_bf16" and not tiles


def compiled(name: str, **constants: int) -> ctypes.CDLL | None:
    """`name`.c of this folder with these constants; None where it cannot be compiled."""
    return _load(name, tuple(f"-D{constant}={value}" for constant, value in constants.items()))


@functools.cache
def _load(name: str, constants: tuple[str, ...]) -> ctypes.CDLL | None:
    source = Path(__file__).with_name(f"{name}.c")
    return load_library(source, (*FLAGS, *constants), f"{name}.c is done without, torch computes instead")
