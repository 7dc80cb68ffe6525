"""Queries for the low-bit KV of one sequence: scores, selection and approximate attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from . import dispatch, low_bit_cpu
from .h2d_copy import to_device
from .low_bit import Layout
from .low_bit_cpu import NativeQuery
from .pages import Pages, PageTable
from .selection import select_tokens


def low_bit_query(
    q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range
) -> LowBitQuery | NativeQuery:
    """Return an object that scores the low-bit KV of `tokens` and attends to it (see `LowBitQuery`).

    Do not use the object after the KV has changed.
    """
    if q.device.type == "cpu" and (native := low_bit_cpu.query(q, mean, pages, layout, tokens)) is not None:
        return native
    return LowBitQuery(q, mean, pages, layout, tokens)


@dataclass(frozen=True, eq=False)
class LowBitQuery:
    """Low-bit query of one sequence, computed as a batch of one (`low_bit_lists`).

    Attributes:
        q: Queries `[Hkv, G, d]`, scaled and transformed to the basis of the keys.
        mean: Mean that was subtracted from the keys, `[Hkv, d]`.
        pages: The low-bit KV.
        layout: Layout of its blocks.
        tokens: The tokens to score and to attend to.
    """

    q: torch.Tensor
    mean: torch.Tensor
    pages: Pages
    layout: Layout
    tokens: range

    @cached_property
    def scores(self) -> torch.Tensor:
        """Scores `[Hkv, G, n]` of the n tokens."""
        starts, stops = self._repeated(self.tokens.start, self.tokens.stop)
        found = dispatch.score_low_bit(self.q, self.mean, self.layout, self._table, starts, stops, self.tokens.stop)
        return found.scores[:, :, self.tokens.start :]

    def select(self, alpha: float, limit: int) -> torch.Tensor:
        """Select tokens by their scores (`selection.select_tokens`).

        Returns:
            Indices int64 `[Hkv, n]`, counted from the first of `tokens`.
        """
        return select_tokens(self.scores, alpha, limit)

    def merge(
        self,
        exact: tuple[torch.Tensor, torch.Tensor],
        skip: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        softcap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact with approximate attention. The result equals one softmax over both.

        Args:
            exact: out `[Hkv, G, d]` and lse `[Hkv, G]` of the exact attention. Both may be overwritten.
            skip: Tokens that exact attention covers, int64 `[Hkv, n]`. Negative entries are padding.
            rotations: Matrix `[d, d]` that the values were multiplied by before quantisation, and its inverse.
            softcap: Soft cap of the scores, or None.

        Returns:
            Merged out and lse.
        """
        starts, stops, counts = self._repeated(self.tokens.start, self.tokens.stop, skip.shape[1])
        out, lse = (each.to(self.q.dtype).contiguous() for each in exact)
        return dispatch.merge_approximate(
            self.q, self.mean, rotations[0], self.layout, self._table, starts, stops, skip.contiguous(),
            counts, self.tokens.stop, out, lse, softcap,
        )  # fmt: skip

    @property
    def _table(self) -> PageTable:
        return PageTable((self.pages,), self.pages.table.unsqueeze(0))

    def _repeated(self, *numbers: int) -> torch.Tensor:
        """Repeat each number for all KV heads: int32 `[numbers, Hkv]` on the device of the query."""
        counted = torch.tensor(numbers, dtype=torch.int32).unsqueeze(1).expand(-1, len(self.q))
        return to_device(counted.contiguous(), self.q.device)
