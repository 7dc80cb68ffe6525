"""Where a sequence's tokens lie in its block table, and which are evicted when the pool is full (InfiniGen §4.4).

Slots [0, sinks) hold the first tokens and the last `recent` slots the newest ones, so that what a policy selects
from is one range in every layer, before and after eviction begins. From then on the last slots are a ring: the token
that leaves the window moves to its victim's slot, layer by layer, and the newest token takes its place in the ring.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..config import EvictionOptions
from ..core import CHUNK, BlockTable
from ..errors import PoolFullError
from ..kv_cache.eviction import SlotState, victims
from ..kv_cache.pool import HostPool
from ..utils.units import format_size

Moves = list[tuple[int, int]]
"""(slot, target): the row in `slot` also takes slot `target`."""


class SlotTable(Protocol):
    """The slots of one sequence. `begin_step` decides where the newest token goes; the rest holds for that step."""

    @property
    def listens(self) -> bool:
        """Whether `selected` is to be called."""
        ...

    @property
    def newest(self) -> int:
        """Slot of the token that this step computes."""
        ...

    @property
    def context(self) -> int:
        """N: slots in use, the newest included."""
        ...

    @property
    def grows(self) -> bool:
        """Whether the sequence takes a new chunk where its last one is full and eviction may have to find it one."""
        ...

    def displaced(self, layer: int) -> tuple[int, int] | None:
        """(slot, victim): the row in `slot` has to move to `victim` before the newest token takes `slot`."""
        ...

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        """The token at `position` is next. Raises PoolFullError where there is no room for it."""
        ...

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        """Between steps, vacates the last chunk. Returns for each layer the (slot, target) pairs of rows that have to
        move, in order, before the pool takes the chunk; None, with nothing changed, where that cannot be."""
        ...

    def selected(self, layer: int, slots: torch.Tensor) -> None:
        """Rows of `slots` int64 `[Hkv, n]` were selected in this step."""
        ...

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens in `slots` (any shape) of a layer, during this step."""
        ...

    def fork(self) -> SlotTable:
        """An independent copy."""
        ...


