"""This room's C code, compiled on first use (`native_code.py`): where it cannot be, callers take their torch path."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from ..native_code import load_library
from .pages import BLOCK, PAGE_BLOCKS, Pages

FLAGS = ("-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-std=c11")
QUERIES = 4
"""Query heads of a group that the code computes together; groups are padded to a multiple."""

MOST_QUERIES = 32
"""The largest group that it takes."""


@dataclass(frozen=True)
class ScoredTokens:
    """scores `[Hkv, G, n]`, and each query's largest and lse over them `[Hkv, G]`, where the first `group` queries of
    each KV head are meant."""

    scores: torch.Tensor
    peak: torch.Tensor
    lse: torch.Tensor
    group: int


@dataclass(frozen=True)
class LowBitLibrary:
    """`low_bit.c` for one head dimension and one number of bits of a value."""

    library: ctypes.CDLL

    def scores(
        self, weights: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, pages: Pages, tokens: range
    ) -> ScoredTokens:
        """Of queries that are int8 weights `[Hkv, G, d]`, scale and shift `[Hkv, G]`."""
        heads, group, _ = weights.shape
        queries = _queries(weights, scale, shift)
        padded, first = queries[0].shape[1], tokens.start // BLOCK * BLOCK
        out = torch.empty(heads, padded, -(-tokens.stop // BLOCK) * BLOCK - first)
        peak, total = torch.empty(heads, padded), torch.empty(heads, padded)
        self.library.score(
            *_pages(pages), heads, padded, *map(_pointer, queries),
            ctypes.c_int64(tokens.start), ctypes.c_int64(tokens.stop), _pointer(out), _pointer(peak), _pointer(total),
        )  # fmt: skip
        return ScoredTokens(out[:, :, tokens.start - first : tokens.stop - first], peak, peak + total.log(), group)

    def rank(self, found: ScoredTokens, alpha: float) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Of each token the best score less lse of a KV head's queries `[Hkv, n]`; whether any query's score is within
        alpha of its largest, uint8 `[n]`; how many scores are."""
        heads, padded, n = found.scores.shape
        values, passing = torch.empty(heads, n), torch.empty(n, dtype=torch.uint8)
        threshold, count = found.peak - alpha, self.library.rank
        count.restype = ctypes.c_int64
        within = count(
            _pointer(found.scores), ctypes.c_int64(found.scores.stride(1)), heads, found.group, padded,
            ctypes.c_int64(n), _pointer(found.lse), _pointer(threshold), _pointer(values), _pointer(passing),
        )  # fmt: skip
        return values, passing, int(within)

    def store(self, pages: Pages, rows: torch.Tensor, start: int, *, values: bool) -> None:
        """Rows `[Hkv, m, d]` take the slots from `start` on, as keys or as values."""
        rows = rows.contiguous()
        count = ctypes.c_int64(rows.shape[1])
        self.library.store(*_pages(pages), len(rows), ctypes.c_int64(start), count, _pointer(rows), int(values))

    def attend(
        self,
        weights: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        pages: Pages,
        hidden: torch.Tensor,
        blocks: range,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Out `[Hkv, G, d]` and lse `[Hkv, G]` of the same queries over the tokens of `blocks` whose `hidden` uint8
        `[Hkv, blocks * 64]` is 0, scores capped."""
        heads, group, d = weights.shape
        queries = _queries(weights, scale, shift)
        padded = queries[0].shape[1]
        out, peak, total = torch.empty(heads, padded, d), torch.empty(heads, padded), torch.empty(heads, padded)
        assert hidden.is_contiguous() and hidden.shape == (heads, len(blocks) * BLOCK)
        self.library.attend(
            *_pages(pages), heads, padded, *map(_pointer, queries), _pointer(hidden),
            ctypes.c_int64(blocks.start), ctypes.c_int64(blocks.stop), ctypes.c_float(softcap or 0.0),
            _pointer(out), _pointer(peak), _pointer(total),
        )  # fmt: skip
        out, peak, total = out[:, :group], peak[:, :group], total[:, :group]
        return out / total.clamp_min(1e-30).unsqueeze(-1), torch.where(total > 0, peak + total.log(), -torch.inf)


def _queries(weights: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the C code reads of queries, groups padded: int8 weights, and float32 their middle, scale and
    shift."""
    more = -weights.shape[1] % QUERIES
    whole = torch.nn.functional.pad(weights, (0, 0, 0, more)).contiguous()
    padded = (torch.nn.functional.pad(each, (0, more)).contiguous() for each in (scale, shift))
    return whole, whole.sum(-1, dtype=torch.float32).mul_(7.5), *padded


def _pages(pages: Pages) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    return _pointer(pages.addresses), ctypes.c_int64(pages.offset)


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def low_bit(head_dim: int, value_bits: int, group: int) -> LowBitLibrary | None:
    """The library for these shapes; None where the code does not take them, or cannot be compiled."""
    if head_dim % 32 or group > MOST_QUERIES:
        return None
    library = compiled("low_bit", HEAD_DIM=head_dim, VALUE_BITS=value_bits, PAGE_BLOCKS=PAGE_BLOCKS)
    return None if library is None else LowBitLibrary(library)


def compiled(name: str, **constants: int) -> ctypes.CDLL | None:
    """`name`.c of this folder with these constants; None where it cannot be compiled."""
    return _load(name, tuple(f"-D{constant}={value}" for constant, value in constants.items()))


@functools.cache
def _load(name: str, constants: tuple[str, ...]) -> ctypes.CDLL | None:
    source = Path(__file__).with_name(f"{name}.c")
    return load_library(source, (*FLAGS, *constants), f"{name}.c is done without, torch computes instead")
