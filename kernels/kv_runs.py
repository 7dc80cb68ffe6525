"""Decode attention for a batch whose sequences share KV, in torch.

It is used on CPUs, and is the reference implementation of `triton_kv_runs`.

A *run* is a contiguous range of KV to which adjacent sequences of the batch attend, such as a common prefix. The KV of
a run is read only once, because the queries of all its sequences are multiplied in one batched product. ChunkAttention
and Hydragen compute attention in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from .reference import attend_part, merge_lse, scaled_scores


@dataclass(frozen=True)
class Run:
    """KV that is shared by the sequences [first, stop) of a batch."""

    first: int  # index of the first sequence that attends to the KV
    stop: int  # index after the last sequence that attends to the KV
    k: torch.Tensor  # `[Hkv, n, d]`, a view with contiguous vectors
    v: torch.Tensor  # `[Hkv, n, d]`, a view with contiguous vectors


def attend_runs(q: torch.Tensor, runs: Sequence[Run], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the query of each sequence to the KV of all its runs (Hydragen §3.1-3.3, ChunkAttention §3.2).

    q is `[H, B, d]`. The runs of a sequence do not overlap. Each sequence needs a non-empty run that no other sequence
    shares, for example its newest tokens.

    Returns:
        out `[H, B, d]` and lse `[H, B]` (natural log), in float32 (float64 for float64 inputs).
    """
    non_empty = [run for run in runs if run.k.shape[1]]
    private: list[list[Run]] = [[] for _ in range(q.shape[1])]
    for run in (run for run in non_empty if run.stop - run.first == 1):
        private[run.first].append(run)
    out, lse = _attend_private(q, private, scale)
    for run in (run for run in non_empty if run.stop - run.first > 1):
        members = slice(run.first, run.stop)
        shared_out, shared_lse = _attend_shared(q[:, members], run, scale)
        out[:, members], lse[:, members] = merge_lse([out[:, members], shared_out], [lse[:, members], shared_lse])
    return out, lse


def _attend_shared(q: torch.Tensor, run: Run, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    heads, queries, d = q.shape
    out, lse = attend_part(q.reshape(len(run.k), -1, d), run.k, run.v, scale)
    return out.view(heads, queries, d), lse.view(heads, queries)


def _attend_private(
    q: torch.Tensor, private: Sequence[Sequence[Run]], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q `[H, B, d]`. Sequence b attends only to its runs `private[b]`."""
    heads, batch, d = q.shape
    kv_heads = len(private[0][0].k)
    queries = q.view(kv_heads, -1, batch, d).permute(2, 0, 1, 3).contiguous()
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(batch, *queries.shape[1:], dtype=wide, device=q.device)
    lse = torch.empty(out.shape[:-1], dtype=wide, device=q.device)
    sizes = [sum(run.k.shape[1] for run in runs) for runs in private]
    assert min(sizes) > 0, "every sequence needs at least one private token"
    # Group sequences of similar length, so that padding takes less memory than KV.
    ascending = sorted(range(batch), key=sizes.__getitem__)
    for _, group in groupby(ascending, key=lambda b: sizes[b].bit_length()):
        members = list(group)
        out[members], lse[members] = _attend_padded(
            queries, [private[b] for b in members], members, sizes[members[-1]], scale
        )
    return out.permute(1, 2, 0, 3).reshape(heads, batch, d), lse.permute(1, 2, 0).reshape(heads, batch)


def _attend_padded(
    queries: torch.Tensor, private: Iterable[Sequence[Run]], members: Sequence[int], max_tokens: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `_attend_private` for the S sequences `members`, with one padded score buffer and one softmax.

    `queries` `[B, Hkv, G, d]` contains the queries of the whole batch. `max_tokens` is the largest number of private
    tokens that any member has. Return out `[S, Hkv, G, d]` and lse `[S, Hkv, G]`.
    """
    pieces = [(i, offset, run) for i, runs in enumerate(private) for offset, run in _with_offsets(runs)]
    shape = (len(members), *queries.shape[1:3])
    wide = torch.float64 if queries.dtype == torch.float64 else torch.float32
    scores = torch.full((*shape, max_tokens), -torch.inf, dtype=wide, device=queries.device)
    for i, offset, run in pieces:
        scaled_scores(queries[members[i]], run.k, scale, out=scores[i, :, :, offset : offset + run.k.shape[1]])
    peak = scores.amax(-1, keepdim=True)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (peak + total.log()).squeeze(-1)
    weights = weights.div_(total).to(queries.dtype)
    out = lse.new_zeros(*shape, queries.shape[3])
    for i, offset, run in pieces:
        out[i].add_(torch.bmm(weights[i, :, :, offset : offset + run.k.shape[1]], run.v))
    return out, lse


def _with_offsets(runs: Sequence[Run]) -> Iterable[tuple[int, Run]]:
    offset = 0
    for run in runs:
        yield offset, run
        offset += run.k.shape[1]
