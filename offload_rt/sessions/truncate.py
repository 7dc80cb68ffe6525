"""Truncating a session, because somebody asks or because it would outgrow the model: rows are copied as they are,
nothing is computed again.

Keys keep their positions, which go on growing: RoPE sees only differences, and those between kept neighbours and the
tokens to come stay as they were. Only if the distance to the first tokens would leave the trained window are their keys
rotated, once, from their originals, across the whole gap.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from copy import copy

import torch

from ..core import CHUNK, BlockTable, KVPart, ModelGeometry, ranges_of
from ..engine.arguments import whole, whole_or_none
from ..engine.prompts import token_ids
from ..errors import InputError, ModelError, PoolFullError, StoreError
from ..kv_cache.pool import HostPool
from ..model_runner.sequence import Sequence
from ..models.adapter import ModelAdapter
from .host_tier import HostTier
from .session_kv import SessionKV

SINKS = 4
"""First tokens that a truncation keeps unless told otherwise."""

# ------------------------------------------------------------------------------------------------- which tokens stay


def kept_tokens(computed: int, sinks: int, keep_last: int | None, drop: Seq[int] | None) -> list[int]:
    """Returns which of `computed` tokens stay, rising. Raises InputError where that is not said, or not possible."""
    if (keep_last is None) == (drop is None):
        raise InputError("truncate needs either keep_last or drop: how many tokens to keep, or which to drop")
    if keep_last is not None:
        return [*range(min(sinks, max(0, computed - keep_last))), *range(max(0, computed - keep_last), computed)]
    assert drop is not None
    gone = set(drop)
    wrong = next((i for i in gone if not 0 <= i < computed), None)
    if wrong is not None:
        raise InputError(f"drop has token {wrong}, but the session has tokens 0 to {computed - 1}")
    if len(gone) == computed:
        raise InputError("drop has every token of the session: at least one must stay")
    return [i for i in range(computed) if i not in gone]


def last_kept(held: int, new: int, positions: int) -> int:
    """Returns how many of the last of `held` tokens stay, besides the first SINKS, where `new` more would outgrow
    `positions`: half the positions, as in CachedAttention §4.1 (truncation ratio 0.5), or fewer where `new` needs the
    room; all of them where everything fits, or where truncating would not shorten anything."""
    if held + new <= positions:
        return held
    room = positions - new - SINKS
    kept = min(positions // 2, room) if room > 0 else positions // 2
    return kept if kept + SINKS < held else held


def check_truncatable(geometry: ModelGeometry, name: str) -> None:
    """Raises ModelError where kept rows would not mean the same afterwards. (RoPE that depends on the length is
    refused when a model is loaded.)"""
    if geometry.absolute_positions:
        raise ModelError(
            f"{name} has absolute positions: its stored keys hold them, so tokens cannot be cut out; start a new "
            "session with the part of the text that matters"
        )


def tokens_after(kv: SessionKV, new: int) -> int:
    """Returns how many tokens the session has when a turn of `new` tokens begins: all, or those that `truncate_for`
    leaves."""
    geometry, held = kv.runner.adapter.geometry, len(kv.history.tokens)
    kept = last_kept(held, new, geometry.max_positions)
    if kept == held:
        return held
    try:
        check_truncatable(geometry, kv.runner.model.name)
    except ModelError:
        return held
    return kept + SINKS


# ------------------------------------------------------------------------------------------------------ of a session


def truncate(kv: SessionKV, host: HostTier, *, keep_last: int | None, sinks: int, drop: Seq[int] | None) -> int:
    """Cuts tokens out of a session that is not parked, as `Session.truncate` says. Returns how many are gone."""
    check_truncatable(kv.runner.adapter.geometry, kv.runner.model.name)
    sinks, keep_last = whole("sinks", sinks, 0), whole_or_none("keep_last", keep_last, 1)
    drop = None if drop is None else token_ids(drop)
    if not 0 <= sinks < CHUNK:
        raise InputError(f"sinks={sinks} must be from 0 to {CHUNK - 1}")
    history = kv.history
    kept = kept_tokens(history.computed, sinks, keep_last, drop)
    if len(kept) == history.computed:
        return 0
    pool = kv.runner.pool
    if drop is not None or (history.truncation_id and history.sinks > sinks) or not pool.groups.full:
        sinks = 0
    computed = history.computed
    sequence = host.retry_after_reclaim(kv.materialise)
    if history.computed < computed:  # a damaged chunk was lost: less than was asked for is left to choose from
        raise InputError("a part of the session was damaged and is computed again with the next turn: truncate then")
    size = len(history.tokens) - history.computed + len(kept)
    _keep_sinks(kv, sequence, sinks)
    after = copy(history)
    after.truncate(kept, sinks)
    blocks = host.retry_after_reclaim(lambda: _room(pool, size, len(kept), after.floor))
    gone = history.computed - len(kept)
    history.truncate(kept, sinks)
    _rebuild(kv, sequence, kept, blocks)
    return gone


def truncate_for(kv: SessionKV, host: HostTier, new: int) -> int:
    """Before a turn of `new` tokens that would outgrow the model's positions, forgets the oldest tokens, all but the
    first SINKS and `last_kept`. Rows are kept as they are; where some are lost (damaged, evicted from the store), what
    is left will be computed anew, as a text of its own. Returns how many tokens are gone: none where everything fits,
    or the model cannot be truncated. Raises PoolFullError, StoreError."""
    history, held = kv.history, len(kv.history.tokens)
    left = tokens_after(kv, new)
    if left == held:
        return 0
    computed = history.computed
    if computed:
        host.retry_after_reclaim(kv.materialise)
    keep_last = left - SINKS - (held - computed)
    if history.computed == computed and keep_last >= 1:
        truncate(kv, host, keep_last=keep_last, sinks=SINKS, drop=None)
    else:
        kv.drop()
        history.restart([*history.tokens[:SINKS], *history.tokens[SINKS - left :]])
    return held - len(history.tokens)


def close_gap(kv: SessionKV, host: HostTier, length: int) -> None:
    """Rotates the sinks' keys across the gap if a context of `length` tokens would see them from farther away than the
    model was trained for; where their originals are lost, what is left will be computed anew, as a text of its own.
    Raises PoolFullError."""
    history, geometry, pool = kv.history, kv.runner.adapter.geometry, kv.runner.pool
    distance = length + history.shift - history.sink_shift
    if not history.sinks or history.sink_shift == history.shift or distance <= geometry.max_positions:
        return
    originals = _stored_sinks(kv)
    sequence = host.retry_after_reclaim(kv.materialise)
    if history.sinks == 0:
        return
    if originals is None:
        kv.drop()
        history.restart(history.tokens)
        warnings.warn(
            f"the first keys of session {history.name!r}, as they were before it was truncated, are lost: its "
            f"{len(history.tokens):,} tokens are computed again",
            stacklevel=2,
        )
        return
    size = len(history.tokens)
    blocks = host.retry_after_reclaim(lambda: _room(pool, size, history.computed, history.floor))
    history.close_gap()
    rebuilt = _rebuild(kv, sequence, range(history.computed), blocks)
    write_rotated_sinks(pool, kv.runner.adapter, rebuilt.blocks, originals, history.sink_shift)
    kv.runner.reload(rebuilt)


def _keep_sinks(kv: SessionKV, sequence: Sequence, sinks: int) -> None:
    """Stores the originals of the first tokens' keys, before the first truncation."""
    history = kv.history
    if sinks and not history.truncation_id:
        originals = read_sinks(kv.runner.pool, sequence.blocks, sinks)
        history.sinks = sinks
        kv.context.storage.put(history.sinks_document, originals.view(torch.uint8).numpy().tobytes())


