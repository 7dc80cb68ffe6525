"""Dispatch each operation of the decode step to Triton or torch.

Triton runs on CUDA tensors. torch runs elsewhere, for float64, and if Triton is not installed. `lists` and `segments`
define the results and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from . import lists, low_bit, low_bit_cpu, low_bit_lists, norm, rotary, segments
from .lists import Scores
from .low_bit import Layout, LowBitQuery
from .pages import Pages, PageTable
from .pointer_table import PointerTable
from .segments import Run

FEW = 32
"""Largest number of tokens for which a norm or a rotation is one launch: in a decode step, launching takes longer than
computing."""


def _compiled(tensor: torch.Tensor) -> bool:
    """Return whether Triton runs operations on `tensor`."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and find_spec("triton") is not None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x `[T, D]` by its root mean square and multiply by weight `[D]`."""
    module: Any = norm
    if _compiled(x) and len(x) <= FEW:
        from . import triton_norm as module
    normed: torch.Tensor = module.rms_norm(x, weight, eps)
    return normed


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x `[heads, T, d]` times cos plus x with swapped halves times the signed sin, each `[1, T, d]`."""
    module: Any = rotary
    if _compiled(x) and x.stride(2) == 1 and 0 < x.shape[1] <= FEW:
        from . import triton_rotary as module
    rotated: torch.Tensor = module.rotate_halves(x, cos, sin)
    return rotated


def gather_rows(rows: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """Copy the rows ids `[P, n]` of `rows` `[R, w]` to out `[P, n, w]`: the first `counts[p]` of each list.

    `rows` may have any dtype. It lies in device memory or in page-locked host memory. Without Triton, the ids are read
    on the host.
    """
    module: Any = lists
    if _compiled(ids):
        from . import triton_gather as module
    module.gather_rows(rows, ids, counts, out)


def gather_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    bases: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Copy K and V of tokens `[P, n]` from `rows` `[R, w]` to out `[2, P, n, w]`.

    Only the first `counts[p]` tokens of each list are copied (all if None). `bases` `[B, C]` are the first rows of
    their blocks, `planes` `[2, Hkv]` the offsets of layer and head. `rows` may lie in the memory that `gather_rows`
    accepts.
    """
    module: Any = lists
    if _compiled(tokens):
        from . import triton_gather as module
    module.gather_tokens(rows, tokens, counts, bases, planes, out)


def write_rows(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, newest: torch.Tensor, planes: torch.Tensor
) -> None:
    """Write the newest stored vectors k, v `[P, w]` to `rows` `[R, w]` at offsets `newest` `[B]` plus `planes` `[2,
    Hkv]`.

    `rows` may lie in the memory that `gather_rows` accepts.
    """
    module: Any = lists
    if _compiled(newest):
        from . import triton_gather as module
    module.write_rows(rows, k, v, newest, planes)


def keep_rows(k: torch.Tensor, v: torch.Tensor, kept: PointerTable, places: torch.Tensor) -> None:
    """Write the newest k, v `[P, d]` to position `places[b]` of the KV that each sequence keeps on the device."""
    module: Any = lists
    if _compiled(k):
        from . import triton_append as module
    module.keep_rows(k, v, kept, places)


def read_lists(table: PointerTable, rows: int, counts: torch.Tensor, page: int = 1) -> torch.Tensor:
    """Return the first `rows` rows of each list `[P, rows, w]`, 0 behind those of the first `counts[b]` tokens."""
    module: Any = lists
    if _compiled(counts):
        from . import triton_entries as module
    found: torch.Tensor = module.read_lists(table, rows, counts, page)
    return found


def write_lists(entries: torch.Tensor, table: PointerTable, counts: torch.Tensor, page: int = 1) -> None:
    """Write entries `[P, rows, w]` of the first `counts[b]` tokens of each list."""
    module: Any = lists
    if _compiled(counts):
        from . import triton_entries as module
    module.write_lists(entries, table, counts, page)


def append_entries(entries: torch.Tensor, table: PointerTable, slots: torch.Tensor, page: int) -> None:
    """Store entries `[P, w]` in row `slots[p] // page` of each list: the minimum if the row has earlier tokens."""
    module: Any = lists
    if _compiled(slots):
        from . import triton_entries as module
    module.append_entries(entries, table, slots, page)


def within(scores: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor, page: int = 1) -> Scores:
    """Set scores `[P, G, N]` of pages without a token in [start, stop) to -inf and compute their statistics."""
    module: Any = lists
    if _compiled(scores):
        from . import triton_entries as module
    found: Scores = module.within(scores, starts, stops, page)
    return found


def partial_scores(
    q: torch.Tensor, keys: PointerTable, starts: torch.Tensor, stops: torch.Tensor, tokens: int
) -> Scores:
    """Score queries q `[P, G, r]` with partial keys at tokens [start, stop) of each list."""
    module: Any = lists
    if _compiled(q):
        from . import triton_scores as module
    found: Scores = module.partial_scores(q, keys, starts, stops, tokens)
    return found


