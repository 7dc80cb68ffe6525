"""Functions that call the C code of this folder, which is compiled on first use.

They return None if the code is not available; callers then use torch.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..utils import native_libraries
from ..utils.allocator import RecycledMemory
from ..utils.native_code import check_structure, processor_level
from . import team
from .pages import BLOCK, PAGE_BLOCKS, Pages

MAX_QUERIES = 32
"""Maximum number of queries per KV head that `low_bit.c` supports."""

WORTH_A_THREAD = 1 << 16
"""Smallest number of scores per thread: 20 to 60 us of work, many times the cost of waking a thread."""

MIN_BLOCKS, MAX_PARTS = 16, 16
"""Minimum number of blocks in a part of a KV head, and maximum number of parts per head.

The split does not depend on the number of threads, so neither does the rounding of results.
"""

RANKED_TOKENS = 4096
"""Number of tokens in a part of `rank`. Its intermediate results fit the first-level cache."""

PADDING = 64
"""Number of elements beyond the end of an array that `best_scores.c` may read or write."""

SCRATCH = RecycledMemory()
"""Memory for intermediate values of all tokens of a context. All layers of the process reuse it."""


class _Call(ctypes.Structure):
    """The structure `Call` of low_bit.c."""

    _fields_: ClassVar = [
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("offset", "heads", "group", "start", "stop", "per_part")),
        *((name, ctypes.c_void_p) for name in ("q", "mean", "scores", "peaks", "lses", "part_peaks", "part_sums")),
        ("skip", ctypes.c_void_p),
        ("skipped", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("part_outs", "mixed_sums", "unmixing", "outs", "lses_of_outs")),
    ]


class _StoreCall(ctypes.Structure):
    """The structure `StoreCall` of low_bit.c."""

    _fields_: ClassVar = [
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("offset", "heads", "slot", "count")),
        ("rows", ctypes.c_void_p),
        ("values", ctypes.c_int32),
    ]


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


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """Scores of the candidate tokens, kept for selection and for approximate attention.

    Attributes:
        scores: Scores `[Hkv, G, n]`.
        peak: Largest score of each query, `[Hkv, G]`.
        lse: Log-sum-exp of each query's scores, `[Hkv, G]`.
        call: The C call that computed the scores. `LowBitLibrary.merge` reuses its fields.
    """

    scores: torch.Tensor
    peak: torch.Tensor
    lse: torch.Tensor
    call: _Call | None = None


@dataclass(frozen=True, eq=False)
class LowBitLibrary:
    """Functions of `low_bit.c`, compiled for one head dimension and one number of bits per value element."""

    library: ctypes.CDLL
    head_dim: int

    def score(self, q: torch.Tensor, mean: torch.Tensor, pages: Pages, tokens: range) -> ScoredTokens:
        """Score the tokens in `tokens` for queries q `[Hkv, G, d]`.

        mean `[Hkv, d]` is the mean that was subtracted from the keys. q and mean must be contiguous.
        """
        heads, group, _ = q.shape
        start, stop = tokens.start, tokens.stop
        first, last = start // BLOCK, -(-stop // BLOCK)
        per_part, parts = _parts(last - first)
        scores = SCRATCH.empty((heads, group, (last - first) * BLOCK), torch.float32)
        small = torch.empty(2 + 2 * parts, heads, group)
        size, at = 4 * heads * group, small.data_ptr()
        call = _Call(
            pages.addresses.data_ptr(), pages.offset, heads, group, start, stop, per_part, q.data_ptr(),
            mean.data_ptr(), scores.data_ptr(), at, at + size, at + 2 * size, at + (2 + parts) * size,
        )  # fmt: skip
        self.library.score_all(ctypes.byref(call), team.runner(), _threads(heads * group * len(tokens)))
        shift = first * BLOCK
        return ScoredTokens(scores[:, :, start - shift : stop - shift], small[0], small[1], call)

    def merge(
        self,
        found: ScoredTokens,
        skip: torch.Tensor,
        softcap: float | None,
        unmixing: torch.Tensor,
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention with approximate attention to the scored tokens that are not in `skip`.

        Args:
            found: The result of `score`. Its pages must still exist.
            skip: Token indices that exact attention covers, int64 `[Hkv, m]`.
            softcap: Soft cap of the scores, or None.
            unmixing: Matrix `[d, d]` that rotates stored values back to the model's values.
            exact: out `[Hkv, G, d]` and lse `[Hkv, G]` of the exact attention. Float32 tensors are overwritten.

        Returns:
            Merged out `[Hkv, G, d]` and lse `[Hkv, G]`.
        """
        call = found.call
        assert call is not None
        heads, group, tokens = found.scores.shape
        blocks = found.scores.stride(1) // BLOCK
        _, parts = _parts(blocks)
        skip, results = skip.contiguous(), heads * group * parts
        out, lse = exact[0].float().contiguous(), exact[1].float().contiguous()
        room = torch.empty(heads * blocks * 2 + results * (self.head_dim + 1), dtype=torch.float32)
        call.skip, call.skipped, call.hidden = skip.data_ptr(), skip.shape[1], room.data_ptr()
        call.softcap, call.unmixing = softcap or 0.0, unmixing.data_ptr()
        call.outs, call.lses_of_outs = out.data_ptr(), lse.data_ptr()
        call.part_outs = room.data_ptr() + 8 * heads * blocks
        call.mixed_sums = call.part_outs + 4 * results * self.head_dim
        self.library.mix_all(ctypes.byref(call), team.runner(), _threads(heads * group * tokens))
        return out, lse

    def store(self, pages: Pages, rows: torch.Tensor, start: int, *, values: bool) -> None:
        """Quantise `rows` `[Hkv, m, d]` and store them in the slots from `start` on, as values or as keys."""
        rows = rows.contiguous()
        heads, count, _ = rows.shape
        call = _StoreCall(pages.addresses.data_ptr(), pages.offset, heads, start, count, rows.data_ptr(), values)
        team.run(self.library.store_rows, call, heads, _threads(rows.numel()))


