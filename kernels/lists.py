"""Batched operations of the decode step, in torch: the reference implementations of the Triton kernels.

A *list* is the data of one KV head of one sequence: its keys, scores or selected tokens. There are P = B * Hkv lists,
and the lists of a sequence are adjacent. Int32 tensors (`starts`, `stops`, `counts`) contain the valid range of each
list, so that the shapes of all tensors are static. Data that a sequence keeps between steps is stored in one tensor per
sequence (`PointerTable`).

Scores and log-sum-exp (LSE, natural logarithm) are float32 (float64 for float64 inputs). An empty list has LSE -inf and
output 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core import BLOCK_SIZE
from .pointer_table import PointerTable
from .pool_rows import DeviceRows, gather_tokens
from .reference import merge_lse
from .selection import pack, quantise, select_tokens_reference, skew, unpack
from .selection import quantised_scores as packed_scores


@dataclass(frozen=True)
class Scores:
    """Scores of P = B * Hkv lists with N tokens each, and statistics of the S blocks of tokens in each list."""

    scores: torch.Tensor  # Scores `[P, G, N]`. Invalid tokens have the score -inf.
    # Largest score of each query head in each block, `[P, G, S]`. It is -inf if a block has no valid tokens.
    maxima: torch.Tensor
    sums: torch.Tensor  # sum of exp(score - maximum) of each query head in each block, `[P, G, S]`

    @property
    def lse(self) -> torch.Tensor:
        return torch.logsumexp(self.maxima + self.sums.log(), -1)


# ------------------------------------------------------------------------------------------------------------ rows


def store_resident(k: torch.Tensor, v: torch.Tensor, resident: PointerTable, indices: torch.Tensor) -> None:
    """Write the newest K and V `[P, d]` to index `indices[b]` of each sequence's resident KV. P = B * Hkv.

    The resident KV of a sequence is `[2 * Hkv, capacity, d]`: K of all heads, then V of all heads. If V is not stored,
    it is `[Hkv, capacity, d]`, and only K is written. `indices` is int64 `[B]`. Sequences with a negative index are
    skipped.
    """
    stored = (k, v)[: resident.lists // len(k)]
    newest = torch.cat([rows.view(len(resident.tensors), -1, rows.shape[1]) for rows in stored], dim=1)
    for rows, sequence_newest, index in zip(resident.tensors, newest, indices, strict=True):
        if index >= 0:
            rows.index_copy_(1, index.view(1), sequence_newest.unsqueeze(1))


def gather_slots(table: PointerTable, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Copy K and V from the `slots` `[P, n]` (int64) of each list to `out` `[2, P, n, w]`. P = B * Hkv.

    `table` has one tensor per sequence, `[2 * Hkv, capacity, w]`: K of all heads, then V of all heads. If V is not
    stored, each tensor is `[Hkv, capacity, w]`, and `out` is `[1, P, n, w]`. Negative slots are skipped.
    """
    for p, (kv, list_slots) in enumerate(_by_head(table, slots)):
        valid = list_slots >= 0
        out[:, p, valid] = kv[:, list_slots[valid]]


