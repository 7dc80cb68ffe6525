"""Cutting tokens out of a session, because somebody asks or because it would outgrow the model, and closing the gap
when it would grow too wide (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from ..core import CHUNK, BlockTable
from ..errors import InputError, ModelError
from ..forward.sequence import Sequence
from .session_kv import SessionRows
from .window import SINKS, check_truncatable, copy_rows, kept_tokens, last_kept, read_sinks, turn_sinks


def cut(rows: SessionRows, *, keep_last: int | None, sinks: int, drop: Seq[int] | None) -> int:
    """Cuts tokens out: see `Session.truncate`."""
    check_truncatable(rows.runner.adapter.geometry, rows.runner.model.name)
    if not 0 <= sinks < CHUNK:
        raise InputError(f"sinks={sinks} must be from 0 to {CHUNK - 1}")
    history = rows.history
    kept = kept_tokens(history.computed, sinks, keep_last, drop)
    if len(kept) == history.computed:
        return 0
    if drop is not None or (history.cut and history.sinks > sinks):
        sinks = 0
    computed = history.computed
    sequence = rows.store.tiers.retry_after_reclaim(rows.materialise)
    if history.computed < computed:  # a damaged chunk was lost: less than was asked for is left to choose from
        raise InputError("a part of the session was damaged and is computed again with the next turn: truncate then")
    size = len(history.tokens) - history.computed + len(kept)
    _keep_sinks(rows, sequence, sinks)
    blocks = rows.store.tiers.retry_after_reclaim(lambda: rows.runner.pool.new_block_table(size))
    gone = history.computed - len(kept)
    history.keep(kept, sinks)
    _rebuild(rows, sequence, kept, blocks)
    return gone


def tokens_after(rows: SessionRows, new: int) -> int:
    """How many tokens the session has when a turn of `new` tokens begins: all, or those that `truncate_for` leaves."""
    geometry, held = rows.runner.adapter.geometry, len(rows.history.tokens)
    kept = last_kept(held, new, geometry.max_positions)
    if kept == held:
        return held
    try:
        check_truncatable(geometry, rows.runner.model.name)
    except ModelError:
        return held
    return kept + SINKS


def truncate_for(rows: SessionRows, new: int) -> int:
    """Before a turn of `new` tokens that would outgrow the model's positions: the oldest tokens are forgotten, all but
    the first SINKS and `last_kept`. Rows are kept as they are; where some are lost (damaged, evicted from the store),
    what is left will be computed anew, as a text of its own. Returns how many tokens are gone: none where everything
    fits, or the model cannot be cut. Raises PoolFullError, StoreError."""
    history, held = rows.history, len(rows.history.tokens)
    left = tokens_after(rows, new)
    if left == held:
        return 0
    computed = history.computed
    if computed:
        rows.store.tiers.retry_after_reclaim(rows.materialise)
    keep_last = left - SINKS - (held - computed)
    if history.computed == computed and keep_last >= 1:
        cut(rows, keep_last=keep_last, sinks=SINKS, drop=None)
    else:
        rows.drop()
        history.restart([*history.tokens[:SINKS], *history.tokens[SINKS - left :]])
    return held - len(history.tokens)


def close_gap(rows: SessionRows, length: int) -> None:
    """Turns the sinks' keys across the gap if a context of `length` tokens would see them from farther away than the
    model was trained for. Raises PoolFullError."""
    history, geometry, pool = rows.history, rows.runner.adapter.geometry, rows.runner.pool
    distance = length + history.shift - history.sink_shift
    if not history.sinks or history.sink_shift == history.shift or distance <= geometry.max_positions:
        return
    data = rows.store.disk.get(history.sinks_document)
    sequence = rows.store.tiers.retry_after_reclaim(rows.materialise)
    if data is None or history.sinks == 0:
        return
    shape = (geometry.layers, geometry.kv_heads, -1, pool.format.width)
    originals = torch.frombuffer(bytearray(data), dtype=pool.format.storage).view(shape)[:, :, : history.sinks]
    blocks = rows.store.tiers.retry_after_reclaim(lambda: pool.new_block_table(len(history.tokens)))
    history.turn_sinks()
    turned = _rebuild(rows, sequence, range(history.computed), blocks)
    turn_sinks(pool, rows.runner.adapter, turned.blocks, originals, history.sink_shift)
    rows.runner.reload(turned)


def _keep_sinks(rows: SessionRows, sequence: Sequence, sinks: int) -> None:
    """Keeps the originals of the first tokens' keys, before the first cut."""
    history = rows.history
    if sinks and not history.cut:
        originals = read_sinks(rows.runner.pool, sequence.blocks, sinks)
        history.sinks = sinks
        rows.store.disk.put(history.sinks_document, originals.view(torch.uint8).numpy().tobytes())


def _rebuild(rows: SessionRows, sequence: Sequence, kept: Seq[int], blocks: BlockTable) -> Sequence:
    """A sequence with copies of the rows `kept`, in `blocks`, takes the place of the session's."""
    history, runner = rows.history, rows.runner
    runner.link.settle(sequence.blocks)
    copy_rows(runner.pool, sequence.blocks, blocks, kept)
    rows.replaced(None)
    runner.free(sequence)
    adopted = runner.adopt(
        history.tokens, blocks, capacity=len(history.tokens), known=len(kept),
        exact=min(history.exact, len(kept)), shift=history.shift, truncation_id=history.cut,
    )  # fmt: skip
    rows.replaced(adopted)
    return adopted
