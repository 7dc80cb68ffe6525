"""Eviction of tokens from a full KV cache (InfiniGen §4.4): usage statistics per slot, and the eviction order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COUNTER_LIMIT = 255  # a saturated uint8 counter

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class SlotState:
    """Usage statistics of a sequence's token slots, as tensors `[L, slots]`.

    The tensors are modified in place, without synchronisation with the host. A slot stores the KV of one token. After
    evictions, a slot may contain different tokens in different layers.
    """

    position: torch.Tensor  # int64, text position of the slot's token; -1 if the slot is empty
    # int64, first decode step in which the token could be selected, which is when it leaves the recent window.
    since: torch.Tensor
    last_used: torch.Tensor  # int64, last decode step in which the slot was written or at least one head selected it
    # uint8, number of decode steps in which at least one head selected the slot. When a counter saturates, all counters
    # of its layer are halved.
    counter: torch.Tensor

    @classmethod
    def empty(cls, layers: int, slots: int, device: torch.device | str = "cpu") -> SlotState:
        return cls(
            torch.full((layers, slots), -1, dtype=torch.int64, device=device),
            torch.zeros((layers, slots), dtype=torch.int64, device=device),
            torch.full((layers, slots), -1, dtype=torch.int64, device=device),
            torch.zeros((layers, slots), dtype=torch.uint8, device=device),
        )

    def grown(self, slots: int) -> SlotState:
        grown = SlotState.empty(self.position.shape[0], slots, self.position.device)
        for old, new in zip(self._tables(), grown._tables(), strict=True):
            new[:, : old.shape[1]] = old
        return grown

    def cut(self, slots: int) -> SlotState:
        return SlotState(*(table[:, :slots].clone() for table in self._tables()))

    def apply_moves(self, layer: int, moves: Sequence[tuple[int, int]]) -> None:
        """Copy the state of tokens that were moved within `layer`. `moves` are pairs (source slot, target slot)."""
        for table in self._tables():
            for slot, target in moves:
                table[layer, target] = table[layer, slot]

    def clone(self) -> SlotState:
        return SlotState(*(table.clone() for table in self._tables()))

    def _tables(self) -> tuple[torch.Tensor, ...]:
        return self.position, self.since, self.last_used, self.counter

    def fill(self, tokens: range, step: int, recent: int) -> None:
        """Record that token t of `tokens` was written to slot t in every layer.

        A token can be selected from decode step `step` on, but not while it is among the `recent` newest tokens.
        """
        at = torch.arange(tokens.start, tokens.stop, device=self.position.device)
        self.position[:, tokens.start : tokens.stop] = at
        self.since[:, tokens.start : tokens.stop] = (at + recent).clamp_min(step)
        self.last_used[:, tokens.start : tokens.stop] = at
        self.counter[:, tokens.start : tokens.stop] = 0

    def move(self, source: int, targets: torch.Tensor) -> None:
        """In each layer l, copy the state of slot `source` to slot `targets[l]`. `targets` is int64 `[L]`."""
        for table in self._tables():
            table.scatter_(1, targets[:, None], table[:, source : source + 1].clone())

    def record_write(self, slots: torch.Tensor, position: int, step: int, recent: int) -> None:
        """Record that decode step `step` wrote the token at `position` to slot `slots[l]` of each layer l.

        `slots` is int64 `[L]`. The token leaves the recent window `recent` steps later.
        """
        index = slots[:, None]
        self.position.scatter_(1, index, position)
        self.since.scatter_(1, index, step + recent)
        self.last_used.scatter_(1, index, step)
        self.counter.scatter_(1, index, 0)

    def touch(self, layer: int, slots: torch.Tensor, step: int) -> None:
        """Record that `layer` selected `slots` in decode step `step`.

        `slots` is int64, of any shape, and may contain duplicates.
        """
        used = torch.zeros_like(self.counter[layer], dtype=torch.bool).index_fill_(0, slots.flatten(), True)
        self.last_used[layer].masked_fill_(used, step)
        counter = self.counter[layer] + used
        self.counter[layer] = torch.where(counter.max() >= COUNTER_LIMIT, counter >> 1, counter)


def _selection_rate(state: SlotState, step: int) -> torch.Tensor:
    """Return how often each token was selected per decode step since it left the recent window, in units of 2^-16.

    The rate of a new token is one selection in `PRIOR_STEPS` steps.
    """
    steps = (step - state.since).clamp_min(0) + PRIOR_STEPS
    return ((state.counter.to(torch.int64) + 1) << 16) // steps


PRIOR_STEPS = 8

RANKINGS: dict[str, Callable[[SlotState, int], torch.Tensor]] = {
    "fifo": lambda state, step: torch.zeros_like(state.position),
    "lru": lambda state, step: state.last_used,
    "counter": _selection_rate,
}
"""For each eviction policy, a function (state, step) -> sort keys `[L, slots]`.

The token with the smallest key is evicted first. Ties are broken in favour of evicting the lowest position first.

"counter" divides the selection count by the number of steps. If it compared the counts themselves, as in the paper, a
token that has just left the recent window would have a count of zero, and would be evicted before it could be selected.
For perplexity, see the table `perplexity_with_a_bounded_pool.md` of `make paper`.
"""


def victims(policy: str, state: SlotState, protected: torch.Tensor, step: int, count: int = 1) -> torch.Tensor:
    """Return the slots to evict first in each layer.

    Args:
        policy: A key of `RANKINGS`.
        state: Eviction state. Positions must be below 2**32. Empty slots are never returned.
        protected: Mask of the slots that must not be evicted, bool `[L, slots]`.

    Returns:
        Slots in eviction order, int64 `[L, count]`, padded with -1 if a layer has fewer slots to evict.
    """
    key = (RANKINGS[policy](state, step) << 32) + state.position
    key = key.masked_fill(protected | (state.position < 0), _NEVER)
    ranked, slots = key.topk(count, dim=1, largest=False, sorted=True)
    return slots.masked_fill(ranked == _NEVER, -1)
