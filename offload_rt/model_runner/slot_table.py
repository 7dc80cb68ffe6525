"""Slots of a sequence's tokens in its block table, and token eviction if the pool is full (InfiniGen §4.4).

Slots [0, sinks) hold the first tokens, and the last `recent` slots hold the newest ones, so that a policy selects from
the slots between them, before and after eviction begins. If the pool is full, the last `recent` slots are a ring: the
token that leaves the window moves to the slot of a victim, layer by layer, and the newest token takes its place.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..config import EvictionOptions
from ..core import BLOCK_SIZE, BlockTable
from ..errors import PoolFullError
from ..kv_cache.eviction import SlotState, victims
from ..kv_cache.pool import HostPool
from ..utils.units import format_size

Moves = list[tuple[int, int]]
"""(slot, target): copy the KV in `slot` to slot `target`."""


class SlotTable(Protocol):
    """Slots of one sequence. `begin_step` chooses the newest token's slot; the properties hold for that step."""

    @property
    def listens(self) -> bool:
        """Whether `selected` must be called."""
        ...

    @property
    def newest(self) -> int:
        """Slot of the token that this step computes."""
        ...

    @property
    def context(self) -> int:
        """Number of slots in use, including the newest (N)."""
        ...

    @property
    def grows(self) -> bool:
        """Whether `rebalance` reserves the next block of the sequence when the last one is full."""
        ...

    def displaced(self, layer: int) -> tuple[int, int] | None:
        """Return (slot, victim), or None.

        The KV in `slot` must move to slot `victim` before the newest token takes `slot`.
        """
        ...

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        """Prepare the slot of the token at `position`. Raise PoolFullError if there is no room."""
        ...

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        """Remove the last block from the slot table, between steps.

        Returns:
            The KV moves of each layer. The caller applies them in order and then frees the block. None, without any
            change, if the block cannot be removed.
        """
        ...

    def selected(self, layer: int, slots: torch.Tensor) -> None:
        """Record that `slots` int64 `[Hkv, n]` were selected in this step."""
        ...

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens in `slots` (any shape) of a layer, during this step."""
        ...

    def fork(self) -> SlotTable:
        """Return an independent copy."""
        ...


class AppendOnly:
    """Token t stays in slot t. A full pool is an error."""

    grows = False

    listens = False

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.newest = -1

    @property
    def context(self) -> int:
        """Number of slots in use: one per token."""
        return self.newest + 1

    def displaced(self, layer: int) -> tuple[int, int] | None:
        """Return None, because KV never moves."""
        return None

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        """Reserve the slot at `position`. Raise PoolFullError if there is no free block."""
        self._pool.reserve(blocks, position + 1)
        self.newest = position

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        """Return None, because tokens are not evicted."""
        return None

    def selected(self, layer: int, slots: torch.Tensor) -> None:
        """No-op, because `listens` is False."""

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return `slots`, because token t is in slot t."""
        return slots

    def fork(self) -> AppendOnly:
        twin = AppendOnly(self._pool)
        twin.newest = self.newest
        return twin


