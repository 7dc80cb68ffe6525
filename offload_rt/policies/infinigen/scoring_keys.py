"""Interfaces of scoring keys."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...kernels.lists import Scores
from ...kernels.pages import Pages
from ..rule import CandidateSpans
from .bases import Basis


class BatchedKeys(Protocol):
    """Scoring keys of one sequence that can be scored together with those of other sequences in a batch."""

    def basis(self, layer: int) -> Basis | None:
        """Return the basis that skews the queries and keys of a layer, or None if they are not skewed.

        The layer must have at least one key.
        """
        ...

    def storage(self, layer: int, slots: range) -> torch.Tensor | Pages:
        """Return the stored keys of the layer for writing to `slots`. If these slots are new, the layer is extended.

        Until the next `fork`, the memory is not shared with a fork. Each call returns the same object until the memory
        is reallocated.
        """
        ...

    def append_batch(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        basis: Any,
        storages: Any,
        slots: torch.Tensor,
    ) -> None:
        """Store the newest keys of all sequences in a batch. P = B * Hkv.

        The scoring keys of all sequences must be of this class.

        Args:
            k, v: The newest keys and values, `[P, d]`. Only approximate KV uses v.
            basis: The basis of the batch (see `Basis.stacked`).
            storages: A `PointerTable` or `PageTable` with the results of `storage`.
            slots: The slots of the new keys, int64 `[P]`.
        """
        ...

    def score_batch(self, layer: int, q: torch.Tensor, basis: Any, storages: Any, spans: CandidateSpans) -> Scores:
        """Return the scores of a batch for the queries q `[H, B, d]`. Tokens that are not candidates get -inf."""
        ...


class ScoringKeys(BatchedKeys, Protocol):
    """Scoring keys of one sequence, in all layers that select tokens."""

    @property
    def bytes(self) -> int:
        """Number of bytes allocated for this sequence. The size of a shared page is divided among its sequences."""
        ...

    def length(self, layer: int) -> int: ...

    def observe(self, layer: int, q: torch.Tensor) -> None:
        """Observe the queries `[H, m, d]` of a prefill chunk. The choice of columns may depend on them."""
        ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Store keys k `[Hkv, m, d]` in the slots from `start` on. `start` is at most `length(layer)`.

        Approximate KV also stores the values v `[Hkv, m, d]`, which may be on a different device than k.
        """
        ...

    def move(self, layer: int, source: int, target: int) -> None: ...

    def scores(self, layer: int, q: torch.Tensor, tokens: range) -> torch.Tensor:
        """Return the estimated attention scores `[Hkv, G, n]` of the n tokens in `tokens` for the query q `[H, d]`.

        The scores include the attention scale and are in float32 (float64 for a float64 model).
        """
        ...

    def fork(self) -> ScoringKeys: ...

    def check_integrity(self) -> None: ...
