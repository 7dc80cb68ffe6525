"""The decode step's operations over *lists*, in torch: the definitions that the Triton kernels are tested against.

A list is one KV head of one sequence; P = B * Hkv lists, sequence-major. Lists of a batch differ in length: what counts
is said by tensors that lie beside the data (`starts`, `stops`, `counts`, int32), so that shapes are static and nothing
is asked of the host. What a sequence keeps from step to step is a tensor of its own (`PointerTable`). Scores and LSE
are float32 (float64 for float64), LSE is the natural logarithm, and a list without tokens has LSE -inf and output 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..core import CHUNK
from .pointer_table import PointerTable
from .selection import floor_share, group_scores, pack, quantise, skew, top_tokens_reference, unpack
from .selection import quantised_scores as packed_scores


@dataclass(frozen=True)
class Scores:
    """scores `[P, G, N]`, -inf outside each list's tokens. Of S blocks that these lie in: maxima `[P, G, S]`, each
    head's largest score, and sums `[P, G, S]` of exp(score - largest); -inf and 0 of a block without tokens."""

    scores: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor

    @property
    def maximum(self) -> torch.Tensor:
        """`[P, G]`, over each head's tokens."""
        return self.maxima.amax(-1)

    @property
    def lse(self) -> torch.Tensor:
        """`[P, G]`, of each head's tokens."""
        return torch.logsumexp(self.maxima + self.sums.log(), -1)


# ------------------------------------------------------------------------------------------------------------ rows