def quantised_scores(
    q: torch.Tensor,
    packed: PointerTable,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """Score queries q `[P, G, d]` with keys packed in `bits` bits at tokens [start, stop) of each list."""
    module: Any = lists
    if _compiled(q):
        from . import triton_scores as module
    found: Scores = module.quantised_scores(q, packed, mean, step, bits, starts, stops, tokens)
    return found


def select_tokens(
    found: Scores,
    starts: torch.Tensor,
    stops: torch.Tensor,
    kv_heads: int,
    alpha: float,
    limits: torch.Tensor,
    cap: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select tokens by threshold and best score. Return ids `[P, cap]` and the number of valid ids `[P]`."""
    module: Any = lists
    if _compiled(found.scores):
        from . import triton_select as module
    chosen: tuple[torch.Tensor, torch.Tensor] = module.select_tokens(found, starts, stops, kv_heads, alpha, limits, cap)
    return chosen


def attend_counted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[P, G, d]` to the first `counts[p]` of k, v `[P, n, d]`. Return out and lse."""
    module: Any = lists
    if _compiled(q):
        from . import triton_attention as module
    part: tuple[torch.Tensor, torch.Tensor] = module.attend_counted(q, k, v, counts, scale)
    return part


def attend_kept(
    q: torch.Tensor,
    kept: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[P, G, d]` to kept and fetched KV together. Return out and lse.

    Kept KV are the positions [start, stop) of each list. Fetched KV are the first `counts[p]` of k, v `[P, n, d]`.
    """
    module: Any = lists
    if _compiled(q):
        from . import triton_resident as module
    whole: tuple[torch.Tensor, torch.Tensor] = module.attend_kept(q, kept, starts, stops, k, v, counts, scale)
    return whole


def merge_parts(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the outputs and lses of S parts by log-sum-exp into one output `[R, d]` and lse `[R]`."""
    module: Any = lists
    if _compiled(outs):
        from . import triton_attention as module
    whole: tuple[torch.Tensor, torch.Tensor] = module.merge_parts(outs, lses)
    return whole


def append_partial(k: torch.Tensor, basis: torch.Tensor, keys: PointerTable, slots: torch.Tensor) -> None:
    """Skew the newest key k `[P, d]` of each list and write it as column `slots[p]` of its partial keys."""
    module: Any = lists
    if _compiled(k):
        from . import triton_append as module
    module.append_partial(k, basis, keys, slots)


def append_quantised(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    packed: PointerTable,
    slots: torch.Tensor,
) -> None:
    """Skew and quantise the newest key k `[P, d]` of each list and pack it into slot `slots[p]`."""
    module: Any = lists
    if _compiled(k):
        from . import triton_append as module
    module.append_quantised(k, basis, mean, step, bits, packed, slots)


def attend_runs(q: torch.Tensor, runs: Sequence[Run], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[H, B, d]` to runs of KV that neighbouring sequences share. Return out `[H, B, d]` and lse `[H,
    B]`."""
    module: Any = segments
    if _compiled(q):
        from . import triton_segments as module
    whole: tuple[torch.Tensor, torch.Tensor] = module.attend_runs(q, runs, scale)
    return whole


def ask_low_bit(q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range) -> LowBitQuery:
    """Return a query object of q `[Hkv, G, d]` over the low-bit KV of `tokens`."""
    if low_bit_cpu.suits(q):
        return low_bit_cpu.ask(q, mean, pages, layout, tokens)
    if _compiled(q):
        from .triton_low_bit import FusedQuery

        return FusedQuery(q, mean, pages, layout, tokens)
    return LowBitQuery(q, mean, pages, layout, tokens)


def store_low_bit(pages: Pages, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """Quantise KV `[Hkv, m, d]` into the slots from `start` on, as keys or as values."""
    module: Any = low_bit_cpu if low_bit_cpu.suits(rows) else low_bit
    module.store_rows(pages, layout, rows, start, values=values)


def append_low_bit(
    k: torch.Tensor,
    v: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    mixing: torch.Tensor,
    layout: Layout,
    table: PageTable,
    slots: torch.Tensor,
) -> None:
    """Quantise the newest k, v `[P, d]` of each list into slot `slots[p]` of its low-bit KV."""
    module: Any = low_bit_lists
    if _compiled(k):
        from . import triton_low_bit_rows as module
    module.append_rows(k, v, basis, mean, mixing, layout, table, slots)


def score_low_bit(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    table: PageTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """Score queries q `[P, G, d]` with low-bit keys at tokens [start, stop) of each list."""
    module: Any = low_bit_lists
    if _compiled(q):
        from . import triton_low_bit as module
    found: Scores = module.scores(q, mean, layout, table, starts, stops, tokens)
    return found


def merge_approximate(
    q: torch.Tensor,
    mean: torch.Tensor,
    mixing: torch.Tensor,
    layout: Layout,
    table: PageTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    tokens: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge exact and low-bit attention into one softmax. Return out `[P, G, d]` and lse `[P, G]`.

    The arguments `out` and `lse` are those of the exact KV. The low-bit part covers the tokens [start, stop) of each
    list except the first `counts[p]` of chosen `[P, n]`.
    """
    module: Any = low_bit_lists
    if _compiled(q):
        from . import triton_low_bit as module
    whole: tuple[torch.Tensor, torch.Tensor] = module.merge_approximate(
        q, mean, mixing, layout, table, starts, stops, chosen, counts, tokens, out, lse
    )
    return whole