def scatter_slots(table: PointerTable, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy `rows` `[2, P, n, w]` to the `slots` `[P, n]` of each list: the inverse of `gather_slots`."""
    for p, (kv, list_slots) in enumerate(_by_head(table, slots)):
        valid = list_slots >= 0
        kv[:, list_slots[valid]] = rows[:, p, valid]


def _by_head(table: PointerTable, slots: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield K and V `[2, capacity, w]` (or only K) and the slots `[n]` of each list."""
    kv_heads = len(slots) // len(table.tensors)
    for p, list_slots in enumerate(slots):
        b, head = divmod(p, kv_heads)
        yield table.tensors[b].unflatten(0, (-1, kv_heads))[:, head], list_slots


# --------------------------------------------------------------------------------------------------------- entries


def read_lists(table: PointerTable, rows: int, counts: torch.Tensor, page: int = 1) -> torch.Tensor:
    """Copy the first `rows` rows of each list into one tensor `[X * B, rows, w]`.

    For each sequence b, `table` has one tensor `[X, n_b, w]` that contains X lists. A row covers `page` tokens. Rows
    after the first `counts[b]` tokens become 0.
    """
    first = table.tensors[0]
    lists = first.new_zeros(len(table.tensors), table.heads, rows, first.shape[2])
    for stored, target, count in zip(table.tensors, lists, (-(-counts // page)).tolist(), strict=True):
        target[:, :count] = stored[:, : min(count, rows)]
    return lists.flatten(0, 1)


def write_lists(entries: torch.Tensor, table: PointerTable, counts: torch.Tensor, page: int = 1) -> None:
    """Write `entries` `[X * B, rows, w]` to the rows of the first `counts[b]` tokens: the inverse of `read_lists`."""
    row_counts = (-(-counts // page)).tolist()
    for stored, source, count in zip(table.tensors, entries.split(table.heads), row_counts, strict=True):
        stored[:, : min(count, entries.shape[1])] = source[:, :count]


def append_entries(entries: torch.Tensor, table: PointerTable, slots: torch.Tensor, page: int) -> None:
    """Merge the newest token's entry `[P, w]` of each list into row `slots[p] // page` of that list.

    A row contains the element-wise minimum of the entries of `page` adjacent tokens. `slots` is int64 `[P]`. Lists with
    a negative slot are skipped.
    """
    sequence_slots = slots[:: table.heads].tolist()
    for stored, entry, slot in zip(table.tensors, entries.split(table.heads), sequence_slots, strict=True):
        if slot >= 0:
            row = stored[:, slot // page]
            row.copy_(entry if slot % page == 0 else torch.minimum(row, entry))


# ---------------------------------------------------------------------------------------------------------- scores


def partial_scores(
    q: torch.Tensor, keys: PointerTable, starts: torch.Tensor, stops: torch.Tensor, tokens: int
) -> Scores:
    """Score partial keys (the most important columns of skewed keys) with skewed and scaled queries q `[P, G, r]`.

    Args:
        keys: Partial keys `[Hkv, r, N_b]` of each sequence b, of any dtype.
        starts, stops: Valid tokens [start, stop) of each list, int32 `[P]`.
        tokens: Length N of the result. Must be at least the length of the longest list.
    """
    scores = q.new_full((*q.shape[:2], tokens), -math.inf)
    for sequence_keys, query, target in zip(keys.tensors, q.split(keys.heads), scores.split(keys.heads), strict=True):
        n = min(tokens, sequence_keys.shape[2])
        target[:, :, :n] = torch.bmm(query, sequence_keys[:, :, :n].to(q.dtype))
    return mask_scores(scores, starts, stops)


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
    """Score quantised keys with skewed and scaled queries q `[P, G, d]`. P = B * Hkv.

    Args:
        packed: Keys of each sequence b, int8 `[Hkv, m_b, w]` with w >= d. Each byte contains the codes of 8 / bits
            tokens (`selection.pack`).
        mean, step: Quantisation levels `[Hkv, d]` (`selection.quantise`).
        bits: Number of bits per code.
        starts, stops, tokens: See `partial_scores`.
    """
    scores = q.new_full((*q.shape[:2], tokens), -math.inf)
    for keys, query, target in zip(packed.tensors, q.split(packed.heads), scores.split(packed.heads), strict=True):
        n = min(tokens, keys.shape[1] * (8 // bits))
        target[:, :, :n] = packed_scores(query, keys[:, :, : q.shape[2]], mean, step, bits)[:, :, :n]
    return mask_scores(scores, starts, stops)


def mask_scores(scores: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor, page: int = 1) -> Scores:
    """Set the scores of pages that have no token in [start, stop) to -inf, and compute the statistics of each block.

    `scores` `[P, G, N]` has one score per page of `page` tokens.
    """
    token = torch.arange(scores.shape[2], device=scores.device) * page
    outside = (token + page <= starts[:, None]) | (token >= stops[:, None])
    scores = scores.masked_fill(outside.unsqueeze(1), -math.inf)
    maxima = scores.amax(-1, keepdim=True)
    return Scores(scores, maxima, (scores - finite(maxima)).exp().sum(-1, keepdim=True))


def select_tokens(
    scored: Scores,
    starts: torch.Tensor,
    stops: torch.Tensor,
    kv_heads: int,
    alpha: float,
    limits: torch.Tensor,
    cap: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `selection.select_tokens` to every sequence of a batch, with lists of a fixed length.

    Args:
        scored: Scores of all lists.
        starts, stops: Valid tokens of each list, the same for all lists of a sequence.
        alpha: See `selection.select_tokens`.
        limits: Maximum number of tokens to select per KV head of each sequence (`selection_limit`), int32 `[B]`.
        cap: Length of the lists in the result.

    Returns:
        Ascending token indices int64 `[P, cap]`, padded with 0, and the number of valid indices int32 `[P]`.
    """
    lists, group, _ = scored.scores.shape
    tokens = torch.zeros(lists, cap, dtype=torch.int64, device=scored.scores.device)
    counts = torch.zeros(lists, dtype=torch.int32, device=scored.scores.device)
    lses = scored.lse.masked_fill(scored.lse.isneginf(), 0).unsqueeze(-1)
    for b, limit in enumerate(limits.tolist()):
        lists_of_sequence = slice(b * kv_heads, (b + 1) * kv_heads)
        start, stop = int(starts[lists_of_sequence.start]), int(stops[lists_of_sequence.start])
        lse = None if group == 1 else lses[lists_of_sequence]
        chosen = select_tokens_reference(scored.scores[lists_of_sequence, :, start:stop], alpha, min(limit, cap), lse)
        counts[lists_of_sequence] = n = chosen.shape[1]
        tokens[lists_of_sequence, :n] = chosen.sort(1).values + start
    return tokens, counts


# ------------------------------------------------------------------------------------------------------- attention


def attend_counted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[P, G, d]` to the first `counts[p]` entries of k and v `[P, n, d]`. P = B * Hkv.

    Return out `[P, G, d]` and lse `[P, G]`.
    """
    return _attend(q, k, v, torch.arange(k.shape[1], device=k.device) >= counts[:, None], scale)


def attend_resident(
    q: torch.Tensor,
    resident: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[P, G, d]` to resident and fetched KV in one softmax. Return out `[P, G, d]` and lse `[P, G]`.

    Args:
        resident: Resident KV of each sequence, `[2 * Hkv, capacity, d]`, or `[Hkv, capacity, d]` if the values are the
            keys. All capacities are equal.
        starts, stops: Valid range of the resident KV of each list, int32 `[P]`.
        k, v: Fetched KV `[P, n, d]`.
        counts: Number of valid fetched entries of each list, int32 `[P]`.
        scale: Factor by which the scores q·k are multiplied.
    """
    parts = [_attend_in_range(q, resident, starts, stops, scale), attend_counted(q, k, v, counts, scale)]
    outs, lses = zip(*parts, strict=True)
    return merge_lse(outs, lses)


def attend_copies(
    q: torch.Tensor,
    resident: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    copies: DeviceRows,
    bases: torch.Tensor,
    firsts: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to resident KV and to KV in copies of blocks in one softmax, like `attend_resident`.

    Args:
        copies: Copies of all blocks in device memory.
        bases: Id of the first row of each block, int64 `[B, blocks]` (see `pool_rows.gather_tokens`).
        firsts, ends: Range of the tokens in blocks that each list attends to, int32 `[P]`.
    """
    lists, token = len(q), torch.arange(bases.shape[1] * BLOCK_SIZE, device=q.device)
    out_of_range = (token < firsts[:, None]) | (token >= ends[:, None])
    kv = q.new_zeros(len(copies.planes), lists, len(token), q.shape[2])
    tally = bases.new_zeros(len(bases), 2)
    gather_tokens(copies.rows, token.expand(lists, -1), None, bases, copies.planes, kv, copies, tally)
    parts = [_attend_in_range(q, resident, starts, stops, scale), _attend(q, kv[0], kv[-1], out_of_range, scale)]
    outs, lses = zip(*parts, strict=True)
    return merge_lse(outs, lses)


def _attend_in_range(
    q: torch.Tensor, resident: PointerTable, starts: torch.Tensor, stops: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    planes = torch.stack(resident.tensors).unflatten(1, (resident.lists // len(q), -1)).transpose(0, 1).flatten(1, 2)
    keys, values = planes[0], planes[-1]
    column = torch.arange(keys.shape[1], device=q.device)
    hidden = (column < starts[:, None]) | (column >= stops[:, None])
    return _attend(q, keys, values, hidden, scale)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[P, G, d]` to k and v `[P, n, d]`, except entries that are `hidden` (bool `[P, n]`)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.bmm(q.to(wide), k.to(wide).transpose(1, 2)) * scale
    scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - finite(lse).unsqueeze(-1)).exp()
    return torch.bmm(weights, v.to(wide).masked_fill(hidden.unsqueeze(2), 0)), lse


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Replace -inf (the LSE of an empty list) with the lowest finite value, so that exp(-inf - lse) is 0, not NaN."""
    return lse.clamp_min(torch.finfo(lse.dtype).min)


# ---------------------------------------------------------------------------------------------------- scoring keys


def append_partial(k: torch.Tensor, basis: torch.Tensor, keys: PointerTable, slots: torch.Tensor) -> None:
    """Skew the newest key k `[P, d]` of each list, and store it as column `slots[p]` of its partial keys.

    The partial keys of sequence b are `[Hkv, r, N_b]`. `basis` is `[Hkv, d, r]`, or `[P, d, r]` with one basis per
    list. `slots` is int64 `[P]`. Lists with a negative slot are skipped.
    """
    skewed = _skewed(k, basis).to(keys.dtype)
    heads = torch.arange(keys.heads, device=k.device)
    for stored, columns, slot in zip(keys.tensors, skewed.split(keys.heads), slots.split(keys.heads), strict=True):
        if slot[0] >= 0:
            stored[heads, :, slot] = columns


def append_quantised(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    packed: PointerTable,
    slots: torch.Tensor,
) -> None:
    """Skew and quantise the newest key k `[P, d]` of each list, and store its codes in slot `slots[p]`.

    For `mean`, `step` `[Hkv, r]` and `packed`, see `quantised_scores`. Lists with a negative slot are skipped.
    """
    fields, heads = 8 // bits, torch.arange(packed.heads, device=k.device)
    skewed_keys = _skewed(k, basis).unsqueeze(1)
    codes = zip(skewed_keys.split(packed.heads), slots.split(packed.heads), packed.tensors, strict=True)
    for skewed, slot, row in codes:
        if slot[0] < 0:
            continue
        stored = row[:, :, : basis.shape[2]]
        codes_in_byte = unpack(stored[heads, slot // fields].unsqueeze(1), bits)
        codes_in_byte[heads, slot % fields] = quantise(skewed, mean, step, bits).squeeze(1)
        stored[heads, slot // fields] = pack(codes_in_byte, bits).squeeze(1)


def skew_queries(q: torch.Tensor, basis: torch.Tensor, kv_heads: int, scale: float) -> torch.Tensor:
    """Multiply the queries q `[H, B, d]` of a batch by `basis` and `scale`. Return contiguous `[P, G, r]`.

    `basis` is `[Hkv, d, r]`, or `[P, d, r]` with one matrix for each pair of a sequence and a KV head (P = B * Hkv).
    """
    batch, d = q.shape[1:]
    grouped = q.reshape(kv_heads, -1, batch, d).permute(2, 0, 1, 3)
    if len(basis) > kv_heads:
        return skew(grouped.flatten(0, 1), basis).mul_(scale)
    skewed = skew(grouped.transpose(0, 1).flatten(1, 2), basis).mul_(scale)
    return skewed.view(kv_heads, batch, -1, basis.shape[2]).transpose(0, 1).flatten(0, 1)


def _skewed(k: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    return skew(k.view(-1, len(basis), k.shape[1]).transpose(0, 1), basis).transpose(0, 1).flatten(0, 1)
