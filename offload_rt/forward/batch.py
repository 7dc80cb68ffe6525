"""What a decode step works on, and the two ways in which its layers can select: `apart`, each sequence by itself, and
`together`, the whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from ..core import Visible
from ..models.adapter import ModelAdapter
from ..select.base import Policy
from ..transfer.link import Link
from .sequence import Sequence
from .shared_prefix import Sharing


class Recorder(Protocol):
    """Is told what sequences attend to; the decode loop calls it where there is one and otherwise does nothing."""

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """The token at `position`, in a layer that selects, attends to those at positions `tokens` `[Hkv, n]` besides
        the resident ones; layers in rising order."""
        ...


class Step:
    """One decode step of `batch`, in the order of its `sharing`; a `recorder` is told what each layer selects."""

    def __init__(
        self,
        batch: Seq[Sequence],
        adapter: ModelAdapter,
        policy: Policy,
        link: Link,
        sharing: Sharing,
        recorder: Recorder | None = None,
    ) -> None:
        self.batch, self.adapter, self.policy, self.link = batch, adapter, policy, link
        self.sharing, self.recorder = sharing, recorder
        self.geometry = adapter.geometry
        self._visible: dict[int | None, list[Visible]] = {}

    @property
    def tokens(self) -> list[int]:
        """The newest token of each sequence, which this step computes."""
        return [s.tokens[s.position] for s in self.batch]

    @property
    def positions(self) -> list[int]:
        """Their positions."""
        return [s.position + s.shift for s in self.batch]

    def selects(self, layer: int) -> bool:
        """Whether the layer exists and is not dense."""
        return layer < self.geometry.layers and layer not in self.policy.dense_layers

    def see(self, layer: int) -> list[Visible]:
        """What each sequence's newest token may see in `layer`; the same for all layers of one window."""
        window = self.geometry.windows[layer]
        if window not in self._visible:
            sinks, recent = self.policy.sinks, self.policy.recent
            self._visible[window] = [
                Visible.of(s.slots.context, sinks=sinks, recent=recent, window=window) for s in self.batch
            ]
        return self._visible[window]


class Fetched(Protocol):
    """What a layer attends to, on its way."""

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """q `[H, B, d]`, true queries; the layer's `append` comes first. Returns `[B, H * d]`."""
        ...


class Strategy(Protocol):
    """How the sequences of a step keep their newest rows, and select."""

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The step's tokens and positions on the device, int64 `[B]` each."""
        ...

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v `[Hkv, B, d]`: the newest token becomes resident, is written back, and is made known to the policy."""
        ...

    def fetch(self, layer: int, q: torch.Tensor) -> Fetched:
        """q `[H, B, d]`: layer `layer`'s query, guessed or true. Each sequence selects for itself; of what they have in
        common, the union crosses the link."""
        ...

    def fetch_all(self, layer: int) -> Fetched | None:
        """Everything that the sequences see in a dense layer, where that goes the same way; None where it does not."""
        ...

    def finish(self) -> None:
        """After the last layer: what was selected and what crosses the link is entered in traces."""
        ...