def _stored_sinks(kv: SessionKV) -> torch.Tensor | None:
    """The originals of the sinks' keys, `[L, Hkv, sinks, width]` as stored, L layers that see everything; None where
    they are lost."""
    history, pool = kv.history, kv.runner.pool
    shape = (len(pool.groups.layers_of(0)), kv.runner.adapter.geometry.kv_heads, -1, pool.format.width)
    try:
        document = kv.context.storage.get(history.sinks_document)
    except StoreError:
        return None
    one_sink = shape[0] * shape[1] * shape[3] * pool.format.storage.itemsize
    if document is None or not document.data or len(document.data) % one_sink:
        return None
    originals = torch.frombuffer(bytearray(document.data), dtype=pool.format.storage).view(shape)
    return originals[:, :, : history.sinks] if originals.shape[2] >= history.sinks else None


def _room(pool: HostPool, size: int, known: int, floor: int) -> BlockTable:
    """Returns a block table with slots for `size` tokens, of which `known` are about to be copied there. Raises
    PoolFullError."""
    blocks = pool.new_block_table(size, floor)
    try:
        pool.slide(blocks, known, size)
    except PoolFullError:
        pool.release(blocks)
        raise
    return blocks


def _rebuild(kv: SessionKV, sequence: Sequence, kept: Seq[int], blocks: BlockTable) -> Sequence:
    """Returns a sequence with copies of the rows `kept`, in `blocks`, which takes the place of the session's."""
    history, runner = kv.history, kv.runner
    runner.link.storage.settle(sequence.blocks)
    copy_rows(runner.pool, sequence.blocks, blocks, kept)
    kv.replace(None)
    runner.free(sequence)
    adopted = runner.adopt(
        history.tokens, blocks, capacity=len(history.tokens), known=len(kept),
        exact=min(history.exact, len(kept)), shift=history.shift, provenance=history.provenance,
    )  # fmt: skip
    kv.replace(adopted)
    return adopted


