"""Experts of a mixture that do not fit the device: all of them stay in host memory, and those that the tokens of a step
choose cross the link, unless the device has them from before.

A layer keeps so many of its experts on the device, those used last. The mathematics is transformers' own: its module
is called with the experts that are there in place of all of them, and with choices that name their slots.

Experts are fetched when the router has chosen, not before. From the residual stream a layer ahead the choice can be
guessed, but an expert takes the link many times longer than a layer computes: a right guess hides no more than that
layer, and a wrong one holds the link for a whole expert (`offload-rt eval experts` measures how often a model's guesses
are right).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...kv_cache.arena import page_lock, reserve
from ...models.packed import aligned
from ...models.placement import experts_of


class ExpertCache(nn.Module):
    """The experts of one layer, `[E, ...]` each parameter in host memory (page-locked on CUDA), of which `slots` are on
    the device too, `[slots, ...]`. It stands in the place of transformers' module, which it calls; that has the slots
    as its parameters, and they are none of the model's."""

    def __init__(self, experts: Any, slots: int, device: torch.device) -> None:
        """Takes the parameters of `experts`, all in host memory, out of where they lie. MemoryLimitError where the host
        memory cannot be had."""
        super().__init__()
        self.num_experts, self.slots = int(experts.num_experts), min(slots, int(experts.num_experts))
        weights = dict(experts.named_parameters())
        memory = torch.frombuffer(
            reserve(sum(aligned(weight.nbytes) for weight in weights.values()), "experts that do not fit the device"),
            dtype=torch.uint8,
        )
        if device.type == "cuda":
            page_lock(memory, self)
        self._host: list[torch.Tensor] = []
        self._there: list[torch.Tensor] = []
        at = 0
        for weight in weights.values():
            own = memory[at : at + weight.nbytes].view(weight.dtype).view(weight.shape)
            own.copy_(weight.data)
            at += aligned(weight.nbytes)
            self._host.append(own)
            self._there.append(own.new_empty((self.slots, *own.shape[1:]), device=device))
            weight.data = self._there[-1]
        experts.num_experts = self.slots
        self._module = (experts,)  # not a submodule: its parameters are buffers, not the layer's weights
        self._held: list[int | None] = [None] * self.slots
        self._used = [0] * self.slots
        self._now = 0
        self.bytes = self.chosen = self.found = 0
        """What has crossed the link so far; how many experts steps have chosen, and how many of them were there."""

    @property
    def host_bytes(self) -> int:
        """All experts."""
        return sum(own.nbytes for own in self._host)

    @property
    def device_bytes(self) -> int:
        """The slots."""
        return sum(there.nbytes for there in self._there)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the experts `index` `[T, k]` give for `hidden` `[T, D]`, weighted with `weights` `[T, k]`: `[T, D]`."""
        choices = index.cpu()
        chosen = choices.unique().tolist()
        self.chosen += len(chosen)
        self.found += len(set(chosen) & set(self._held))
        if len(chosen) <= self.slots:
            there = self._bring(chosen)
            out: torch.Tensor = self._module[0](hidden, there[choices].to(index.device), weights)
            return out
        return self._in_turns(hidden, choices, weights, chosen)

    def _in_turns(
        self, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, chosen: Sequence[int]
    ) -> torch.Tensor:
        """`forward` where more experts are chosen than there are slots: each crosses once, and what it gives for every
        token that chose it is kept until the sum."""
        tokens, k = choices.shape
        flat, given = choices.flatten(), weights.flatten()
        parts = hidden.new_empty((tokens * k, hidden.shape[-1]))
        for turn in self._turns(chosen):
            there = self._bring(turn)[flat]
            asking = (there >= 0).nonzero().squeeze(1)
            slots, pairs = there[asking].to(hidden.device), asking.to(hidden.device)
            parts[pairs] = self._module[0](hidden[pairs // k], slots.unsqueeze(1), given[pairs].unsqueeze(1))
        return parts.view(tokens, k, -1).sum(1)

    def _turns(self, chosen: Sequence[int]) -> Iterator[list[int]]:
        """`chosen` in turns of as many as there are slots, what is on the device first."""
        ordered = sorted(chosen, key=lambda expert: expert not in self._held)
        for first in range(0, len(ordered), self.slots):
            yield ordered[first : first + self.slots]

    def _bring(self, experts: Sequence[int]) -> torch.Tensor:
        """Brings `experts`, no more than there are slots, to the device, in the order of the compute stream: in place
        of those used longest ago. Returns int64 `[E]` on the host: the slot of each of them, -1 for all others."""
        self._now += 1
        free = sorted((slot for slot, held in enumerate(self._held) if held not in experts), key=self._used.__getitem__)
        for expert in experts:
            if expert not in self._held:
                slot = free.pop(0)
                for own, there in zip(self._host, self._there, strict=True):
                    there[slot].copy_(own[expert], non_blocking=True)
                    self.bytes += own[expert].nbytes
                self._held[slot] = expert
            self._used[self._held.index(expert)] = self._now
        found = torch.full((self.num_experts,), -1)
        found[list(experts)] = torch.tensor([self._held.index(expert) for expert in experts])
        return found

    def check_integrity(self) -> None:
        """Asserts that every slot has the numbers of the expert that it should hold, and that transformers' module
        computes with the slots."""
        held = [expert for expert in self._held if expert is not None]
        assert len(set(held)) == len(held) and max(self._used) <= self._now
        for weight, own, there in zip(self._module[0].parameters(), self._host, self._there, strict=True):
            assert weight.data_ptr() == there.data_ptr()
            for slot, expert in enumerate(self._held):
                assert expert is None or torch.equal(there[slot].cpu(), own[expert])


def keep_experts(layers: Sequence[nn.Module], slots: int, device: torch.device) -> list[ExpertCache]:
    """Puts an `ExpertCache` in the place of the experts of every layer that has any."""
    caches = []
    for layer in layers:
        if (experts := experts_of(layer)) is None:
            continue
        parent = next(module for module in layer.modules() if experts in module.children())
        name = next(name for name, child in parent.named_children() if child is experts)
        caches.append(ExpertCache(experts, slots, device))
        setattr(parent, name, caches[-1])
    return caches
