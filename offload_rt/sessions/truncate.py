"""Truncate a session, either on request or before it exceeds the model's context length.

Kept tokens keep their positions and their KV, and new tokens continue after the last position. With RoPE, this is
exact, because attention depends only on differences between positions.

The first tokens (attention sinks) are an exception. If their distance to new tokens would exceed the trained context
length, their keys are rotated to the positions directly before the other kept tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq
from copy import copy

import torch

from ..core import BLOCK_SIZE, BlockTable, ModelGeometry, ranges_of
from ..engine.checks import check_int, check_int_or_none
from ..engine.prompts import token_ids
from ..errors import InputError, ModelError, StoreError
from ..kv_cache.pool import HostPool
from ..model_runner.sequence import Sequence
from ..models.adapter import ModelAdapter
from .host_tier import HostTier
from .session_kv import SessionKV

SINKS = 4
"""By default, a truncation keeps this many tokens at the start (attention sinks)."""

# --------------------------------------------------------------------------------------------------------- kept tokens


def kept_tokens(computed: int, sinks: int, keep_last: int | None, drop: Seq[int] | None) -> list[int]:
    """Return the indices of the tokens that a truncation keeps, in ascending order.

    Args:
        computed: Number of tokens whose KV was computed.
        sinks: Number of tokens to keep at the start. Used only with `keep_last`.
        keep_last: Number of tokens to keep at the end, or None.
        drop: Indices of the tokens to remove, or None.

    Raises:
        InputError: `keep_last` and `drop` are both set or both None, or `drop` is invalid.
    """
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
        raise InputError("drop has every token of the session: keep at least one")
    return [i for i in range(computed) if i not in gone]


def last_kept(tokens: int, new: int, positions: int) -> int:
    """Return how many tokens an automatic truncation keeps at the end, in addition to the first SINKS tokens.

    All tokens are kept if `tokens` and `new` tokens together fit in the model's `positions`, or if truncation would not
    shorten the session. Otherwise, half of `positions` is kept (CachedAttention §4.1, truncation ratio 0.5), or less if
    the new tokens need the space.
    """
    if tokens + new <= positions:
        return tokens
    available = positions - new - SINKS
    kept = min(positions // 2, available) if available > 0 else positions // 2
    return kept if kept + SINKS < tokens else tokens


def check_truncatable(geometry: ModelGeometry, name: str) -> None:
    """Raise ModelError if the KV of the model depends on absolute positions or on removed tokens."""
    # Models whose RoPE depends on the sequence length are already rejected when they are loaded.
    if geometry.absolute_positions:
        raise ModelError(
            f"{name} has absolute positions, which are part of its stored keys, so tokens cannot be removed: "
            "start a new session with the part of the text that matters"
        )
    if geometry.states:
        raise ModelError(
            f"{name} has recurrent layers, whose state depends on all earlier tokens, so tokens cannot be removed: "
            "start a new session with the part of the text that matters"
        )


def tokens_after(kv: SessionKV, new: int) -> int:
    """Return how many tokens `truncate_for` leaves in the session."""
    geometry, tokens = kv.runner.adapter.geometry, len(kv.history.tokens)
    kept = last_kept(tokens, new, kv.runner.max_positions)
    return tokens if kept == tokens or geometry.absolute_positions else kept + SINKS


# ---------------------------------------------------------------------------------------------------------- truncation


def truncate(kv: SessionKV, host: HostTier, *, keep_last: int | None, sinks: int, drop: Seq[int] | None) -> int:
    """Remove tokens from a session that is not parked (see `Session.truncate`). Return the number of removed tokens."""
    check_truncatable(kv.runner.adapter.geometry, kv.runner.model.name)
    sinks, keep_last = check_int("sinks", sinks, 0), check_int_or_none("keep_last", keep_last, 1)
    drop = None if drop is None else token_ids(drop)
    if not 0 <= sinks < BLOCK_SIZE:
        raise InputError(f"sinks={sinks} must be from 0 to {BLOCK_SIZE - 1}")
    history = kv.history
    kept = kept_tokens(history.computed, sinks, keep_last, drop)
    if len(kept) == history.computed:
        return 0
    pool = kv.runner.pool
    if drop is not None or (history.truncation_id and history.sinks > sinks) or not pool.groups.full:
        sinks = 0
    computed = history.computed
    sequence = host.retry_after_reclaim(kv.materialise)
    if history.computed < computed:  # a block was missing or damaged, so `kept` may contain tokens without KV
        raise InputError("a part of the session was damaged and is computed again with the next turn: truncate then")
    size = len(history.tokens) - history.computed + len(kept)
    _store_sinks(kv, sequence, sinks)
    after = copy(history)
    after.truncate(kept, sinks)
    blocks = host.retry_after_reclaim(lambda: _allocate_blocks(kv, size, len(kept), after.floor))
    gone = history.computed - len(kept)
    history.truncate(kept, sinks)
    _rebuild(kv, sequence, kept, blocks)
    return gone


def truncate_for(kv: SessionKV, host: HostTier, new: int) -> int:
    """Truncate the session if a turn with `new` tokens would exceed the model's positions.

    The first SINKS tokens and the last tokens (see `last_kept`) are kept. If KV is damaged or missing, the turn
    computes all KV again.

    Returns:
        The number of removed tokens. 0 if all tokens fit, or if the model does not support truncation.

    Raises:
        PoolFullError: The KV does not fit in the pool.
        StoreError: The original keys of the sinks cannot be stored.
    """
    history, tokens = kv.history, len(kv.history.tokens)
    left = tokens_after(kv, new)
    if left == tokens:
        return 0
    computed, recurrent = history.computed, kv.runner.states is not None
    if computed and not recurrent:
        host.retry_after_reclaim(kv.materialise)
    keep_last = left - SINKS - (tokens - computed)
    if history.computed == computed and keep_last >= 1 and not recurrent:
        truncate(kv, host, keep_last=keep_last, sinks=SINKS, drop=None)
    else:
        kv.drop()
        history.restart([*history.tokens[:SINKS], *history.tokens[SINKS - left :]])
    return tokens - len(history.tokens)


def close_gap(kv: SessionKV, host: HostTier, length: int) -> None:
    """If a session of `length` tokens exceeds the trained context length, move its sinks closer to the other tokens.

    To do so, the keys of the sinks are rotated to the new positions. If the original keys are missing, the session's KV
    is dropped, and the turn computes it again. Raises PoolFullError if the KV does not fit in the pool.
    """
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
            f"the original keys of the first tokens of session {history.name!r} are lost: its {len(history.tokens):,} "
            "tokens are computed again",
            stacklevel=2,
        )
        return
    size = len(history.tokens)
    blocks = host.retry_after_reclaim(lambda: _allocate_blocks(kv, size, history.computed, history.floor))
    history.close_gap()
    rebuilt = _rebuild(kv, sequence, range(history.computed), blocks)
    write_rotated_sinks(pool, kv.runner.adapter, rebuilt.blocks, originals, history.sink_shift)
    kv.runner.reload(rebuilt)


def _store_sinks(kv: SessionKV, sequence: Sequence, sinks: int) -> None:
    """Store the original keys of the sinks before the first truncation. Later rotations start from these keys."""
    history = kv.history
    if sinks and not history.truncation_id:
        originals = read_sinks(kv.runner.pool, sequence.blocks, sinks)
        history.sinks = sinks
        kv.context.storage.documents.put(history.sinks_document, originals.view(torch.uint8).numpy().tobytes())


def _stored_sinks(kv: SessionKV) -> torch.Tensor | None:
    """Return the stored original keys of the sinks in the format of `read_sinks`, or None if they cannot be read."""
    history, pool = kv.history, kv.runner.pool
    shape = (len(pool.groups.layers_of(0)), kv.runner.adapter.geometry.kv_heads, -1, pool.format.width)
    try:
        document = kv.context.storage.documents.get(history.sinks_document)
    except StoreError:
        return None
    one_sink = shape[0] * shape[1] * shape[3] * pool.format.storage.itemsize
    if document is None or not document.data or len(document.data) % one_sink:
        return None
    originals = torch.frombuffer(bytearray(document.data), dtype=pool.format.storage).view(shape)
    return originals[:, :, : history.sinks] if originals.shape[2] >= history.sinks else None


def _allocate_blocks(kv: SessionKV, size: int, known: int, floor: int) -> BlockTable:
    """Allocate a block table for `size` tokens. The caller must fill in the first `known` tokens.

    `floor` is the first token that sliding layers may attend to. Raises PoolFullError.
    """
    blocks = kv.runner.pool.new_block_table(size, floor)
    with kv.runner.cache_manager.released_on_error(blocks):
        kv.runner.pool.sliding.slide(blocks, known, size)
    return blocks


def _rebuild(kv: SessionKV, sequence: Sequence, kept: Seq[int], blocks: BlockTable) -> Sequence:
    runner = kv.runner
    runner.transfer.storage.settle(sequence.blocks)
    copy_kv(runner.pool, sequence.blocks, blocks, kept)
    kv.set_sequence(None)
    runner.free(sequence)
    adopted = kv.adopt(blocks, len(kv.history.tokens), len(kept))
    kv.set_sequence(adopted)
    return adopted


# ------------------------------------------------------------------------------------------------- KV in the host pool


def copy_kv(pool: HostPool, source: BlockTable, target: BlockTable, kept: Seq[int]) -> None:
    """Copy the KV of the tokens `kept` from `source` to the first slots of `target`, in all layers.

    In sliding layers, only the KV that later tokens can attend to is copied.
    """
    for layer in pool.groups.kv_layers:
        at = pool.groups.first_seen(len(kept), target.floor) if pool.groups.group[layer] else 0
        for part in (part for run in ranges_of(kept[at:]) for part in pool.stored(source, layer, run)):
            pool.fill(target, layer, at, part.k, part.v)
            at += part.k.shape[1]


def read_sinks(pool: HostPool, blocks: BlockTable, sinks: int) -> torch.Tensor:
    """Copy the keys of the first `sinks` tokens in the L full-attention layers. `sinks` must be less than 64.

    Return `[L, Hkv, sinks, width]` in the number format of the pool.
    """
    return torch.stack([pool.stored(blocks, layer, range(sinks))[0].k for layer in pool.groups.layers_of(0)])


def write_rotated_sinks(
    pool: HostPool, adapter: ModelAdapter, blocks: BlockTable, originals: torch.Tensor, offset: int
) -> None:
    """Rotate the sinks' original keys by `offset` positions, and write them to the first slots of `blocks`.

    `originals` has the format of `read_sinks`. No other block table may share the first block.
    """
    for layer, stored in zip(pool.groups.layers_of(0), originals, strict=True):
        keys = adapter.rotate_keys(layer, pool.format.decode(stored), offset)
        values = pool.stored(blocks, layer, range(stored.shape[1]))[0].v
        pool.fill(blocks, layer, 0, pool.format.encode(keys), values)