# ---------------------------------------------------------------------------------------------------- rows in the pool


def copy_rows(pool: HostPool, source: BlockTable, target: BlockTable, kept: Seq[int]) -> None:
    """Copies rows of the tokens `kept` of `source`, as they are stored, to the first slots of `target`, in all layers;
    of sliding layers those that the windows of the next tokens show."""
    for layer, group in enumerate(pool.groups.group):
        at = pool.groups.first_seen(len(kept), target.floor) if group else 0
        for run in ranges_of(kept[at:]):
            _copy_run(pool, layer, pool.stored(source, layer, run), target, at)
            at += len(run)


def _copy_run(pool: HostPool, layer: int, parts: Seq[KVPart], target: BlockTable, at: int) -> None:
    """Copies the rows of `parts` to the slots of `target` from `at` on."""
    for part in parts:
        pool.fill(target, layer, at, part.k, part.v)
        at += part.k.shape[1]


def read_sinks(pool: HostPool, blocks: BlockTable, sinks: int) -> torch.Tensor:
    """Returns the keys of the first `sinks` tokens (fewer than 64) as they are stored, `[L, Hkv, sinks, width]`, L
    layers that see everything, a copy."""
    return torch.stack([pool.stored(blocks, layer, range(sinks))[0].k for layer in pool.groups.layers_of(0)])


def write_rotated_sinks(
    pool: HostPool, adapter: ModelAdapter, blocks: BlockTable, originals: torch.Tensor, offset: int
) -> None:
    """Writes the sinks' keys `originals` `[L, Hkv, sinks, width]` of layers that see everything, rotated by `offset`
    positions. The block table's first chunk must be its own."""
    for layer, stored in zip(pool.groups.layers_of(0), originals, strict=True):
        keys = adapter.rotate_keys(layer, pool.format.decode(stored), offset)
        values = pool.stored(blocks, layer, range(stored.shape[1]))[0].v
        pool.fill(blocks, layer, 0, pool.format.encode(keys), values)
