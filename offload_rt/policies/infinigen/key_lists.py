"""Batched selection and approximate attention for the decode step.

The host does not synchronise with the device, and the number of kernel launches per layer does not depend on the batch,
which may be one sequence. Each sequence gets the tokens of `kernels.selection.select_tokens`, in ascending order.
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
    """Scoring keys of `batch` sequences of up to `tokens` tokens each, in all sparse layers.

    `hold` binds the lists to sequences before each step. Kernels find the keys through pointer tables that never move:
    one table per layer, or one table for all layers if the keys are in pages.
    """

    def __init__(self, rule: Rule, layers: Iterable[int], batch: int, tokens: int, device: torch.device) -> None:
        """Create lists for the sparse `layers`."""
        self._rule, self._at = rule, {layer: i for i, layer in enumerate(layers)}
        self._pointers = torch.zeros(len(self._at), batch, FIELDS, dtype=torch.int64, device=device)
        self._pages = torch.zeros(1, batch, -(-tokens // PAGE_TOKENS), dtype=torch.int64, device=device)
        self._keys: list[ListedKeys] = []
        self._bases: list[list[Basis | None]] = []
        self._held: list[list[torch.Tensor | Pages]] = []
        self._storages: list[PointerTable | PageTable] = []
        self._basis: list[Basis | None] = []

    def hold(self, keys: Sequence[ListedKeys], slots: Sequence[int]) -> torch.Tensor | None:
        """Bind the lists to `keys` and reserve the slot of the newest key of each sequence.

        Returns:
            If memory has moved, the new contents of `tables`, int64 `[layers, B, FIELDS]` or `[1, B, pages]`, which the
            caller copies to the device. Otherwise None.
        """
        self._keys = list(keys)
        bases = [[own.basis(layer) for own in keys] for layer in self._at]
        if _differ(bases, self._bases):
            self._bases, self._basis = bases, [Basis.stacked(each) for each in bases]
        newest = [(own, range(slot, slot + 1)) for own, slot in zip(keys, slots, strict=True)]
        held = [[own.storage(layer, there) for own, there in newest] for layer in self._at]
        if not _differ(held, self._held):
            return None
        self._held = held
        paged = [tuple(own for own in each if isinstance(own, Pages)) for each in held]
        if paged[0]:
            self._storages = [PageTable(each, self._pages[0]) for each in paged]
            return table_of(paged[0], self._pages.shape[2]).unsqueeze(0)
        tensors = [tuple(own for own in each if isinstance(own, torch.Tensor)) for each in held]
        self._storages = [PointerTable(each, table) for each, table in zip(tensors, self._pointers, strict=True)]
        return torch.tensor([[entry(own) for own in each] for each in tensors])

    def release(self) -> None:
        """Release the sequences until the next `hold`."""
        self._keys, self._bases, self._held, self._storages, self._basis = [], [], [], [], []

    @property
    def tables(self) -> torch.Tensor:
        """Tables of the bound sequences on the device, int64 `[layers, B, FIELDS]` or `[1, B, pages]`."""
        return self._pages if isinstance(self._storages[0], PageTable) else self._pointers

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys k `[P, d]`, and values v `[P, d]` of approximate KV, to the slots int64 `[P]`."""
        at = self._at[layer]
        self._keys[0].enter(layer, k, v, self._basis[at], self._storages[at], slots)

    def select(self, layer: int, q: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """Select tokens by the (speculated) queries q `[H, B, d]`.

        Returns:
            Tokens int64 `[P, cap]` in ascending order, and counts int32 `[P]`. Entries after a count are arbitrary
            indices within the context.
        """
        at = self._at[layer]
        storage = self._storages[at]
        found = self._keys[0].found(layer, q, self._basis[at], storage, spans)
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
            chosen: Selected tokens and counts, as returned by `select`.
            exact: Exact attention: out `[P, G, d]` and lse `[P, G]`.

        Returns:
            Merged out `[P, G, d]` and lse `[P, G]`; `exact` if there is no approximate KV.
        """
        rows, at = self._keys[0], self._at[layer]
        if not isinstance(rows, LowBitRows):
            return exact
        storage = self._storages[at]
        assert isinstance(storage, PageTable)
        return rows.merge_approximate(layer, q, storage, spans, chosen, exact)

    def attended(self, layer: int, spans: Spans, weights: torch.Tensor, attended: torch.Tensor) -> None:
        """Pass the attention weights `[P, tokens]` of a step, 0 for tokens that are not `attended`, to the policy."""
        keys, storage = self._keys[0], self._storages[self._at[layer]]
        assert isinstance(keys, ScorerState) and isinstance(storage, PointerTable)
        keys.attended(layer, storage, spans, weights, attended)


def _differ(new: Sequence[Sequence[object]], old: Sequence[Sequence[object]]) -> bool:
    """Return whether two nested lists differ, comparing elements by identity."""
    if len(new) != len(old):
        return True
    pairs = zip(new, old, strict=True)
    return any(len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True)) for a, b in pairs)
