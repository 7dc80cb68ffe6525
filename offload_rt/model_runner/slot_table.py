"""Slots of a sequence's tokens in its block table, and token eviction in a full pool (InfiniGen §4.4).

Slots [0, sinks) contain the first tokens, and the last `recent` slots contain the most recent tokens. A policy selects
from the slots between them. When the pool is full, the last `recent` slots become a ring buffer. In each layer, the
token that leaves the recent window moves to the slot of an evicted token (the victim), and the newest token takes its
place in the ring buffer.
"""

from __future__ import annotations

import torch

from ..config import EvictionOptions
from ..core import BLOCK_SIZE, BlockTable
from ..errors import PoolFullError
from ..kv_cache.eviction import SlotState, victims
from ..kv_cache.pool import HostPool
from ..utils.units import format_size

Moves = list[tuple[int, int]]
"""Moves of KV in one layer, as pairs (source slot, target slot)."""


class SlotTable:
    """Slots of one sequence without eviction. Token t stays in slot t. If the pool is full, an error is raised.

    Attributes:
        newest: Slot of the token that the current step computes.
        context: Number of slots in use, including the slot of the newest token (N).
        moves: For each layer, the pair (slot of the newest token, slot of the evicted token). Before the newest token
            is written, the KV in the first slot must be copied to the second.
        grows: Whether the sequence still gets new blocks from `CacheManager.rebalance`.
        records_selected: Whether the caller must report the selected slots with `record_selected`.
    """

    grows = records_selected = False

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.newest, self.context = -1, 0
        self.moves: dict[int, tuple[int, int]] = {}

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        """Choose and reserve a slot for the token at `position`. Raise PoolFullError if there is no slot."""
        self._pool.reserve(blocks, position + 1)
        self.newest, self.context = position, position + 1

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        """Evict tokens so that the last block can be freed. Call this only between steps.

        Return the KV moves for each layer. The caller must apply them in order before it frees the block. Return None
        if no tokens can be evicted.
        """
        return None

    def record_selected(self, layer: int, slots: torch.Tensor) -> None:
        """Record that the current step selected `slots`, int64 `[Hkv, n]`."""

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the text positions of the tokens in `slots` (any shape) in the current step."""
        return slots

    def fork(self) -> SlotTable:
        copy = SlotTable(self._pool)
        copy.newest, copy.context = self.newest, self.context
        return copy


class InPlaceEviction(SlotTable):
    """Slot table with eviction: when the pool is full, new tokens overwrite evicted tokens of the same sequence.

    Before the first eviction, token t is in slot t. Afterwards, the sequence does not grow any more, but may lose
    blocks to shorter sequences. The sinks (unless `protect="none"`), the recent window and shared blocks are never
    overwritten. Blocks that are overwritten are removed from the prefix tree. The caller has to move the KV.
    """

    records_selected = True

    def __init__(self, pool: HostPool, options: EvictionOptions, sinks: int, recent: int) -> None:
        super().__init__(pool)
        self._options = options
        self._sinks = sinks if options.protect == "window" else 0
        self._recent = recent
        groups = pool.groups
        # Only these layers evict. In sliding-window layers, token t stays in slot t, and blocks outside the window are
        # freed.
        self._full_layers = groups.layers_of(0)
        self._storage_layer = {layer: groups.storage_layer[layer] for layer in self._full_layers}
        self._layers, self._all_layers = len(self._full_layers), len(groups.group)
        self._state = SlotState.empty(self._layers, 0)
        self._length = 0
        self.grows = True  # True until the first token is overwritten
        self._ring_start = 0  # position of any token that is in the first slot of the ring buffer

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        if self.grows and not self._grow(blocks, position):
            self._require(blocks.capacity > self._sinks + self._recent, blocks)
            self.grows, self._ring_start = False, position
        if self.grows:
            self.newest, self.context = position, position + 1
        else:
            self._overwrite(blocks, position)  # This evicts a token in every layer.

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        remaining, context = blocks.capacity - BLOCK_SIZE, self.context
        first, dropped = remaining - self._recent, context - remaining
        if first <= self._sinks or dropped <= 0:
            return None
        if not all(self._pool.make_exclusive(blocks, index) for index in range(first // BLOCK_SIZE, len(blocks.ids))):
            return None  # Another sequence uses one of the blocks.
        # Evict as many tokens as the last block contains. Tokens of this block that are not evicted move to the freed
        # slots, and the ring buffer moves to the new end.
        protected = self._protected(blocks, context - self._recent)[:context]
        state = self._state.cut(context)
        evicted_slots = victims(self._options.policy, state, protected.expand(self._layers, -1), self._length, dropped)
        if bool((evicted_slots < 0).any()):
            return None
        ring = [(slot, slot - dropped) for slot in range(context - self._recent, context)]
        moves: list[Moves] = [[] for _ in range(self._all_layers)]
        for index, (layer, evicted) in enumerate(zip(self._full_layers, evicted_slots.tolist(), strict=True)):
            moves[layer] = _moves_to_victims(set(evicted), range(first, context - self._recent)) + ring
            state.apply_moves(index, moves[layer])
        self._state, self.context = state.cut(remaining), remaining
        if self.grows:
            self.grows, self._ring_start = False, self._length
        return moves

    def record_selected(self, layer: int, slots: torch.Tensor) -> None:
        self._state.touch(self._storage_layer[layer], slots.to(self._state.position.device), self._length - 1)

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self._state.position[self._storage_layer[layer]][slots.to(self._state.position.device)]

    def fork(self) -> InPlaceEviction:
        assert self.grows, "a sequence that overwrites tokens cannot be forked"
        copy = InPlaceEviction(self._pool, self._options, self._sinks, self._recent)
        copy._state = self._state.clone()
        copy._length, copy.newest, copy.context = self._length, self.newest, self.context
        return copy

    def _grow(self, blocks: BlockTable, position: int) -> bool:
        try:
            self._pool.reserve(blocks, position + 1)
        except PoolFullError:
            return False
        if blocks.capacity > self._state.position.shape[1]:
            self._state = self._state.grown(blocks.capacity)
        self._state.fill(range(self._length, position + 1), position, self._recent)
        self._length = position + 1
        return True

    def _overwrite(self, blocks: BlockTable, position: int) -> None:
        slots = blocks.capacity
        first = slots - self._recent
        self.newest, self.context = first + (position - self._ring_start) % self._recent, slots
        protected = self._protected(blocks, first).expand(self._layers, -1)
        evicted = victims(self._options.policy, self._state, protected, position)
        self._require(bool((evicted >= 0).all()), blocks)
        self._state.move(self.newest, evicted[:, 0])
        self._state.record_write(torch.full((self._layers,), self.newest), position, position, self._recent)
        self._length = position + 1
        pairs = zip(self._full_layers, evicted[:, 0].tolist(), strict=True)
        self.moves = {layer: (self.newest, victim) for layer, victim in pairs}

    def _protected(self, blocks: BlockTable, first: int) -> torch.Tensor:
        """Return a mask of the slots that must not be overwritten (sinks, ring buffer, shared blocks), bool `[slots]`.

        The ring buffer begins at slot `first`. New tokens are written to it, so its blocks must not be shared.
        """
        protected = torch.zeros(blocks.capacity, dtype=torch.bool)
        protected[: self._sinks] = True
        protected[first:] = True
        for index in range(self._sinks // BLOCK_SIZE, len(blocks.ids)):
            if not self._pool.make_exclusive(blocks, index):
                self._require((index + 1) * BLOCK_SIZE <= first, blocks)
                protected[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE] = True
        return protected

    def _require(self, possible: bool, blocks: BlockTable) -> None:
        if not possible:
            kv_bytes = blocks.capacity * self._pool.block_bytes // BLOCK_SIZE
            raise PoolFullError(
                f"the KV cache is full and none of this sequence's {blocks.capacity} tokens ({format_size(kv_bytes)}) "
                f"can be evicted: {self._sinks} sinks, {self._recent} recent tokens and shared blocks are protected; "
                f"raise host_memory from {format_size(self._pool.limit_bytes)}, or lower the policy's sinks and recent"
            )


def _moves_to_victims(evicted: set[int], vacated: range) -> Moves:
    """Return the moves of the tokens that remain in `vacated` slots to the slots of evicted tokens."""
    free_slots = sorted(evicted - set(vacated))
    return list(zip((slot for slot in vacated if slot not in evicted), free_slots, strict=True))
