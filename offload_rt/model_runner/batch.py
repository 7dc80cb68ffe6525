"""What a decode step works on, and the protocol of the two strategies by which its layers select: `per_sequence`, each
sequence by itself, and `batched`, the whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from ..core import Visible
from ..models.adapter import ModelAdapter
from ..policies.base import Policy
from ..transfer.link import Link
from .sequence import Sequence
from .shared_prefix import Sharing


class DecodeBatch:
    """The sequences of one decode step, in the order of their `sharing`, with everything that computes them."""

    def __init__(
        self,
        sequences: Seq[Sequence],
        adapter: ModelAdapter,
        policy: Policy,
        link: Link,
        sharing: Sharing,
    ) -> None:
        self.sequences, self.adapter, self.policy, self.link = sequences, adapter, policy, link
        self.sharing, self.geometry = sharing, adapter.geometry
        self._visible: dict[int | None, list[Visible]] = {}
        self._whole = all(self.sees_all(sequence) for sequence in sequences)

    @property
    def tokens(self) -> list[int]:
        """The newest token of each sequence, which this step computes."""
        return [s.tokens[s.position] for s in self.sequences]

    @property
    def positions(self) -> list[int]:
        """The positions of the newest tokens."""
        return [s.position + s.shift for s in self.sequences]

    def sees_all(self, sequence: Sequence) -> bool:
        """Whether the sequence is so short that every layer attends to all of it."""
        return sequence.slots.context <= self.policy.dense_until

    def learns(self, layer: int) -> bool:
        """Whether the policy is told of the layer's new rows: it selects among them, now or later."""
        return layer < self.geometry.layers and layer not in self.policy.dense_layers

    def selects(self, layer: int) -> bool:
        """Whether the layer exists and selects in this step, for one of the sequences at least."""
        return self.learns(layer) and not self._whole

    def slots(self, layer: int) -> list[int]:
        """The slot of each sequence's newest token in `layer`: what slides keeps token t in slot t for ever."""
        if self.geometry.windows[layer] is not None:
            return [s.position for s in self.sequences]
        return [s.slots.newest for s in self.sequences]

    def visible(self, layer: int) -> list[Visible]:
        """What each sequence's newest token may see in `layer`; the same for all layers of one window, all of which is
        resident."""
        window = self.geometry.windows[layer]
        if window not in self._visible:
            sinks, recent = self.geometry.resident(layer, self.policy.sinks, self.policy.recent)
            contexts = [s.slots.context if window is None else s.position + 1 for s in self.sequences]
            shown = [self.geometry.window_at(layer, s.position + s.shift) for s in self.sequences]
            self._visible[window] = [
                Visible.of(n, sinks=sinks, recent=recent, window=last, floor=s.blocks.floor)
                for n, last, s in zip(contexts, shown, self.sequences, strict=True)
            ]
        return self._visible[window]


class LayerFetch(Protocol):
    """The rows that one layer attends to, on their way to the device."""

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """Returns the attention output `[B, H * d]` of the true queries q `[H, B, d]`; the layer's `append` comes
        first."""
        ...


class Strategy(Protocol):
    """How the sequences of a step keep their newest rows, and how their layers select."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's tokens and positions on the device, int64 `[B]` each."""
        ...

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Takes the newest tokens' rows k, v `[Hkv, B, d]`: they become resident, are written back, and their keys are
        made known to the policy."""
        ...

    def fetch(self, layer: int, q: torch.Tensor) -> LayerFetch:
        """Selects with layer `layer`'s queries q `[H, B, d]`, guessed or true, and starts moving what was selected.
        Each sequence selects for itself; of what several have in common, the union crosses the link."""
        ...

    def fetch_all(self, layer: int) -> LayerFetch | None:
        """Starts moving everything that the sequences see in a dense layer; None where the strategy leaves that to the
        decode step."""
        ...

    def finish(self) -> None:
        """Enters in the traces, after the last layer, what was selected and what crossed the link."""
        ...
