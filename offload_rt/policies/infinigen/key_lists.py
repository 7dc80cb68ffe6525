"""Selection, and the tail, for all sequences of a batch at once, by the kernels of the decode step: nothing is asked of
the device, and whatever the batch, a layer is one chain of launches. A batch may be one sequence.

What is selected is `kernels.selection.select_tokens` of each sequence by itself, rising.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ...core import Visible
from ...kernels import dispatch
from ...kernels.lists import selection_limit
from ...kernels.pages import PAGE_TOKENS, Pages, PageTable, table_of
from ...kernels.pointer_table import FIELDS, PointerTable, entry
from .bases import Basis
from .low_bit_rows import LowBitRows
from .scoring_keys import ScoringKeys


@dataclass(frozen=True)
class Rule:
    """Tokens within `alpha` of a head's maximum, at most `max_fraction` of the candidates."""

    alpha: float
    max_fraction: float

    def most(self, candidates: int) -> int:
        """The most tokens of a sequence with so many candidates."""
        return selection_limit(candidates, self.max_fraction)


@dataclass(frozen=True)
class Spans:
    """What each sequence selects from, on the device: candidates [start, stop), int32 `[P]`, of which it may take at
    most `limits` int32 `[B]`. The host knows only that there are at most `tokens` slots and `cap` selected ones."""

    starts: torch.Tensor
    stops: torch.Tensor
    limits: torch.Tensor
    tokens: int
    cap: int

    @staticmethod
    def numbers(visible: Sequence[Visible], kv_heads: int, rule: Rule) -> list[list[int]]:
        """Of sequences that see `visible`: starts and stops `[P]`, limits `[B]`."""
        candidates = [seen.candidates for seen in visible]
        each = [c for c in candidates for _ in range(kv_heads)]
        limits = [rule.most(len(c)) for c in candidates]
        return [[c.start for c in each], [c.stop for c in each], limits]


class KeyLists:
    """The scoring keys of `batch` sequences, of up to `tokens` tokens each, in the layers that select. `hold` says of
    which, before each step; their storages lie where they like, in tables of fixed addresses: one for each layer, or
    for pages, which hold all layers, one."""

    def __init__(self, rule: Rule, layers: Iterable[int], batch: int, tokens: int, device: torch.device) -> None:
        """layers: those that select."""
        self._rule, self._at = rule, {layer: i for i, layer in enumerate(layers)}
        self._pointers = torch.zeros(len(self._at), batch, FIELDS, dtype=torch.int64, device=device)
        self._pages = torch.zeros(1, batch, -(-tokens // PAGE_TOKENS), dtype=torch.int64, device=device)
        self._keys: list[ScoringKeys] = []
        self._bases: list[list[Basis]] = []
        self._held: list[list[torch.Tensor | Pages]] = []
        self._storages: list[PointerTable | PageTable] = []
        self._basis: list[Basis] = []

    def hold(self, keys: Sequence[ScoringKeys], slots: Sequence[int]) -> torch.Tensor | None:
        """From now on the lists are of `keys`, which get room for a key in each one's slot. Returns the tables int64
        `[layers, B, FIELDS]` or `[1, B, pages]` as they have to be on the device, if anything has moved; `tables` is
        where."""
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
        """Lets go of the sequences, until the next `hold`."""
        self._keys, self._bases, self._held, self._storages, self._basis = [], [], [], [], []

    @property
    def tables(self) -> torch.Tensor:
        """int64 `[layers, B, FIELDS]` or `[1, B, pages]`, of what is held."""
        return self._pages if isinstance(self._storages[0], PageTable) else self._pointers

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Keys k `[P, d]`, and values v `[P, d]` where they are kept too, enter the slots int64 `[P]`."""
        at = self._at[layer]
        self._keys[0].enter(layer, k, v, self._basis[at], self._storages[at], slots)

    def select(self, layer: int, q: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
        """With the (speculated) queries q `[H, B, d]`: tokens int64 `[P, cap]`, rising, and counts int32 `[P]`; tokens
        behind a count are any indices of the context."""
        at = self._at[layer]
        skewed, storage = self._basis[at].skew_queries(q, self._storages[at].heads), self._storages[at]
        found = self._keys[0].found(layer, skewed, storage, spans.starts, spans.stops, spans.tokens)
        return dispatch.select_tokens(
            found, spans.starts, spans.stops, storage.heads, self._rule.alpha, spans.limits, spans.cap
        )

    def join_tail(
        self,
        layer: int,
        q: torch.Tensor,
        spans: Spans,
        chosen: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, out `[P, G, d]` and lse `[P, G]`, of the true queries q `[H, B, d]` over exact rows, of which
        both are given, and over low-bit rows of the candidates that were not chosen (tokens and counts, as `select`
        returns them), where there are any."""
        rows, at = self._keys[0], self._at[layer]
        if not isinstance(rows, LowBitRows):
            return exact
        storage = self._storages[at]
        assert isinstance(storage, PageTable)
        skewed = self._basis[at].skew_queries(q, storage.heads)
        return rows.join_tail(layer, skewed, storage, spans.starts, spans.stops, spans.tokens, chosen, exact)


def _differ(new: Sequence[Sequence[object]], old: Sequence[Sequence[object]]) -> bool:
    """Whether any object is another one."""
    if len(new) != len(old):
        return True
    pairs = zip(new, old, strict=True)
    return any(len(a) != len(b) or any(x is not y for x, y in zip(a, b, strict=True)) for a, b in pairs)
