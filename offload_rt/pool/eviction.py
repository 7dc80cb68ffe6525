"""Which slots of a sequence give way when the pool is full (InfiniGen §4.4): state per slot, ranking of victims.

Pure tensor arithmetic on the state's device, no synchronisation, no loop over slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

COUNTER_LIMIT = 255
"""A counter that gets here has saturated; it fits uint8."""

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class SlotState:
    """What is known of each slot of one sequence, `[L, slots]` each; the layers of a slot differ after overwrites.

    position: int64, position of the token that the slot holds, -1 where it holds none.
    last_used: int64, the last step in which the slot was written or any of its rows selected.
    counter: uint8, steps in which any of its rows was selected; if one of a layer saturates, all of it are halved.

    Mutated in place by `fill`, `place`, `move` and `touch`.
    """

    position: torch.Tensor
    last_used: torch.Tensor
    counter: torch.Tensor

    @classmethod
    def empty(cls, layers: int, slots: int, device: torch.device | str = "cpu") -> SlotState:
        """A state of empty slots."""
        return cls(
            torch.full((layers, slots), -1, dtype=torch.int64, device=device),
            torch.full((layers, slots), -1, dtype=torch.int64, device=device),
            torch.zeros((layers, slots), dtype=torch.uint8, device=device),
        )

    def grown(self, slots: int) -> SlotState:
        """The same state with room for `slots` slots, the added ones empty."""
        grown = SlotState.empty(self.position.shape[0], slots, self.position.device)
        for old, new in zip(self._tables(), grown._tables(), strict=True):
            new[:, : old.shape[1]] = old
        return grown

    def clone(self) -> SlotState:
        """An independent copy."""
        return SlotState(*(table.clone() for table in self._tables()))

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.position, self.last_used, self.counter

    def fill(self, tokens: range) -> None:
        """Token t of `tokens` is written to slot t of every layer in step t."""
        at = torch.arange(tokens.start, tokens.stop, device=self.position.device)
        self.position[:, tokens.start : tokens.stop] = at
        self.last_used[:, tokens.start : tokens.stop] = at
        self.counter[:, tokens.start : tokens.stop] = 0

    def move(self, source: int, targets: torch.Tensor) -> None:
        """What slot `source` of each layer holds, and its history, moves to slot `targets[l]`; targets int64 `[L]`."""
        for table in self._tables():
            table.scatter_(1, targets[:, None], table[:, source : source + 1].clone())

    def place(self, slots: torch.Tensor, position: int, step: int) -> None:
        """The token at `position` is written to slot `slots[l]` of each layer l in step `step`; slots int64 `[L]`."""
        index = slots[:, None]
        self.position.scatter_(1, index, position)
        self.last_used.scatter_(1, index, step)
        self.counter.scatter_(1, index, 0)

    def touch(self, layer: int, slots: torch.Tensor, step: int) -> None:
        """Rows of `slots` (int64, any shape, repeats allowed: a slot counts once a step) are selected in a layer."""
        used = torch.zeros_like(self.counter[layer], dtype=torch.bool).index_fill_(0, slots.flatten(), True)
        self.last_used[layer].masked_fill_(used, step)
        counter = self.counter[layer] + used
        self.counter[layer] = torch.where(counter.max() >= COUNTER_LIMIT, counter >> 1, counter)


RANKINGS: dict[str, Callable[[SlotState], torch.Tensor]] = {
    "fifo": lambda state: torch.zeros_like(state.position),
    "lru": lambda state: state.last_used,
    "counter": lambda state: state.counter.to(torch.int64),
}
"""What is compared first, smallest first, for each victim policy; equal slots give way oldest position first."""


def victims(policy: str, state: SlotState, protected: torch.Tensor, count: int = 1) -> torch.Tensor:
    """The `count` slots of each layer that give way first under `policy` (a key of `RANKINGS`), int64 `[L, count]` in
    that order; -1 where a layer has no more. Empty slots and those that `protected` (bool `[L, slots]`) marks never do.
    Positions are below 2**32."""
    key = (RANKINGS[policy](state) << 32) + state.position
    key = key.masked_fill(protected | (state.position < 0), _NEVER)
    ranked, slots = key.topk(count, dim=1, largest=False, sorted=True)
    return slots.masked_fill(ranked == _NEVER, -1)
