"""Select tokens in Triton by threshold and top-n per head, without waiting for the host.

Eight launches process the scores `[P, G, N]`:

* The first reduces the maxima and sums of the blocks to one maximum and one sum per query head.
* The second marks the tokens that pass the threshold of any query head, and computes the *order* of each token: an
  integer that sorts like its score (int32 `[P, N]`, which stays in the L2 cache).
* Four build histograms of 256 bins, which determine the n-th largest order one byte at a time.
* One counts the selected tokens of each block.
* The last writes the selected tokens.

Only integers are added atomically, so the result does not depend on the order of programs. It equals that of the
reference, `lists.select_tokens`, including ties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .lists import Scores

_BLOCK = 1024
"""Number of tokens per program."""

_MARKED = 256
"""Maximum number of tokens per program of `_mark`.

A program handles all heads of a layer, so larger blocks would leave most multiprocessors idle.
"""

_TILE = 2048
"""Maximum number of scores that `_mark` reads, and of statistics that `_peaks_and_logs` reads, at a time."""

_PARTS, _COUNTED, _EARLIER = 128, 1024, 256
"""Maximum number of parts that `_peaks_and_logs` reads at a time, and numbers of blocks over which `_count` and
`_write` sum at a time.

They are constants, so that longer contexts do not cause a recompilation.
"""

_ABSENT = tl.constexpr(-(1 << 31))
"""The order of a token that passed no head. It is below the order of every float."""

_DIGITS = tl.constexpr(4)

_UNROLLED = tl.constexpr(4)
"""Number of heads whose scores `_mark` loads at a time."""


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """Map float32 numbers to int32 numbers that sort in the same order. -0 and +0 get the same number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _digit(order: tl.tensor, DIGIT: tl.constexpr) -> tl.tensor:
    """Return digit DIGIT (one byte, 0 is the highest) of an order as an unsigned number."""
    return ((order ^ -2147483648) >> (24 - 8 * DIGIT)) & 255


@triton.jit(do_not_specialize=["parts"])
def _peaks_and_logs(
    maxima: tl.tensor, sums: tl.tensor, peaks: tl.tensor, logs: tl.tensor, parts: tl.tensor,
    G: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Program p reduces the block maxima and sums `[G, parts]` of list p (one KV head of one sequence).

    It stores the largest score of each query head, and the log-sum-exp of its scores (0 if there are no tokens).
    """
    head, part = tl.arange(0, GROUP), tl.arange(0, PARTS)
    row = tl.program_id(0).to(tl.int64) * G + head
    peak, total = tl.full((GROUP,), float("-inf"), tl.float32), tl.zeros((GROUP,), tl.float32)
    for first in range(0, parts, PARTS):
        mask = (head < G)[:, None] & (first + part < parts)[None, :]
        block_maxima = tl.load(maxima + row[:, None] * parts + first + part[None, :], mask=mask, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(block_maxima, 1))
    finite_peak = tl.where(peak == float("-inf"), 0.0, peak)
    for first in range(0, parts, PARTS):
        mask = (head < G)[:, None] & (first + part < parts)[None, :]
        index = row[:, None] * parts + first + part[None, :]
        block_maxima = tl.load(maxima + index, mask=mask, other=float("-inf"))
        sizes = tl.load(sums + index, mask=block_maxima > float("-inf"), other=0.0)
        total += tl.sum(sizes * tl.exp(block_maxima - finite_peak[:, None]), 1)
    tl.store(peaks + row, peak, mask=head < G)
    tl.store(logs + row, tl.where(total > 0.0, finite_peak + tl.log(tl.maximum(total, 1e-30)), 0.0), mask=head < G)


@triton.jit(do_not_specialize=["kv_heads", "blocks", "lists"])
def _mark(
    scores: tl.tensor, peaks: tl.tensor, logs: tl.tensor, starts: tl.tensor, stops: tl.tensor, passing: tl.tensor,
    orders: tl.tensor, histograms: tl.tensor,
    tokens: tl.tensor, kv_heads: tl.tensor, blocks: tl.tensor, lists: tl.tensor, alpha: tl.tensor,
    G: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (b, i) applies the thresholds of all query heads to tokens [i * BLOCK, (i + 1) * BLOCK) of sequence b.

    The number of pairs (token, query head) that pass is stored in `passing[b, i]`. The order of each token that passes
    a query head is stored in `orders`. The first block of a sequence clears its histograms.
    """
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, head = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, GROUP)
    start, stop = tl.load(starts + b * kv_heads), tl.load(stops + b * kv_heads)
    inside = (token >= start) & (token < stop)
    mask = (head < G)[:, None] & inside[None, :]
    passes = tl.zeros((BLOCK,), tl.int32)
    for h in tl.range(0, kv_heads, loop_unroll_factor=_UNROLLED):
        row = (b * kv_heads + h) * G + head
        score = tl.load(scores + row[:, None] * tokens + token[None, :], mask=mask, other=float("-inf"))
        bound = tl.load(peaks + row, mask=head < G, other=float("inf")) - alpha
        passes += tl.sum((mask & (score >= bound[:, None])).to(tl.int32), 0)
    tl.store(passing + b * blocks + block, tl.sum(passes, 0))
    for h in tl.range(0, kv_heads, loop_unroll_factor=_UNROLLED):
        row = (b * kv_heads + h) * G + head
        score = tl.load(scores + row[:, None] * tokens + token[None, :], mask=mask, other=float("-inf"))
        if G > 1:
            score -= tl.load(logs + row, mask=head < G, other=0.0)[:, None]
        order = tl.where(passes > 0, _ordered(tl.max(score, 0)), _ABSENT)
        tl.store(orders + (b * kv_heads + h) * tokens + token, order, mask=token < tokens)
        if block == 0:
            for digit in tl.static_range(_DIGITS):
                bins = histograms + (digit * lists + b * kv_heads + h) * 256 + tl.arange(0, 256)
                tl.store(bins, tl.zeros((256,), tl.int32))