class AppendOnly:
    """Token t in slot t for ever: a full pool is an error."""

    grows = False
    """No other sequence shrinks for it."""

    listens = False

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self.newest = -1

    @property
    def context(self) -> int:
        """Slots in use: one for each token."""
        return self.newest + 1

    def displaced(self, layer: int) -> tuple[int, int] | None:
        """Nothing ever moves."""
        return None

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        """Reserves the slot at `position`. Raises PoolFullError where there is no chunk for it."""
        self._pool.reserve(blocks, position + 1)
        self.newest = position

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        """Returns None: nothing is ever evicted."""
        return None

    def selected(self, layer: int, slots: torch.Tensor) -> None:
        """Does nothing: `listens` is False."""

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Returns `slots`: token t is in slot t."""
        return slots

    def fork(self) -> AppendOnly:
        """An independent copy."""
        twin = AppendOnly(self._pool)
        twin.newest = self.newest
        return twin


class InPlaceEviction:
    """Token t in slot t while the pool has room; then the newest tokens overwrite victims of their own sequence, which
    grows no more and only shrinks, chunk by chunk, for shorter ones. Sinks and the recent window are
    spared; with `protect="none"` the sinks are not. Chunks that another sequence holds are never overwritten, chunks
    that only the prefix tree holds leave it.

    Mutated by `begin_step` (positions, victims), `shrink` and `selected` (use); the rows are the link's to move.
    """

    listens = True

    def __init__(self, pool: HostPool, options: EvictionOptions, sinks: int, recent: int) -> None:
        self._pool, self._options = pool, options
        self._sinks = sinks if options.protect == "window" else 0
        self._recent = recent
        groups = pool.groups
        self._seeing_all = [layer for layer, group in enumerate(groups.group) if group == 0]
        """What slides keeps its tokens where they are, and gives them back by age."""
        self._place = {layer: groups.place[layer] for layer in self._seeing_all}
        self._layers, self._all_layers = len(self._seeing_all), len(groups.group)
        self._state = SlotState.empty(self._layers, 0)
        self._known = 0
        self._victims: list[int] | None = None
        self._ring_start = 0
        """The position of a token that takes the ring's first slot."""
        self.newest = -1
        self.context = 0

    @property
    def grows(self) -> bool:
        """Whether it has not begun to overwrite."""
        return self._victims is None

    def displaced(self, layer: int) -> tuple[int, int] | None:
        """Returns the newest token's slot and this step's victim in `layer`; None while the sequence grows."""
        if self._victims is None or layer not in self._place:
            return None
        return self.newest, self._victims[self._place[layer]]

    def begin_step(self, blocks: BlockTable, position: int) -> None:
        """Takes the next slot while the pool has chunks; else chooses a victim in every layer and a place in the ring.
        Raises PoolFullError where nothing may be overwritten."""
        if self._victims is None and not self._grow(blocks, position):
            self._need(blocks.capacity > self._sinks + self._recent, blocks)
            self._victims, self._ring_start = [], position
        if self._victims is None:
            self.newest, self.context = position, position + 1
        else:
            self._overwrite(blocks, position)

    def shrink(self, blocks: BlockTable) -> list[Moves] | None:
        """Evicts the victims of every layer: survivors of the last chunk fill their places, the ring
        moves down in order. From then on the sequence overwrites."""
        remaining, used = blocks.capacity - CHUNK, self.context
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
        """Whether the chunks from slot `first` on are, or become, this sequence's alone."""
        return all(self._pool.claim(blocks, index) for index in range(first // CHUNK, len(blocks.chunks)))

    def selected(self, layer: int, slots: torch.Tensor) -> None:
        """Enters the use of `slots` int64 `[Hkv, n]` in the state that ranks victims."""
        self._state.touch(self._place[layer], slots.to(self._state.position.device), self._known - 1)

    def positions(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Positions int64 of the tokens in `slots` (any shape), from the table of the layer."""
        return self._state.position[self._place[layer]][slots.to(self._state.position.device)]

    def fork(self) -> InPlaceEviction:
        """An independent copy; a sequence that overwrites cannot be forked, for its chunks change in place."""
        assert self.grows
        twin = InPlaceEviction(self._pool, self._options, self._sinks, self._recent)
        twin._state = self._state.clone()
        twin._known, twin.newest, twin.context = self._known, self.newest, self.context
        return twin

    def _grow(self, blocks: BlockTable, position: int) -> bool:
        """Room for one more token at the end, and every token up to it entered in the table; False if there is none."""
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
        """bool `[slots]`: sinks, the ring from slot `first` on, and chunks that others hold. The ring's own chunks
        must be this sequence's, since it writes there."""
        protected = torch.zeros(blocks.capacity, dtype=torch.bool)
        protected[: self._sinks] = True
        protected[first:] = True
        for index in range(self._sinks // CHUNK, len(blocks.chunks)):
            if not self._pool.claim(blocks, index):
                self._need((index + 1) * CHUNK <= first, blocks)
                protected[index * CHUNK : (index + 1) * CHUNK] = True
        return protected

    def _need(self, possible: bool, blocks: BlockTable) -> None:
        if not possible:
            held = blocks.capacity * self._pool.chunk_bytes // CHUNK
            raise PoolFullError(
                f"the host pool is full and this sequence's {blocks.capacity} token slots ({format_size(held)}) have "
                f"none to overwrite: {self._sinks} sinks, {self._recent} recent tokens and shared chunks are spared; "
                f"raise host_memory from {format_size(self._pool.limit_bytes)} or lower the policy's sinks and recent"
            )


def _filled(gone: set[int], vacated: range) -> Moves:
    """Moves that fill the places of the victims `gone` with the survivors of `vacated`, where as many slots as there
    are victims have to be empty."""
    holes = sorted(gone - set(vacated))
    return list(zip((slot for slot in vacated if slot not in gone), holes, strict=True))
