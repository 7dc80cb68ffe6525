"""Cutting tokens out of a computed sequence: rows are copied as they are, nothing is computed again (DESIGN section 4).

Keys keep their positions, which go on growing: RoPE sees only differences, and those between kept neighbours and the
tokens to come stay as they were. Only if the distance to the first tokens would leave the trained window are their keys
turned, once, from their originals, across the whole gap.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from ..core import BlockTable, ModelGeometry, ranges_of
from ..errors import InputError, ModelError
from ..models.adapter import ModelAdapter
from ..pool.pool import HostPool

SINKS = 4
"""First tokens that a truncation keeps unless told otherwise."""


def kept_tokens(computed: int, sinks: int, keep_last: int | None, drop: Seq[int] | None) -> list[int]:
    """Which of `computed` tokens stay, rising. Raises InputError where that is not said, or not possible."""
    if (keep_last is None) == (drop is None):
        raise InputError("truncate needs either keep_last or drop: how many tokens to keep, or which to drop")
    if keep_last is not None:
        if keep_last < 1:
            raise InputError(f"keep_last={keep_last} must be at least 1")
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
    """How many of the last of `held` tokens stay, besides the first SINKS, where `new` more would outgrow `positions`:
    half the positions, as in CachedAttention §4.1 (truncation ratio 0.5), or fewer where `new` needs the room; all of
    them where everything fits, or where a cut would not shorten anything."""
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
    if any(window is not None for window in geometry.windows):
        raise ModelError(
            f"{name} has sliding windows, which count positions: after a cut they would show tokens the model has "
            "never seen from so far; tokens outside the window are never attended anyway, so there is nothing to gain"
        )


def copy_rows(pool: HostPool, source: BlockTable, target: BlockTable, kept: Seq[int]) -> None:
    """Rows of the tokens `kept` of `source`, as they are stored, to the first slots of `target`, all layers."""
    at = 0
    for run in ranges_of(kept):
        for layer in range(pool.layout.layers):
            done = at
            for part in pool.stored(source, layer, run):
                stop = done + part.k.shape[1]
                for place in pool.stored(target, layer, range(done, stop)):
                    offset, size = done - (stop - part.k.shape[1]), place.k.shape[1]
                    place.k.copy_(part.k[:, offset : offset + size])
                    place.v.copy_(part.v[:, offset : offset + size])
                    done += size
        at += len(run)


def read_sinks(pool: HostPool, blocks: BlockTable, sinks: int) -> torch.Tensor:
    """Keys of the first `sinks` tokens (fewer than 64), `[L, Hkv, sinks, width]`, a copy."""
    return torch.stack([pool.stored(blocks, layer, range(sinks))[0].k for layer in range(pool.layout.layers)])


def turn_sinks(pool: HostPool, adapter: ModelAdapter, blocks: BlockTable, originals: torch.Tensor, offset: int) -> None:
    """Writes the sinks' keys `[L, Hkv, sinks, width]` turned by `offset` positions. The block table's first chunk must
    be its own."""
    for layer, stored in enumerate(originals):
        keys = adapter.rotate_keys(pool.format.decode(stored), offset)
        pool.stored(blocks, layer, range(stored.shape[1]))[0].k.copy_(pool.format.encode(keys))
