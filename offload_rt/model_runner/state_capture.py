"""Copy recurrent state to snapshots while a prefill passes through the layers."""

from __future__ import annotations

from collections.abc import Mapping

from ..kv_cache.state_pool import StatePool
from ..models.recurrent import StateSlots


class StateCapture:
    """Copies the state of one sequence at some places of a prefill, layer by layer.

    A snapshot is complete when every layer has passed its place.

    Args:
        slots: Recurrent state on the device.
        slot: Slot of the sequence.
        pool: Memory of the snapshots.
        targets: Slots of `pool` by number of tokens, counted from the start of the sequence.
    """

    def __init__(self, slots: StateSlots, slot: int, pool: StatePool, targets: Mapping[int, int]) -> None:
        self._slots, self._slot, self._pool, self._targets = slots, slot, pool, dict(targets)
        self.places = sorted(targets)

    def finished(self, layer: int) -> None:
        """Copy the state of a decoder layer if it has just seen the tokens before a place."""
        if (target := self._targets.get(self._slots.seen[layer][self._slot])) is not None:
            self._pool.save(target, layer, *self._slots.of_layer(layer, self._slot))
