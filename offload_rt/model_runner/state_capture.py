"""Copies of recurrent state for snapshots, made while a prefill passes through the layers."""

from __future__ import annotations

from collections.abc import Mapping

from ..kv_cache.state_pool import StatePool
from ..models.recurrent import StateSlots


class StateCapture:
    """Copies the recurrent state of one sequence to snapshots at certain places of a prefill, layer by layer.

    A place is a number of tokens. A snapshot is complete when every layer has processed the tokens before its place.

    Args:
        slots: Recurrent state of all sequences on the device.
        slot: Slot of the sequence in `slots`.
        pool: Memory of the snapshots.
        targets: Slot of `pool` for the snapshot at each place. Places are counted from the start of the sequence.
    """

    def __init__(self, slots: StateSlots, slot: int, pool: StatePool, targets: Mapping[int, int]) -> None:
        self._slots, self._slot, self._pool, self._targets = slots, slot, pool, dict(targets)
        self.places = sorted(targets)

    def finished(self, layer: int) -> None:
        """Copy the state of a decoder layer if the layer has just processed the last token before a place."""
        if (target := self._targets.get(self._slots.seen[layer][self._slot])) is not None:
            self._pool.save(target, layer, *self._slots.of_layer(layer, self._slot))
