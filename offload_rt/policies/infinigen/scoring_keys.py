"""What scoring keys are: the copy of a sequence's keys that tokens are scored with, of one kind or another."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...kernels.lists import Scores
from ...kernels.pages import Pages
from .bases import Basis


class KeyQuery(Protocol):
    """What a query asks the scoring keys of some tokens."""

    @property
    def scores(self) -> torch.Tensor:
        """Estimated attention scores `[Hkv, G, n]`, model's scale included; float32 (float64 for a float64 model)."""
        ...

    def select(self, alpha: float, max_fraction: float) -> torch.Tensor:
        """`select_tokens` of those scores: int64 `[Hkv, n]`, counted from the first of the tokens."""
        ...

    def top(self, n: int) -> torch.Tensor:
        """The n tokens with the largest scores after softmax, the best of the group's: int64 `[Hkv, n]`, counted
        likewise."""
        ...


class ScoringKeys(Protocol):
    """Scoring keys of one sequence, layer by layer."""

    @property
    def bytes(self) -> int:
        """Bytes allocated for this sequence."""
        ...

    def length(self, layer: int) -> int:
        """Tokens whose keys the layer has."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Queries `[H, m, d]` of the prompt went by."""
        ...

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Keys k `[Hkv, m, d]` enter the slots from `start` on, at most where those that the layer has end."""
        ...

    def move(self, layer: int, source: int, target: int) -> None:
        """The key in slot `source` also takes slot `target`."""
        ...

    def ask(self, layer: int, q: torch.Tensor, tokens: range) -> KeyQuery:
        """What q `[H, d]` asks the layer's keys of `tokens`, before they change."""
        ...

    def basis(self, layer: int) -> Basis:
        """What the keys that the layer has, of which there is at least one, and its queries are multiplied with."""
        ...

    def storage(self, layer: int, slots: range) -> torch.Tensor | Pages:
        """Where the keys lie, with room for those of `slots`, which count as written from now on and are this
        sequence's alone until the next `fork`. The same object until it has to move or grow."""
        ...

    def enter(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Basis,
        storages: Any,
        slots: torch.Tensor,
    ) -> None:
        """`write` for a batch of sequences with keys of this kind: the newest key k `[P, d]` of each list enters
        slot `slots[p]` (int64) of its storage, and its value v `[P, d]` where values are kept too. storages: a
        `PointerTable` or `PageTable` of what `storage` returned of each."""
        ...

    def found(
        self,
        layer: int,
        q: torch.Tensor,
        storages: Any,
        starts: torch.Tensor,
        stops: torch.Tensor,
        tokens: int,
    ) -> Scores:
        """`scores` for such a batch, from queries q `[P, G, r]` in the basis: of `tokens` slots, -inf outside
        [start, stop) of each list."""
        ...

    def fork(self) -> ScoringKeys:
        """An independent copy."""
        ...

    def check_integrity(self) -> None:
        """Asserts that every layer's storage holds its tokens."""
        ...
