"""Approximate KV of a sequence in pages (`kernels.pages`). Forks share the pages with copy-on-write."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

import torch

from ...kernels.pages import BLOCK, PAGE_BLOCKS, PAGE_TOKENS, Pages


class Page:
    """A page `rows`, uint8 `[L, Hkv, PAGE_BLOCKS, block_bytes]`, and its `holders`.

    `holders` are weak references to the `LayerPages` objects that use the page.
    """

    def __init__(self, rows: torch.Tensor, holder: LayerPages) -> None:
        self.rows = rows
        self.holders: WeakSet[LayerPages] = WeakSet((holder,))


class LayerPages:
    """Pages of one sequence and the token count of each layer. A page stores `PAGE_TOKENS` tokens for several layers.

    A page that is shared with a fork is read-only. It is copied before a write.
    """

    def __init__(self, layers: Iterable[int], heads: int, block_bytes: int, device: torch.device) -> None:
        self._at = {layer: i for i, layer in enumerate(layers)}
        self._shape, self._device = (len(self._at), heads, PAGE_BLOCKS, block_bytes), device
        self.lengths = dict.fromkeys(self._at, 0)
        self._pages: list[Page] = []
        self._shown: dict[int, Pages] = {}

    @property
    def nbytes(self) -> int:
        """Size of the pages in bytes.

        The size of a shared page is divided equally among the sequences that share it.
        """
        return round(sum(page.rows.nbytes / len(page.holders) for page in self._pages))

    def pages(self, layer: int) -> Pages:
        """Return the pages of the layer for reading. The result is the same object until a page is added or copied."""
        if layer not in self._shown:
            tensors = tuple(page.rows for page in self._pages)
            first = next(iter(self._shown.values()), None)
            self._shown[layer] = (
                Pages.of(tensors, self._at[layer]) if first is None else first.of_layer(self._at[layer])
            )
        return self._shown[layer]

    def reserve(self, layer: int, tokens: range) -> Pages:
        """Return the pages of the layer for writing `tokens`. Extend the length of the layer to include `tokens`.

        Pages that contain `tokens` are added, or copied if they are shared. `tokens` must not start after the end of
        the layer.
        """
        assert tokens.start <= self.lengths[layer], "tokens must be contiguous"
        for at in range(tokens.start // PAGE_TOKENS, -(-tokens.stop // PAGE_TOKENS)):
            if at == len(self._pages):
                self._pages.append(Page(torch.empty(self._shape, dtype=torch.uint8, device=self._device), self))
                self._shown = {}
            elif len(self._pages[at].holders) > 1:
                self._copy(at)
        self.lengths[layer] = max(self.lengths[layer], tokens.stop)
        return self.pages(layer)

    def _copy(self, at: int) -> None:
        """Replace the shared page with index `at` by a private copy.

        Only blocks with tokens of this sequence are copied.
        """
        shared = self._pages[at]
        blocks = min(PAGE_BLOCKS, -(-max(self.lengths.values()) // BLOCK) - at * PAGE_BLOCKS)
        own = Page(torch.empty_like(shared.rows), self)
        own.rows[:, :, :blocks] = shared.rows[:, :, :blocks]
        shared.holders.discard(self)
        self._pages[at], self._shown = own, {}

    def fork(self, tokens: int | None = None) -> LayerPages:
        """Return a copy of the first `tokens` tokens that shares their pages. None means all tokens."""
        twin = object.__new__(LayerPages)
        twin._at, twin._shape, twin._device, twin._shown = self._at, self._shape, self._device, {}
        most = max(self.lengths.values(), default=0) if tokens is None else tokens
        twin.lengths = {layer: min(length, most) for layer, length in self.lengths.items()}
        twin._pages = self._pages[: -(-most // PAGE_TOKENS)]
        for page in twin._pages:
            page.holders.add(twin)
        return twin

    def check_integrity(self) -> None:
        """Assert that capacity, page holders, and the page tables passed to kernels are consistent."""
        assert max(self.lengths.values(), default=0) <= len(self._pages) * PAGE_TOKENS
        for at, page in enumerate(self._pages):
            assert self in page.holders and page.rows.shape == self._shape
            assert all(other._pages[at] is page for other in page.holders)
        for layer, shown in self._shown.items():
            assert shown.layer == self._at[layer]
            assert [own.data_ptr() for own in shown.tensors] == shown.addresses.tolist()
            assert all(own is page.rows for own, page in zip(shown.tensors, self._pages, strict=True))
