"""Mixture-of-experts weights that stay in host memory.

Each layer keeps its most recently used experts in slots on the device. Other experts are copied to the device when the
router chooses them. The experts module of transformers computes with the weights in the slots. It is called with slot
indices instead of expert indices.

Experts are not prefetched for the next layer, because copying an expert takes many times longer than computing a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...kv_cache.arena import page_lock, reserve
from ...models.weights import aligned, experts_of


class ExpertCache(nn.Module):
    """Replacement for the experts module of one layer.

    It calls the original module with slot indices instead of expert indices.

    Each parameter has the shape `[E, ...]` in host memory (page-locked on CUDA) and `[slots, ...]` on the device.
    """

    def __init__(self, experts: Any, slots: int, device: torch.device) -> None:
        """Move the parameters of `experts` to host memory. Raises MemoryLimitError."""
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
        # The tuple hides the module from torch, because the module's parameters are device slots and not the layer's
        # weights.
        self._module = (experts,)
        self._expert_in_slot: list[int | None] = [None] * self.slots
        self._last_use = [0] * self.slots
        self._now = 0
        self.bytes = self.chosen = self.found = 0
        """Number of bytes copied to the device, of chosen experts, and of chosen experts already on the device."""

    @property
    def host_bytes(self) -> int:
        return sum(own.nbytes for own in self._host)

    @property
    def device_bytes(self) -> int:
        return sum(there.nbytes for there in self._there)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the outputs of the chosen experts, `[T, D]`.

        Args:
            hidden: Hidden states `[T, D]`.
            index: Indices of the chosen experts of each token, `[T, k]`.
            weights: Weights of these experts, `[T, k]`.
        """
        choices = index.cpu()
        chosen = choices.unique().tolist()
        self.chosen += len(chosen)
        self.found += len(set(chosen) & set(self._expert_in_slot))
        if len(chosen) <= self.slots:
            there = self._copy_to_slots(chosen)
            out: torch.Tensor = self._module[0](hidden, there[choices].to(index.device), weights)
            return out
        return self._forward_in_groups(hidden, choices, weights, chosen)

    def _forward_in_groups(
        self, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor, chosen: Sequence[int]
    ) -> torch.Tensor:
        """Compute `forward` if more experts are chosen than there are slots. Each expert is copied at most once."""
        tokens, k = choices.shape
        flat, given = choices.flatten(), weights.flatten()
        parts = hidden.new_empty((tokens * k, hidden.shape[-1]))
        for turn in self._groups(chosen):
            there = self._copy_to_slots(turn)[flat]
            asking = (there >= 0).nonzero().squeeze(1)
            slots, pairs = there[asking].to(hidden.device), asking.to(hidden.device)
            parts[pairs] = self._module[0](hidden[pairs // k], slots.unsqueeze(1), given[pairs].unsqueeze(1))
        return parts.view(tokens, k, -1).sum(1)

    def _groups(self, chosen: Sequence[int]) -> Iterator[list[int]]:
        ordered = sorted(chosen, key=lambda expert: expert not in self._expert_in_slot)
        for first in range(0, len(ordered), self.slots):
            yield ordered[first : first + self.slots]

    def _copy_to_slots(self, experts: Sequence[int]) -> torch.Tensor:
        """Copy `experts` to slots, replacing the least recently used experts.

        Return the slot of each expert of the layer, int64 `[E]` on the host, with -1 for experts that are not in
        `experts`.
        """
        self._now += 1
        free = sorted(
            (slot for slot, held in enumerate(self._expert_in_slot) if held not in experts),
            key=self._last_use.__getitem__,
        )
        for expert in experts:
            if expert not in self._expert_in_slot:
                slot = free.pop(0)
                for own, there in zip(self._host, self._there, strict=True):
                    there[slot].copy_(own[expert], non_blocking=True)
                    self.bytes += own[expert].nbytes
                self._expert_in_slot[slot] = expert
            self._last_use[self._expert_in_slot.index(expert)] = self._now
        found = torch.full((self.num_experts,), -1)
        found[list(experts)] = torch.tensor([self._expert_in_slot.index(expert) for expert in experts])
        return found

    def check_integrity(self) -> None:
        held = [expert for expert in self._expert_in_slot if expert is not None]
        assert len(set(held)) == len(held) and max(self._last_use) <= self._now
        for weight, own, there in zip(self._module[0].parameters(), self._host, self._there, strict=True):
            assert weight.data_ptr() == there.data_ptr()
            for slot, expert in enumerate(self._expert_in_slot):
                assert expert is None or torch.equal(there[slot].cpu(), own[expert])


def keep_experts(layers: Sequence[nn.Module], slots: int, device: torch.device) -> list[ExpertCache]:
    """Replace the experts module of each mixture-of-experts layer with an `ExpertCache`."""
    caches = []
    for layer in layers:
        if (experts := experts_of(layer)) is None:
            continue
        parent = next(module for module in layer.modules() if experts in module.children())
        name = next(name for name, child in parent.named_children() if child is experts)
        caches.append(ExpertCache(experts, slots, device))
        setattr(parent, name, caches[-1])
    return caches