def gather_rows(rows: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """The first `counts[p]` rows of each list, from `rows` `[R, w]` by row ids int64 `[P, n]`, into out `[P, n, w]`;
    what lies behind them, or has a negative id, stays as it was. `rows` may be `out` itself, where no row that is read
    is written."""
    for p, count in enumerate(counts.tolist()):
        wanted = (ids[p, :count] >= 0).nonzero().squeeze(1)
        out[p, wanted] = rows.index_select(0, ids[p, wanted].to(rows.device)).to(out.device)


def gather_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    bases: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """K and V of the first `counts[p]` (None: all) of tokens int64 `[P, n]`, from `rows` `[R, w]` into out
    `[2, P, n, w]`; what lies behind them stays as it was. Token t of sequence b lies `t % CHUNK` rows behind
    `bases[b, t // CHUNK]` (int64 `[B, C]`), and the rows of K and V of a KV head `planes[0, h]` and `planes[1, h]`
    (int64 `[2, Hkv]`) behind that."""
    batch, heads, listed = len(bases), planes.shape[1], tokens.shape[1]
    at = tokens.reshape(batch, heads * listed)
    ids = (bases.gather(1, at // CHUNK) + at % CHUNK).view(batch, heads, listed)
    ids = (ids + planes.unsqueeze(1).unsqueeze(-1)).flatten(1, 2)
    counts = torch.full((len(tokens),), listed) if counts is None else counts
    for into, of in zip(out, ids, strict=True):
        gather_rows(rows, of, counts, into)


def write_rows(
    rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, newest: torch.Tensor, planes: torch.Tensor
) -> None:
    """The stored rows k, v `[P, w]` of each sequence's newest token go to `rows` `[R, w]`, `planes[0, h]` and
    `planes[1, h]` (int64 `[2, Hkv]`) behind `newest[b]` (int64 `[B]`); a negative one is nobody's."""
    meant = newest >= 0
    ids = (newest[meant].unsqueeze(1) + planes.unsqueeze(1)).flatten(1).to(rows.device)
    for of, source in zip(ids, (k, v), strict=True):
        rows[of] = source.unflatten(0, (len(newest), -1))[meant].flatten(0, 1).to(rows.device)


def keep_rows(k: torch.Tensor, v: torch.Tensor, kept: PointerTable, places: torch.Tensor) -> None:
    """The rows k, v `[P, d]` of each sequence's newest token take place `places[b]` (int64 `[B]`) of its kept rows
    `[2 * Hkv, room, d]`: K of all heads, then V; a negative place is nobody's."""
    batch = len(kept.tensors)
    newest = torch.cat((k.view(batch, -1, k.shape[1]), v.view(batch, -1, v.shape[1])), dim=1)
    for rows, own, place in zip(kept.tensors, newest, places, strict=True):
        if place >= 0:
            rows.index_copy_(1, place.view(1), own.unsqueeze(1))


# ---------------------------------------------------------------------------------------------------------- scores


def partial_scores(
    q: torch.Tensor, keys: PointerTable, starts: torch.Tensor, stops: torch.Tensor, tokens: int
) -> Scores:
    """Skewed and scaled queries q `[P, G, r]` with keys `[Hkv, r, N_b]` of any dtype; tokens [start, stop) of each list
    count. Scores of `tokens` tokens, at least as many as any list has."""
    scores = q.new_full((*q.shape[:2], tokens), -math.inf)
    for own, query, there in zip(keys.tensors, q.split(keys.heads), scores.split(keys.heads), strict=True):
        n = min(tokens, own.shape[2])
        there[:, :, :n] = torch.bmm(query, own[:, :, :n].to(q.dtype))
    return within(scores, starts, stops)


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
    """Scores of queries q `[P, G, d]` with packed keys int8 `[Hkv, m_b, w]` (`selection.pack`; the first d of w bytes
    count), N_b = m_b * 8 / bits; mean and step `[Hkv, d]`, the same for every sequence."""
    scores = q.new_full((*q.shape[:2], tokens), -math.inf)
    for own, query, there in zip(packed.tensors, q.split(packed.heads), scores.split(packed.heads), strict=True):
        n = min(tokens, own.shape[1] * (8 // bits))
        there[:, :, :n] = packed_scores(query, own[:, :, : q.shape[2]], mean, step, bits)[:, :, :n]
    return within(scores, starts, stops)


def within(scores: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> Scores:
    """Scores `[P, G, N]` with -inf outside [start, stop) of each list."""
    token = torch.arange(scores.shape[2], device=scores.device)
    outside = (token < starts[:, None]) | (token >= stops[:, None])
    scores = scores.masked_fill(outside.unsqueeze(1), -math.inf)
    maxima = scores.amax(-1, keepdim=True)
    return Scores(scores, maxima, (scores - finite(maxima)).exp().sum(-1, keepdim=True))


def select_tokens(
    found: Scores,
    starts: torch.Tensor,
    stops: torch.Tensor,
    kv_heads: int,
    alpha: float,
    limits: torch.Tensor,
    cap: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`selection.select_tokens` of every sequence of a batch, under a static cap: token indices int64 `[P, cap]`,
    rising, and counts int32 `[P]`, how many of each row are meant; the rest of a row is 0.

    limits: int32 `[B]`, the most tokens of each sequence (`selection_limit`). Counts are those of
    `selection.token_count`, at most `cap`.
    """
    lists, group, _ = found.scores.shape
    tokens = torch.zeros(lists, cap, dtype=torch.int64, device=found.scores.device)
    counts = torch.zeros(lists, dtype=torch.int32, device=found.scores.device)
    maximum, lses = found.maximum, found.lse
    for b, limit in enumerate(limits.tolist()):
        own = slice(b * kv_heads, (b + 1) * kv_heads)
        start, stop = int(starts[own.start]), int(stops[own.start])
        if start >= stop or limit == 0:
            continue
        scores = found.scores[own, :, start:stop]
        passing = scores >= maximum[own].unsqueeze(-1) - alpha
        n = min(-(-int(passing.sum()) // (kv_heads * group)), limit, cap)
        passed = passing.flatten(0, 1).any(0).nonzero().squeeze(1)
        lse = lses[own].masked_fill(lses[own].isneginf(), 0).unsqueeze(-1)
        values = group_scores(scores, None if group == 1 else lse)
        chosen = passed[top_tokens_reference(values[:, passed], n)] + start
        tokens[own, :n] = chosen.sort(1).values
        counts[own] = n
    return tokens, counts


def selection_limit(candidates: int, max_fraction: float) -> int:
    """The most tokens a sequence may select of its `candidates`: floor of the share, but 1 where there is one."""
    return max(min(1, candidates), floor_share(max_fraction, candidates))


# ------------------------------------------------------------------------------------------------------- attention


def attend_counted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of q `[P, G, d]` over the first `counts[p]` rows of k, v `[P, n, d]`: out `[P, G, d]` and lse
    `[P, G]`, float32 (float64 for float64)."""
    return _attend(q, k, v, torch.arange(k.shape[1], device=k.device) >= counts[:, None], scale)


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
    """Decode attention of q `[P, G, d]` over the places [start, stop) of each list's kept rows `[2 * Hkv, room, d]`
    (`keep_rows`; one room for all) and the first `counts[p]` rows of k, v `[P, n, d]` together: out `[P, G, d]` and lse
    `[P, G]`."""
    keys, values = torch.stack(kept.tensors).unflatten(1, (2, -1)).transpose(0, 1).flatten(1, 2)
    place = torch.arange(keys.shape[1], device=q.device)
    hidden = (place < starts[:, None]) | (place >= stops[:, None])
    parts = [_attend(q, keys, values, hidden, scale), attend_counted(q, k, v, counts, scale)]
    outs, lses = (torch.stack(each).flatten(1, 2) for each in zip(*parts, strict=True))
    out, lse = merge_parts(outs, lses)
    return out.view_as(parts[0][0]), lse.view_as(parts[0][1])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the rows that are not `hidden` (bool `[P, n]`)."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.bmm(q.to(wide), k.to(wide).transpose(1, 2)) * scale
    scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - finite(lse).unsqueeze(-1)).exp()
    return torch.bmm(weights, v.to(wide).masked_fill(hidden.unsqueeze(2), 0)), lse


def merge_parts(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.merge_lse` of outs `[S, R, d]` and lses `[S, R]`, where parts, and whole rows, may be empty."""
    lse = torch.logsumexp(lses, 0)
    shares = (lses - finite(lse)).exp()
    outs = outs.masked_fill(lses.isneginf().unsqueeze(-1), 0)
    return (outs * shares.unsqueeze(-1)).sum(0), lse


def finite(lse: torch.Tensor) -> torch.Tensor:
    """-inf, of a list without tokens, as the lowest finite number: exp(-inf - it) is 0."""
    return lse.clamp_min(torch.finfo(lse.dtype).min)


# ---------------------------------------------------------------------------------------------------- scoring keys


def append_partial(k: torch.Tensor, basis: torch.Tensor, keys: PointerTable, slots: torch.Tensor) -> None:
    """The key k `[P, d]` of each list's newest token, skewed by basis `[Hkv, d, r]` (or `[P, d, r]`, each list's own),
    becomes column `slots[p]` of keys `[Hkv, r, N_b]`. slots: int64 `[P]`, negative ones of a sequence that is none."""
    skewed = _skewed(k, basis).to(keys.dtype)
    every = torch.arange(keys.heads, device=k.device)
    for own, columns, slot in zip(keys.tensors, skewed.split(keys.heads), slots.split(keys.heads), strict=True):
        if slot[0] >= 0:
            own[every, :, slot] = columns


def append_quantised(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    packed: PointerTable,
    slots: torch.Tensor,
) -> None:
    """The key k `[P, d]` of each list's newest token, skewed by basis and rounded by mean and step `[Hkv, r]`, takes
    slot `slots[p]` of packed `[Hkv, m_b, w]`, in the first r of w bytes; the other tokens of its bytes keep their
    codes. Negative slots are those of a sequence that is none."""
    fields, every = 8 // bits, torch.arange(packed.heads, device=k.device)
    entering = _skewed(k, basis).unsqueeze(1)
    codes = zip(entering.split(packed.heads), slots.split(packed.heads), packed.tensors, strict=True)
    for skewed, slot, row in codes:
        if slot[0] < 0:
            continue
        own = row[:, :, : basis.shape[2]]
        there = unpack(own[every, slot // fields].unsqueeze(1), bits)
        there[every, slot % fields] = quantise(skewed, mean, step, bits).squeeze(1)
        own[every, slot // fields] = pack(there, bits).squeeze(1)


def _skewed(k: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """`[P, r]` of k `[P, d]`, list p by basis p modulo their number."""
    return skew(k.view(-1, len(basis), k.shape[1]).transpose(0, 1), basis).transpose(0, 1).flatten(0, 1)
