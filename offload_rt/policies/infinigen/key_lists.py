"""Batched token selection and approximate attention for the decode step.

The host does not wait for the device, and the number of launches does not depend on the batch size. The selected tokens
equal those of `kernels.selection.select_tokens`, in ascending order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...kernels import dispatch
from ...kernels.pages import PAGE_TOKENS, Pages, PageTable, table_of
from ...kernels.pointer_table import FIELDS, PointerTable, entry
from ..rule import Rule, Spans
from ..scorer import ScorerState
from .bases import Basis
from .low_bit_rows import LowBitRows
from .scoring_keys import ListedKeys


class KeyLists:
    """Scoring keys of up to `batch` sequences with up to `tokens` tokens each, in all layers that select tokens.

    `load` sets the sequences before each step. Kernels find their keys through tables of pointers: one table per layer,
    or one for all layers if the keys are in pages. The tables keep their addresses, so captured CUDA graphs stay valid.
    """

    def __init__(self, rule: Rule, layers: Iterable[int], batch: int, tokens: int, device: torch.device) -> None:
        """Create empty tables for `layers`, the layers that select tokens."""
        self._rule, self._at = rule, {layer: i for i, layer in enumerate(layers)}
        self._pointers = torch.zeros(len(self._at), batch, FIELDS, dtype=torch.int64, device=device)
        self._pages = torch.zeros(1, batch, -(-tokens // PAGE_TOKENS), dtype=torch.int64, device=device)
        self._keys: list[ListedKeys] = []
        self._bases: list[list[Basis | None]] = []
        self._stored: list[list[torch.Tensor | Pages]] = []
        self._storages: list[PointerTable | PageTable] = []
        self._basis: list[Basis | None] = []

    def load(self, keys: Sequence[ListedKeys], slots: Sequence[int]) -> torch.Tensor | None:
        """Set the sequences of the batch, and reserve slot `slots[b]` for the newest key of sequence b.

        Returns:
            If the keys have moved in memory: the new contents of `pointer_tables`, which the caller copies to the
            device. Otherwise None.
        """
        self._keys = list(keys)
        bases = [[own.basis(layer) for own in keys] for layer in self._at]
        if _differ(bases, self._bases):
            self._bases, self._basis = bases, [Basis.stacked(each) for each in bases]
        newest = [(own, range(slot, slot + 1)) for own, slot in zip(keys, slots, strict=True)]
        stored = [[own.storage(layer, there) for own, there in newest] for layer in self._at]
        if not _differ(stored, self._stored):
            return None
        self._stored = stored
        paged = [tuple(own for own in each if isinstance(own, Pages)) for each in stored]
        if paged[0]:
            self._storages = [PageTable(each, self._pages[0]) for each in paged]
            return table_of(paged[0], self._pages.shape[2]).unsqueeze(0)
        tensors = [tuple(own for own in each if isinstance(own, torch.Tensor)) for each in stored]
        self._storages = [PointerTable(each, table) for each, table in zip(tensors, self._pointers, strict=True)]
        return torch.tensor([[entry(own) for own in each] for each in tensors])

    def release(self) -> None:
        """Drop all references to sequences, until the next `load`."""
        self._keys, self._bases, self._stored, self._storages, self._basis = [], [], [], [], []

    @property
    def pointer_tables(self) -> torch.Tensor:
        """Pointer tables on the device, int64 `[layers, B, FIELDS]` or `[1, B, pages]`."""
        return self._pages if isinstance(self._storages[0], PageTable) else self._pointers

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the newest key k `[P, d]`, and value v for approximate KV, to slot `slots[p]` of list p.

        P = B * Hkv.
        """
        at = self._at[layer]
        self._keys[0].append_batch(layer, k, v, self._basis[at], self._storages[at], slots)

    def select(self, layer: int, q: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """Select tokens with the (predicted) queries q `[H, B, d]`.

        Returns:
            Token indices int64 `[P, cap]` in ascending order, and counts int32 `[P]`. Only the first `counts[p]`
            indices of list p are selected. The remaining entries are arbitrary indices within the context.
        """
        at = self._at[layer]
        storage = self._storages[at]
        found = self._keys[0].score_batch(layer, q, self._basis[at], storage, spans)
        return dispatch.select_tokens(
            found, spans.starts, spans.stops, storage.heads, self._rule.alpha, spans.limits, spans.cap
        )

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        spans: Spans,
        chosen: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention with approximate attention to the candidates that were not selected.

        Args:
            layer: The layer index.
            q: True queries `[H, B, d]`.
            spans: The candidates.
            chosen: Token indices and counts, as returned by `select`.
            exact: Exact attention: out `[P, G, d]` and lse `[P, G]`, with P = B * Hkv.

        Returns:
            Merged out `[P, G, d]` and lse `[P, G]`. Without approximate KV, `exact` is returned unchanged.
        """
        rows, at = self._keys[0], self._at[layer]
        if not isinstance(rows, LowBitRows):
            return exact
        storage = self._storages[at]
        assert isinstance(storage, PageTable)
        return rows.merge_approximate(layer, q, storage, spans, chosen, exact)

    def attended(self, layer: int, spans: Spans, weights: torch.Tensor, attended: torch.Tensor) -> None:
        """Pass the attention weights `[P, tokens]` of a decode step to the policy. P = B * Hkv.

        Args:
            layer: The layer index.
            spans: The candidates.
            weights: Softmax weights, summed over query heads; 0 for tokens that were not attended.
            attended: Whether each token was attended, bool `[P, tokens]`.
        """
        keys, storage = self._keys[0], self._storages[self._at[layer]]
        assert isinstance(keys, ScorerState) and isinstance(storage, PointerTable)
        keys.attended(layer, storage, spans, weights, attended)


def _differ(new: Sequence[Sequence[object]], old: Sequence[Sequence[object]]) -> bool:
    """Return whether two nested lists differ in the identity of an element."""
    if len(new) != len(old):
        return True
    pairs = zip(new, old, strict=True)
    return any(len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True)) for a, b in pairs)
