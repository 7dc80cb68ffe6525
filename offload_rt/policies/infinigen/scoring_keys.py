"""Interface of scoring keys, the compressed keys of a sequence with which tokens are scored."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...kernels.lists import Scores
from ...kernels.pages import Pages
from ..rule import Spans
from .bases import Basis


class KeyQuery(Protocol):
    """A query that is prepared for scoring a range of tokens."""

    @property
    def scores(self) -> torch.Tensor:
        """Estimated attention scores `[Hkv, G, n]`, scaled, in float32 (float64 for a float64 model)."""
        ...

    def select(self, alpha: float, limit: int) -> torch.Tensor:
        """Select tokens by `select_tokens`. Returns int64 `[Hkv, n]`, relative to the first token."""
        ...


class ListedKeys(Protocol):
    """Selection data of one sequence, from which the lists of a batch (`KeyLists`) are built."""

    def basis(self, layer: int) -> Basis | None:
        """Return the basis of keys and queries of a layer, or None if they are not transformed.

        The layer must have at least one key.
        """
        ...

    def storage(self, layer: int, slots: range) -> torch.Tensor | Pages:
        """Return the memory of the keys for writing `slots`, and extend the length of the layer to include them.

        The memory is not shared until the next `fork`. Calls return the same object until the memory is reallocated.
        """
        ...

    def enter(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Any,
        storages: Any,
        slots: torch.Tensor,
    ) -> None:
        """Write the newest keys for a batch of sequences whose scoring keys have this class.

        Args:
            layer: The layer index.
            k: The newest key of each list, `[P, d]`.
            v: The newest value of each list, `[P, d]`, used by approximate KV only.
            basis: The basis of the batch (`Basis.stacked`).
            storages: A `PointerTable` or `PageTable` of the results of `storage`.
            slots: The slot of each list, int64 `[P]`.
        """
        ...

    def found(self, layer: int, q: torch.Tensor, basis: Any, storages: Any, spans: Spans) -> Scores:
        """Return the scores for queries q `[H, B, d]` of a batch, -inf outside each list's candidates."""
        ...


class ScoringKeys(ListedKeys, Protocol):
    """Scoring keys of one sequence, layer by layer."""

    @property
    def bytes(self) -> int:
        """Bytes allocated for this sequence."""
        ...

    def length(self, layer: int) -> int:
        """Return the number of keys of the layer."""
        ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Observe queries `[H, m, d]` of the prompt."""
        ...

    def write(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Write keys k `[Hkv, m, d]` to the slots from `start` on, where `start` is at most `length(layer)`."""
        ...

    def move(self, layer: int, source: int, target: int) -> None:
        """Copy the key in slot `source` to slot `target`."""
        ...

    def ask(self, layer: int, q: torch.Tensor, tokens: range) -> KeyQuery:
        """Prepare q `[H, d]` for scoring `tokens`. The result is valid until the stored keys change."""
        ...

    def fork(self) -> ScoringKeys:
        """Return an independent copy."""
        ...

    def check_integrity(self) -> None:
        """Assert that the storage of every layer holds its tokens."""
        ...
