"""Token selection and approximate attention for a whole batch in a decode step.

The host does not wait for the device, and the number of kernel launches does not depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...kernels import dispatch
from ...kernels.pages import PAGE_TOKENS, Pages, PageTable, page_table
from ...kernels.pointer_table import FIELDS, PointerTable, entry
from ..rule import CandidateSpans, Rule
from ..scorer import ScorerState
from .approximate_kv import ApproximateKV
from .bases import Basis
from .scoring_keys import BatchedKeys


class KeyLists:
    """Scoring keys for a batch of up to `batch` sequences with up to `tokens` tokens, in all layers that select tokens.

    Call `load` before each step. Kernels read the addresses of the keys from tables on the device. These tables stay at
    fixed addresses, as captured CUDA graphs require.
    """

    def __init__(self, rule: Rule, layers: Iterable[int], batch: int, tokens: int, device: torch.device) -> None:
        self._rule, self._index = rule, {layer: i for i, layer in enumerate(layers)}
        self._pointers = torch.zeros(len(self._index), batch, FIELDS, dtype=torch.int64, device=device)
        self._pages = torch.zeros(1, batch, -(-tokens // PAGE_TOKENS), dtype=torch.int64, device=device)
        self._keys: list[BatchedKeys] = []
        self._bases: list[list[Basis | None]] = []
        self._stored: list[list[torch.Tensor | Pages]] = []
        self._storages: list[PointerTable | PageTable] = []
        self._basis: list[Basis | None] = []

    def load(self, keys: Sequence[BatchedKeys], slots: Sequence[int]) -> torch.Tensor | None:
        """Set the sequences of the batch, and reserve slot `slots[b]` for the newest key of sequence b.

        Returns:
            New contents of `pointer_tables`, which the caller must copy to the device, or None if they did not change.
        """
        self._keys = list(keys)
        bases = [[sequence.basis(layer) for sequence in keys] for layer in self._index]
        if _differ(bases, self._bases):
            self._bases, self._basis = bases, [Basis.stacked(layer_bases) for layer_bases in bases]
        newest = [(sequence, range(slot, slot + 1)) for sequence, slot in zip(keys, slots, strict=True)]
        stored = [[sequence.storage(layer, slot) for sequence, slot in newest] for layer in self._index]
        if not _differ(stored, self._stored):
            return None
        self._stored = stored
        pages = [tuple(item for item in items if isinstance(item, Pages)) for items in stored]
        if pages[0]:
            self._storages = [PageTable(layer_pages, self._pages[0]) for layer_pages in pages]
            return page_table(pages[0], self._pages.shape[2]).unsqueeze(0)
        tensors = [tuple(item for item in items if isinstance(item, torch.Tensor)) for items in stored]
        self._storages = [PointerTable(layer, table) for layer, table in zip(tensors, self._pointers, strict=True)]
        return torch.tensor([[entry(tensor) for tensor in layer_tensors] for layer_tensors in tensors])

    def release(self) -> None:
        self._keys, self._bases, self._stored, self._storages, self._basis = [], [], [], [], []

    @property
    def pointer_tables(self) -> torch.Tensor:
        """Addresses on the device, int64 `[layers, B, FIELDS]` (`PointerTable`), or `[1, B, pages]` for pages."""
        return self._pages if isinstance(self._storages[0], PageTable) else self._pointers

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store the newest keys k `[P, d]` in `slots` (int64 `[P]`). P = B * Hkv.

        Approximate KV also stores the values v `[P, d]`.
        """
        index = self._index[layer]
        self._keys[0].append_batch(layer, k, v, self._basis[index], self._storages[index], slots)

    def select(self, layer: int, q: torch.Tensor, spans: CandidateSpans) -> tuple[torch.Tensor, torch.Tensor]:
        """Select tokens with the predicted or true queries q `[H, B, d]`. P = B * Hkv.

        Returns:
            Token indices in ascending order, int64 `[P, cap]`, and counts, int32 `[P]`. Only the first `counts[p]`
            indices of list p are selected. The remaining indices are arbitrary, but within the context.
        """
        index = self._index[layer]
        storage = self._storages[index]
        scores = self._keys[0].score_batch(layer, q, self._basis[index], storage, spans)
        return dispatch.select_tokens(
            scores, spans.starts, spans.stops, storage.heads, self._rule.alpha, spans.limits, spans.cap
        )

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        spans: CandidateSpans,
        selected: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention with approximate attention to the candidates that were not selected.

        Args:
            q: True queries `[H, B, d]`.
            selected: Token indices and counts, as returned by `select`.
            exact: Output `[P, G, d]` and log-sum-exp `[P, G]` of exact attention, with P = B * Hkv.

        Returns:
            The merged output and log-sum-exp. If there is no approximate KV, `exact` is returned.
        """
        keys, index = self._keys[0], self._index[layer]
        if not isinstance(keys, ApproximateKV):
            return exact
        storage = self._storages[index]
        assert isinstance(storage, PageTable)
        return keys.merge_approximate(layer, q, storage, spans, selected, exact)

    def on_attended(self, layer: int, spans: CandidateSpans, weights: torch.Tensor, attended: torch.Tensor) -> None:
        """Pass the attention weights of a decode step to the policy. P = B * Hkv.

        Args:
            weights: Softmax weights `[P, tokens]`, summed over query heads; 0 for tokens that were not attended to.
            attended: Mask of the tokens that were attended to, bool `[P, tokens]`.
        """
        keys, storage = self._keys[0], self._storages[self._index[layer]]
        assert isinstance(keys, ScorerState) and isinstance(storage, PointerTable)
        keys.on_attended_batch(layer, storage, spans, weights, attended)


def _differ(new: Sequence[Sequence[object]], old: Sequence[Sequence[object]]) -> bool:
    if len(new) != len(old):
        return True
    pairs = zip(new, old, strict=True)
    return any(len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True)) for a, b in pairs)