@triton.jit
def _count(
    passing: tl.tensor, limits: tl.tensor, b: tl.tensor, heads: tl.tensor, cap: tl.tensor, marked: tl.tensor,
    COUNTED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the number of tokens to select for sequence b (`selection.token_count`), at most `cap`."""
    sums, block = tl.zeros((COUNTED,), tl.int32), tl.arange(0, COUNTED)
    for first in range(0, marked, COUNTED):
        sums += tl.load(passing + b * marked + first + block, mask=first + block < marked, other=0)
    passes = tl.sum(sums, 0)
    return tl.minimum(tl.minimum((passes + heads - 1) // heads, tl.load(limits + b)), cap)


@triton.jit
def _bound(histograms: tl.tensor, p: tl.tensor, lists: tl.tensor, rank: tl.tensor, KNOWN: tl.constexpr) -> tl.tensor:
    """Return the first KNOWN bytes of the *bound*, which is the rank-th largest order of list p.

    Also return the rank of the bound among the orders that begin with these bytes. For orders, see the module
    docstring.
    """
    prefix = rank * 0
    for digit in tl.static_range(KNOWN):
        bins = tl.load(histograms + (digit * lists + p) * 256 + 255 - tl.arange(0, 256))
        above = tl.cumsum(bins, 0) < rank
        prefix = (prefix << 8) | (255 - tl.sum(above.to(tl.int32), 0))
        rank -= tl.sum(tl.where(above, bins, 0), 0)
    return prefix, rank


@triton.jit(do_not_specialize=["kv_heads", "lists", "heads", "cap", "marked"])
def _histogram(
    orders: tl.tensor, passing: tl.tensor, limits: tl.tensor, histograms: tl.tensor, tokens: tl.tensor,
    kv_heads: tl.tensor, lists: tl.tensor, heads: tl.tensor,
    cap: tl.tensor, marked: tl.tensor, DIGIT: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, i) counts the orders in block i of list p by their byte number DIGIT (0 is the highest).

    Only orders whose higher bytes equal those of the bound (`_bound`) are counted.
    """
    p, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    order = tl.load(orders + p * tokens + token, mask=token < tokens, other=_ABSENT)
    counted = order != _ABSENT
    if DIGIT > 0:
        n = _count(passing, limits, p // kv_heads, heads, cap, marked, COUNTED)
        prefix, _ = _bound(histograms, p, lists, n, DIGIT)
        digits = (order ^ -2147483648) >> (32 - 8 * DIGIT)
        counted &= ((digits ^ prefix) & ((1 << (8 * DIGIT)) - 1)) == 0
    histogram = histograms + (DIGIT * lists + p) * 256
    if DIGIT < 2:
        # Most orders have the same first digits, and atomic additions to one bin wait for each other, so count them
        # within the program first. For later digits, only the few orders near the bound are counted.
        bins, bin_index = tl.histogram(_digit(order, DIGIT), 256, mask=counted), tl.arange(0, 256)
        tl.atomic_add(histogram + bin_index, bins, mask=bins > 0, sem="relaxed")
    else:
        tl.atomic_add(histogram + _digit(order, DIGIT), 1, mask=counted, sem="relaxed")


@triton.jit(do_not_specialize=["kv_heads", "lists", "heads", "cap", "marked", "blocks"])
def _tally(
    orders: tl.tensor, passing: tl.tensor, limits: tl.tensor, histograms: tl.tensor, above: tl.tensor,
    equal: tl.tensor, counts: tl.tensor,
    tokens: tl.tensor, kv_heads: tl.tensor, lists: tl.tensor, heads: tl.tensor, cap: tl.tensor, marked: tl.tensor,
    blocks: tl.tensor, COUNTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """In block i of list p, program (p, i) counts the orders above the bound and the orders equal to the bound.

    For the bound, see `_bound`. The first program of a list also stores the number of selected tokens in the list.
    """
    p, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    n = _count(passing, limits, p // kv_heads, heads, cap, marked, COUNTED)
    prefix, _ = _bound(histograms, p, lists, n, 4)
    order = tl.load(orders + p * tokens + token, mask=token < tokens, other=_ABSENT)
    bound = prefix ^ -2147483648
    tl.store(above + p * blocks + block, tl.sum(((order > bound) & (n > 0)).to(tl.int32), 0))
    tl.store(equal + p * blocks + block, tl.sum(((order == bound) & (n > 0)).to(tl.int32), 0))
    if block == 0:
        tl.store(counts + p, n)


@triton.jit(do_not_specialize=["kv_heads", "lists", "heads", "cap", "marked", "blocks"])
def _write(
    orders: tl.tensor, passing: tl.tensor, limits: tl.tensor, histograms: tl.tensor, above: tl.tensor,
    equal: tl.tensor, out: tl.tensor,
    tokens: tl.tensor, kv_heads: tl.tensor, lists: tl.tensor, heads: tl.tensor, cap: tl.tensor, marked: tl.tensor,
    blocks: tl.tensor, COUNTED: tl.constexpr, EARLIER: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (p, i) writes the selected tokens of block i of list p in ascending order.

    They follow the selected tokens of earlier blocks. If several orders equal the bound, the first tokens are selected.
    Entries of `out` after the selected tokens become 0.
    """
    p, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, index = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EARLIER)
    n = _count(passing, limits, p // kv_heads, heads, cap, marked, COUNTED)
    prefix, ties = _bound(histograms, p, lists, n, 4)
    bound = prefix ^ -2147483648
    greater_counts, tied_counts = tl.zeros((EARLIER,), tl.int32), tl.zeros((EARLIER,), tl.int32)
    for first in range(0, block, EARLIER):
        greater_counts += tl.load(above + p * blocks + first + index, mask=first + index < block, other=0)
        tied_counts += tl.load(equal + p * blocks + first + index, mask=first + index < block, other=0)
    greater, tied = tl.sum(greater_counts, 0), tl.sum(tied_counts, 0)
    order = tl.load(orders + p * tokens + token, mask=token < tokens, other=_ABSENT)
    is_tied = ((order == bound) & (token < tokens)).to(tl.int32)
    selected = (order > bound) | ((is_tied > 0) & (tied + tl.cumsum(is_tied, 0) <= ties))
    is_selected = (selected & (n > 0)).to(tl.int32)
    target = greater + tl.minimum(tied, ties) + tl.cumsum(is_selected, 0) - 1
    tl.store(out + p * cap + target, token.to(tl.int64), mask=(is_selected > 0) & (target < cap))
    tl.store(out + p * cap + token, tl.zeros((BLOCK,), tl.int64), mask=(token >= n) & (token < cap))


def select_tokens(
    scored: Scores,
    starts: torch.Tensor,
    stops: torch.Tensor,
    kv_heads: int,
    alpha: float,
    limits: torch.Tensor,
    cap: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select tokens for a batch by the scores in `scored`, in eight launches. See `lists.select_tokens`.

    The scores must be contiguous float32 `[P, G, N]` with P = B * Hkv. `cap` must not exceed N.
    """
    (lists, group, tokens), parts, device = scored.scores.shape, scored.maxima.shape[2], scored.scores.device
    assert lists == len(limits) * kv_heads and scored.scores.dtype == torch.float32 and 1 <= cap <= tokens
    assert starts.shape == stops.shape == (lists,) and scored.scores.is_contiguous()
    assert scored.maxima.is_contiguous() and scored.sums.is_contiguous() and scored.sums.shape == (lists, group, parts)
    width: int = triton.next_power_of_2(group)
    per_mark = max(1, min(_MARKED, _TILE // width))
    blocks, marked, sequences = triton.cdiv(tokens, _BLOCK), triton.cdiv(tokens, per_mark), len(limits)
    sizes = (lists * tokens, sequences * marked, _DIGITS.value * lists * 256, lists * blocks, lists * blocks, lists)
    buffers = [torch.empty(size, dtype=torch.int32, device=device) for size in sizes]
    orders, passing, histograms, above, equal, counts = buffers
    peaks, logs = torch.empty(2, lists * group, dtype=torch.float32, device=device)
    heads = {"G": group, "GROUP": width}
    listed = max(1, min(_PARTS, _TILE // width))
    _peaks_and_logs[(lists,)](scored.maxima, scored.sums, peaks, logs, parts, PARTS=listed, **heads)
    _mark[(sequences, marked)](
        scored.scores, peaks, logs, starts, stops, passing, orders, histograms,
        tokens, kv_heads, marked, lists, float(alpha), BLOCK=per_mark, num_warps=2, **heads,
    )  # fmt: skip
    shape = (tokens, kv_heads, lists, kv_heads * group, cap, marked)
    wide = {"COUNTED": _COUNTED, "BLOCK": _BLOCK}
    for digit in range(_DIGITS.value):
        _histogram[(lists, blocks)](orders, passing, limits, histograms, *shape, DIGIT=digit, **wide)
    _tally[(lists, blocks)](orders, passing, limits, histograms, above, equal, counts, *shape, blocks, **wide)
    out = torch.empty(lists, cap, dtype=torch.int64, device=device)
    _write[(lists, blocks)](
        orders, passing, limits, histograms, above, equal, out, *shape, blocks, EARLIER=_EARLIER, **wide
    )
    return out, counts
