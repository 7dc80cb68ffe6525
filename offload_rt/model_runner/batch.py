"""The batch of a decode step, and the interface of its two selection modes (`per_sequence` and `batched`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from ..core import VisibleTokens
from ..models.adapter import ModelAdapter
from ..models.recurrent import RecurrentState
from ..policies.base import Policy
from ..transfer.base import Transfer
from ..transfer.residency import places
from .sequence import Sequence
from .shared_prefix import Sharing


class DecodeBatch:
    """The sequences of one decode step, with the model adapter, policy and transfers that they use.

    `sharing` describes the prefixes that the sequences share. The sequences are in its tree order: sequences with a
    common prefix are adjacent.
    """

    def __init__(
        self,
        sequences: Seq[Sequence],
        adapter: ModelAdapter,
        policy: Policy,
        transfer: Transfer,
        sharing: Sharing,
    ) -> None:
        self.sequences, self.adapter, self.policy, self.transfer = sequences, adapter, policy, transfer
        self.sharing, self.geometry = sharing, adapter.geometry
        self._visible: dict[int | None, list[VisibleTokens]] = {}
        whole = all(self.sees_all(sequence) for sequence in sequences)
        self._selecting = frozenset[int]() if whole else frozenset(filter(self.learns, range(self.geometry.layers)))

    @property
    def tokens(self) -> list[int]:
        """The newest token of each sequence, which this step computes."""
        return [s.tokens[s.position] for s in self.sequences]

    @property
    def positions(self) -> list[int]:
        """Positions of the newest tokens in `tokens`."""
        return [s.position + s.shift for s in self.sequences]

    def state(self) -> RecurrentState | None:
        """Return the recurrent state of the sequences for this step, or None if the model has none."""
        slots = self.sequences[0].state_slots
        return None if slots is None else slots.view([s.state_slot for s in self.sequences])

    def sees_all(self, sequence: Sequence) -> bool:
        """Return whether the sequence is so short that every layer attends to all tokens."""
        return sequence.slots.context <= self.policy.dense_until

    def learns(self, layer: int) -> bool:
        """Return whether the policy selects in this layer, now or in a later step.

        If so, the policy needs the layer's new KV.
        """
        return layer < self.geometry.layers and layer not in self.policy.dense_layers

    def selects(self, layer: int) -> bool:
        """Return whether the layer exists and selects tokens in this step for at least one sequence."""
        return layer in self._selecting

    def slots(self, layer: int) -> list[int]:
        """Return the slot of each sequence's newest token. In sliding-window layers, token t is in slot t."""
        if self.geometry.windows[layer] is not None:
            return [s.position for s in self.sequences]
        return [s.slots.newest for s in self.sequences]

    def visible(self, layer: int) -> list[VisibleTokens]:
        """Return the tokens that the newest token of each sequence can attend to. Results are cached by window size."""
        window = self.geometry.windows[layer]
        if window not in self._visible:
            sinks, recent = self.geometry.resident(layer, self.policy.sinks, self.policy.recent)
            contexts = [s.slots.context if window is None else s.position + 1 for s in self.sequences]
            shown = [self.geometry.window_at(layer, s.position + s.shift) for s in self.sequences]
            self._visible[window] = [
                VisibleTokens.of(n, sinks=sinks, recent=recent, window=last, floor=s.blocks.floor)
                for n, last, s in zip(contexts, shown, self.sequences, strict=True)
            ]
        return self._visible[window]

    def adjacent(self, layer: int) -> bool:
        """Return whether the resident KV that each sequence sees in `layer` is contiguous in its ring buffer."""
        sizes = self.geometry.resident(layer, self.policy.sinks, self.policy.recent)
        return all(places(seen, *sizes) is not None for seen in self.visible(layer))


class LayerFetch(Protocol):
    """A pending fetch of the KV that one layer attends to."""

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Return the attention output `[B, H * d]` of the true queries q `[H, B, d]`.

        `append` must have been called.
        """
        ...


class StepMode(Protocol):
    """Interface of a selection mode, which stores new KV and selects tokens in each layer of a step."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and positions of the step on the device, int64 `[B]` each."""
        ...

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v `[Hkv, B, d]` of the newest tokens on the device, in the KV pool, and in the policy's state."""
        ...

    def fetch(self, layer: int, q: torch.Tensor) -> LayerFetch:
        """Select tokens with the predicted or true queries q `[H, B, d]` of `layer`, and start fetching their KV.

        Each sequence selects separately. KV in blocks that sequences share is fetched once.
        """
        ...

    def fetch_all(self, layer: int) -> LayerFetch | None:
        """Start fetching the KV of all visible tokens of a dense layer.

        Return None if the mode leaves this to the decode step.
        """
        ...

    def finish(self) -> None:
        """Record the step's selections and transfers in the traces of the sequences. Called after the last layer."""
        ...
