"""Gather and write rows of the KV pool, in torch: the reference implementation of `triton_gather`.

A row is the key or value of one token in one KV head of one layer. Its id is its index in the pool `[R, w]`. Some
blocks have copies in device memory (`DeviceRows`). Row i of the copies has the id R + i, so a gather finds every row
without a look-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core import BLOCK_SIZE


@dataclass(frozen=True)
class DeviceRows:
    """Device copies of pool rows, as seen by one layer."""

    rows: torch.Tensor  # the copies `[D, w]`, shared by all layers, in the storage format of the pool
    first: int  # Id of the first copy. It equals the number of rows in the pool.
    # Offsets of K and V of each KV head in a copied block, like `planes` of `gather_tokens`. `first` is already
    # subtracted, so id + offset is an index in `rows`.
    planes: torch.Tensor


def gather_rows(
    rows: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, device: DeviceRows | None = None
) -> None:
    """Copy the rows with the given `ids` `[P, n]` (int64) to `out` `[P, n, w]`.

    Only the first `counts[p]` ids of each list are used. Negative ids are skipped, and their entries in `out` stay
    unchanged. Ids from `device.first` on refer to the copies in `device`. `rows` and `out` may be the same tensor if no
    row is both read and written.
    """
    for p, count in enumerate(counts.tolist()):
        own = ids[p, :count]
        if device is not None:
            copied = (own >= device.first).nonzero().squeeze(1)
            out[p, copied] = device.rows.index_select(0, own[copied] - device.first)
            own = own.masked_fill(own >= device.first, -1)
        wanted = (own >= 0).nonzero().squeeze(1)
        out[p, wanted] = rows.index_select(0, own[wanted].to(rows.device)).to(out.device)


def gather_tokens(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor | None,
    bases: torch.Tensor,
    planes: torch.Tensor,
    out: torch.Tensor,
    device: DeviceRows | None = None,
    tally: torch.Tensor | None = None,
) -> None:
    """Copy K and V of `tokens` from `rows` `[R, w]` to `out` `[2, P, n, w]`. P = B * Hkv.

    The row of token t of sequence b and KV head h is `bases[b, t // BLOCK_SIZE] + t % BLOCK_SIZE + planes[i, h]`, with
    i = 0 for K and 1 for V. If the first axis of `planes` and `out` has length 1, only K is copied.

    Args:
        rows: The KV pool.
        tokens: Token indices, int64 `[P, n]`.
        counts: Number of tokens to copy from each list, or None for all. Other entries of `out` stay unchanged.
        bases: Id of the first row of each block, int64 `[B, blocks]`.
        planes: Offset of K and V of each KV head within a block, int64 `[2, Hkv]` or `[1, Hkv]`.
        out: Result.
        device: Copies of blocks in device memory. Their bases are `device.first` or higher.
        tally: Counters, int64 `[B, 2]`, required if `device` is given. The numbers of entries read from the pool and
            from the copies are added to them.
    """
    batch, heads, listed = len(bases), planes.shape[1], tokens.shape[1]
    valid = None if counts is None else torch.arange(listed, device=tokens.device) < counts.unsqueeze(1)
    tokens = tokens if valid is None else tokens.masked_fill(~valid, 0)
    at = tokens.reshape(batch, heads * listed)
    ids = (bases.gather(1, at // BLOCK_SIZE) + at % BLOCK_SIZE).view(batch, heads, listed)
    counts = torch.full((len(tokens),), listed) if counts is None else counts
    offsets = planes.unsqueeze(1).unsqueeze(-1)
    if device is None:
        found = ids + offsets
    else:
        assert tally is not None
        copied = ids >= device.first
        found = ids + torch.where(copied, device.planes.unsqueeze(1).unsqueeze(-1) + device.first, offsets)
        hits = (copied if valid is None else copied & valid.view_as(copied)).sum((1, 2))
        tally += torch.stack((counts.to(tally).view(batch, heads).sum(1) - hits, hits), dim=1)
    for into, of in zip(out, found.flatten(1, 2), strict=True):
        gather_rows(rows, of, counts, into, device)


def write_rows(
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    newest: torch.Tensor,
    planes: torch.Tensor,
    device: DeviceRows | None = None,
) -> None:
    """Write the newest K and V `[P, w]` of each sequence to the pool `rows` `[R, w]`. P = B * Hkv.

    The row of sequence b and KV head h is `newest[b] + planes[i, h]`, with i = 0 for K and 1 for V. `newest` is int64
    `[B]`. `planes` is int64 `[2, Hkv]`, or `[1, Hkv]` to write only K. Sequences with a negative `newest[b]` are
    skipped.

    If `device` is given, `newest` is int64 `[2 * B]`. The second half contains the rows of the copies, to which K and V
    are also written. Negative numbers mark sequences without a copy.
    """
    batch = len(k) // planes.shape[1]
    _write(rows, k, v, newest[:batch], planes)
    if device is not None:
        _write(device.rows, k, v, newest[batch:], device.planes)


def _write(rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, newest: torch.Tensor, planes: torch.Tensor) -> None:
    valid = newest >= 0
    ids = (newest[valid].unsqueeze(1) + planes.unsqueeze(1)).flatten(1).to(rows.device)
    for of, source in zip(ids, (k, v)[: len(planes)], strict=True):
        rows[of] = source.unflatten(0, (len(newest), -1))[valid].flatten(0, 1).to(rows.device)