class InPlaceEviction:
    """Token t stays in slot t while the pool has room. Then new tokens overwrite victims of their own sequence.

    From then on the sequence does not grow. It may shrink block by block for shorter sequences. Sinks (unless
    `protect="none"`) and the recent window are never overwritten, nor are blocks of other sequences. Overwritten blocks
    leave the prefix tree. The caller moves the KV.
    """

    listens = True

    def __init__(self, pool: HostPool, options: EvictionOptions, sinks: int, recent: int) -> None:
        self._pool, self._options = pool, options
        self._sinks = sinks if options.protect == "window" else 0
        self._recent = recent
        groups = pool.groups
        # Sliding layers keep token t in slot t and free their blocks by age.
        self._seeing_all = [layer for layer, group in enumerate(groups.group) if group == 0]
        self._place = {layer: groups.place[layer] for layer in self._seeing_all}
        self._layers, self._all_layers = len(self._seeing_all), len(groups.group)
        self._state = SlotState.empty(self._layers, 0)
        self._known = 0
        self._victims: list[int] | None = None
        self._ring_start = 0  # position of a token in the first slot of the ring
        self.newest = -1
        self.context = 0

    @property
    def grows(self) -> bool:
        """Whether no token has been overwritten yet."""
        return self._victims is None

    def displaced(self, layer: int) -> tuple[int, int] | None:
        """Return the newest token's slot and this step's victim in `layer`; None while the sequence grows."""
        if self._victims is None or layer not in self._place:
            return None
        return self.newest, self._victims[self._place[layer]]

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        """Use the next slot if the pool has room. Otherwise choose a victim in every layer and a slot in the ring.

        Raises PoolFullError if no token can be overwritten.
        """
        if self._victims is None and not self._grow(blocks, position):
            self._need(blocks.capacity > self._sinks + self._recent, blocks)
            self._victims, self._ring_start = [], position
        if self._victims is None:
            self.newest, self.context = position, position + 1
        else:
            self._overwrite(blocks, position)

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        """Evict victims in every layer.

        Tokens that remain of the last block fill the freed slots, and the ring moves.
        """
        remaining, used = blocks.capacity - BLOCK_SIZE, self.context
        first, dropped = remaining - self._recent, used - remaining
        if first <= self._sinks or dropped <= 0 or not self._owns(blocks, first):
            return None
        protected = self._protected(blocks, used - self._recent)[:used]
        state = self._state.cut(used)
        gone = victims(self._options.policy, state, protected.expand(self._layers, -1), self._known, dropped)
        if bool((gone < 0).any()):
            return None
        ring = [(slot, slot - dropped) for slot in range(used - self._recent, used)]
        moves: list[Moves] = [[] for _ in range(self._all_layers)]
        for place, (layer, evicted) in enumerate(zip(self._seeing_all, gone.tolist(), strict=True)):
            moves[layer] = _filled(set(evicted), range(first, used - self._recent)) + ring
            state.follow(place, moves[layer])
        self._state, self.context = state.cut(remaining), remaining
        if self._victims is None:
            self._victims, self._ring_start = [], self._known
        return moves

    def _owns(self, blocks: BlockTable, first: int) -> bool:
        """Return whether the blocks from slot `first` on belong to this sequence alone. Claims them if possible."""
        return all(self._pool.claim(blocks, index) for index in range(first // BLOCK_SIZE, len(blocks.ids)))

    def selected(self, layer: int, slots: torch.Tensor) -> None:
        """Record the use of `slots` int64 `[Hkv, n]` for the ranking of victims."""
        self._state.touch(self._place[layer], slots.to(self._state.position.device), self._known - 1)

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the positions int64 of the tokens in `slots` (any shape)."""
        return self._state.position[self._place[layer]][slots.to(self._state.position.device)]

    def fork(self) -> InPlaceEviction:
        """Return an independent copy. A sequence that overwrites tokens cannot be forked."""
        assert self.grows
        twin = InPlaceEviction(self._pool, self._options, self._sinks, self._recent)
        twin._state = self._state.clone()
        twin._known, twin.newest, twin.context = self._known, self.newest, self.context
        return twin

    def _grow(self, blocks: BlockTable, position: int) -> bool:
        """Reserve a slot at the end. Return False if there is no room."""
        try:
            self._pool.reserve(blocks, position + 1)
        except PoolFullError:
            return False
        if blocks.capacity > self._state.position.shape[1]:
            self._state = self._state.grown(blocks.capacity)
        self._state.fill(range(self._known, position + 1), position, self._recent)
        self._known = position + 1
        return True

    def _overwrite(self, blocks: BlockTable, position: int) -> None:
        slots = blocks.capacity
        first = slots - self._recent
        self.newest, self.context = first + (position - self._ring_start) % self._recent, slots
        protected = self._protected(blocks, first).expand(self._layers, -1)
        chosen = victims(self._options.policy, self._state, protected, position)
        self._need(bool((chosen >= 0).all()), blocks)
        self._state.move(self.newest, chosen[:, 0])
        self._state.place(torch.full((self._layers,), self.newest), position, position, self._recent)
        self._known = position + 1
        self._victims = chosen[:, 0].tolist()

    def _protected(self, blocks: BlockTable, first: int) -> torch.Tensor:
        """Return bool `[slots]`: sinks, the ring from slot `first` on, and blocks of other sequences.

        Blocks of the ring must belong to this sequence, which writes to them.
        """
        protected = torch.zeros(blocks.capacity, dtype=torch.bool)
        protected[: self._sinks] = True
        protected[first:] = True
        for index in range(self._sinks // BLOCK_SIZE, len(blocks.ids)):
            if not self._pool.claim(blocks, index):
                self._need((index + 1) * BLOCK_SIZE <= first, blocks)
                protected[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE] = True
        return protected

    def _need(self, possible: bool, blocks: BlockTable) -> None:
        if not possible:
            held = blocks.capacity * self._pool.block_bytes // BLOCK_SIZE
            raise PoolFullError(
                f"the KV cache is full and none of this sequence's {blocks.capacity} tokens ({format_size(held)}) can "
                f"be evicted: {self._sinks} sinks, {self._recent} recent tokens and shared blocks are protected; raise "
                f"host_memory from {format_size(self._pool.limit_bytes)}, or lower the policy's sinks and recent"
            )


def _filled(gone: set[int], vacated: range) -> Moves:
    """Return moves from `vacated` slots whose tokens remain to the slots of the victims `gone`."""
    holes = sorted(gone - set(vacated))
    return list(zip((slot for slot in vacated if slot not in gone), holes, strict=True))