def select(
    scores: torch.Tensor, peak: torch.Tensor, lse: torch.Tensor | None, alpha: float, limit: int
) -> torch.Tensor | None:
    """Select at most `limit` tokens per KV head, as `selection.select_tokens` does.

    Args:
        scores: Float32 scores `[Hkv, G, n]`.
        peak: Largest score of each query, `[Hkv, G]`.
        lse: Log-sum-exp of each query's scores, `[Hkv, G]`, or None if G = 1.
        alpha: Largest distance between a selected token's score and the peak.
        limit: Largest number of tokens to select per KV head.

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
    most = library.select_all(ctypes.byref(call), limit, team.runner(), _threads(heads * group * n))
    return chosen[: heads * most].view(heads, most)


def _parts(blocks: int) -> tuple[int, int]:
    """Return the number of blocks in a part, and the number of parts per KV head."""
    per_part = max(MIN_BLOCKS, -(-blocks // MAX_PARTS))
    return per_part, -(-blocks // per_part)


def _threads(scores: int) -> int:
    return max(1, min(team.threads(), scores // WORTH_A_THREAD))


def low_bit(head_dim: int, value_bits: int, group: int) -> LowBitLibrary | None:
    """Return the library for these shapes. Return None if the code does not support them or cannot be compiled."""
    return None if group > MAX_QUERIES else _low_bit(head_dim, value_bits)


@functools.cache
def _low_bit(head_dim: int, value_bits: int) -> LowBitLibrary | None:
    if head_dim % 32:
        return None
    library = compiled("low_bit", _Call, _StoreCall, HEAD_DIM=head_dim, VALUE_BITS=value_bits, PAGE_BLOCKS=PAGE_BLOCKS)
    if library is None:
        return None
    pointer = ctypes.c_void_p
    library.score_all.argtypes, library.score_all.restype = [pointer, pointer, ctypes.c_int], None
    library.mix_all.argtypes, library.mix_all.restype = [pointer, pointer, ctypes.c_int], None
    return LowBitLibrary(library, head_dim)


@functools.cache
def _best_scores() -> ctypes.CDLL | None:
    library = compiled("best_scores", _Ranking)
    if library is not None:
        library.select_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int]
        library.select_all.restype = ctypes.c_int64
    return library


def forget() -> None:
    """Unload the compiled code. The next call loads it for the current processor level."""
    _low_bit.cache_clear()
    _best_scores.cache_clear()
    compiled.cache_clear()


def has_tiles() -> bool:
    """Return whether torch multiplies bfloat16 matrices with AMX on this processor. AMX is faster than our C code."""
    return processor_level() == "avx512_bf16" and bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


@functools.cache
def compiled(name: str, *structures: type[ctypes.Structure], **constants: int) -> ctypes.CDLL | None:
    """Load `name`.c of this folder, compiled with `constants`. Return None if it is not available for this processor.

    Raises:
        RuntimeError: If one of `structures` differs from its definition in C.
    """
    library = native_libraries.load(name, **constants)
    if library is not None:
        for structure in structures:
            check_structure(library, structure)
    return library
