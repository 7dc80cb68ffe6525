"""Which slots of a sequence give way when the pool is full (InfiniGen §4.4): state per slot, ranking of victims.

Pure tensor arithmetic on the state's device, no synchronisation, no loop over slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COUNTER_LIMIT = 255
"""A counter that gets here has saturated; it fits uint8."""

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class SlotState:
    """What is known of each slot of one sequence, `[L, slots]` each; the layers of a slot differ after overwrites.

    position: int64, position of the token that the slot holds, -1 where it holds none.
    since: int64, the first step in which the token could be selected: before, it was in the recent window.
    last_used: int64, the last step in which the slot was written or any of its rows selected.
    counter: uint8, steps in which any of its rows was selected; if one of a layer saturates, all of it are halved.

    Mutated in place by `fill`, `place`, `move`, `follow` and `touch`.
    """

    position: torch.Tensor
    since: torch.Tensor
    last_used: torch.Tensor
    counter: torch.Tensor

    @classmethod
    def empty(cls, layers: int, slots: int, device: torch.device | str = "cpu") -> SlotState:
        """A state of empty slots."""
        return cls(
            torch.full((layers, slots), -1, dtype=torch.int64, device=device),
            torch.zeros((layers, slots), dtype=torch.int64, device=device),
            torch.full((layers, slots), -1, dtype=torch.int64, device=device),
            torch.zeros((layers, slots), dtype=torch.uint8, device=device),
        )

    def grown(self, slots: int) -> SlotState:
        """The same state with room for `slots` slots, the added ones empty."""
        grown = SlotState.empty(self.position.shape[0], slots, self.position.device)
        for old, new in zip(self._tables(), grown._tables(), strict=True):
            new[:, : old.shape[1]] = old
        return grown

    def cut(self, slots: int) -> SlotState:
        """An independent copy of the first `slots` slots."""
        return SlotState(*(table[:, :slots].clone() for table in self._tables()))

    def follow(self, layer: int, moves: Sequence[tuple[int, int]]) -> None:
        """What a layer's slots hold moves as (slot, target) pairs say, one after another."""
        for table in self._tables():
            for slot, target in moves:
                table[layer, target] = table[layer, slot]

    def clone(self) -> SlotState:
        """An independent copy."""
        return SlotState(*(table.clone() for table in self._tables()))

    def _tables(self) -> tuple[torch.Tensor, ...]:
        return self.position, self.since, self.last_used, self.counter

    def fill(self, tokens: range, step: int, recent: int) -> None:
        """Token t of `tokens` is written to slot t of every layer; the first step that selects is `step`, and the
        newest `recent` tokens are not selected."""
        at = torch.arange(tokens.start, tokens.stop, device=self.position.device)
        self.position[:, tokens.start : tokens.stop] = at
        self.since[:, tokens.start : tokens.stop] = (at + recent).clamp_min(step)
        self.last_used[:, tokens.start : tokens.stop] = at
        self.counter[:, tokens.start : tokens.stop] = 0

    def move(self, source: int, targets: torch.Tensor) -> None:
        """What slot `source` of each layer holds, and its history, moves to slot `targets[l]`; targets int64 `[L]`."""
        for table in self._tables():
            table.scatter_(1, targets[:, None], table[:, source : source + 1].clone())

    def place(self, slots: torch.Tensor, position: int, step: int, recent: int) -> None:
        """The token at `position` is written to slot `slots[l]` of each layer l in step `step`, to be selected after
        `recent` more; slots int64 `[L]`."""
        index = slots[:, None]
        self.position.scatter_(1, index, position)
        self.since.scatter_(1, index, step + recent)
        self.last_used.scatter_(1, index, step)
        self.counter.scatter_(1, index, 0)

    def touch(self, layer: int, slots: torch.Tensor, step: int) -> None:
        """Rows of `slots` (int64, any shape, repeats allowed: a slot counts once a step) are selected in a layer."""
        used = torch.zeros_like(self.counter[layer], dtype=torch.bool).index_fill_(0, slots.flatten(), True)
        self.last_used[layer].masked_fill_(used, step)
        counter = self.counter[layer] + used
        self.counter[layer] = torch.where(counter.max() >= COUNTER_LIMIT, counter >> 1, counter)


def _used_share(state: SlotState, step: int) -> torch.Tensor:
    """Share of the steps since a token could be selected in which it was, in units of 2^-16, as if it had been selected
    once in `PRIOR_STEPS` steps before them."""
    steps = (step - state.since).clamp_min(0) + PRIOR_STEPS
    return ((state.counter.to(torch.int64) + 1) << 16) // steps


PRIOR_STEPS = 8
"""Weight of what is thought of a token before it could be selected."""

RANKINGS: dict[str, Callable[[SlotState, int], torch.Tensor]] = {
    "fifo": lambda state, step: torch.zeros_like(state.position),
    "lru": lambda state, step: state.last_used,
    "counter": _used_share,
}
"""What is compared first, smallest first, for each victim policy; equal slots give way oldest position first.

The counter is compared per step. As published, counts themselves are compared; then a token that leaves the recent
window starts at none, and is gone before it was ever asked for. What each policy costs: `make paper`, table
`perplexity_with_a_bounded_pool.md`.
"""


def victims(policy: str, state: SlotState, protected: torch.Tensor, step: int, count: int = 1) -> torch.Tensor:
    """The `count` slots of each layer that give way first in step `step` under `policy` (a key of `RANKINGS`), int64
    `[L, count]` in that order; -1 where a layer has no more. Empty slots and those that `protected` (bool `[L, slots]`)
    marks never do. Positions are below 2**32."""
    key = (RANKINGS[policy](state, step) << 32) + state.position
    key = key.masked_fill(protected | (state.position < 0), _NEVER)
    ranked, slots = key.topk(count, dim=1, largest=False, sorted=True)
    return slots.masked_fill(ranked == _NEVER, -1)
