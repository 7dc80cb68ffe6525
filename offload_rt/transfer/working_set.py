"""Rows fetched lately that stay on the device: of each layer that selects and each KV head at most `capacity`, so that
only what is missing crosses the link.

Everything is torch on static shapes and nothing asks the host, so that it can be part of a captured step. What leaves
first is what scores least: a use adds 1, and each look-up of the layer multiplies by `DECAY` (LRFU of Lee et al. 2001,
which becomes "longest ago" near 0 and "least often" at 1; measured: `eval/results/reference/working_set.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core import ModelGeometry
from ..kernels.dispatch import gather_rows

DECAY = 0.9
"""Of a row's score with each look-up. On recorded selections of the reference model within 0.3 points of hit rate of
the best of 0.5 to 1, and one to four points above 1. Where a layer selects no more rows than are kept it hits at least
what "longest ago" and "least often" hit; where it selects more, up to three points less."""

_EMPTY = -1


_SLOT_BYTES = 8
"""Of a table, for each slot: a token and a score."""


def rows_within(size: int, layers: int, kv_heads: int, pair_bytes: int) -> int:
    """The most rows per KV head whose working set, of `layers` layers that select, takes at most `size` bytes, tables
    included; `pair_bytes` are those of a stored row, K and V. 0 where there is no room for one."""
    return max(0, size // (layers * kv_heads * (pair_bytes + _SLOT_BYTES)) - 1)


@dataclass(frozen=True)
class LookUp:
    """What a table said of tokens `[P, n]`, of which perhaps only the first of each list were meant.

    slots: int64 `[P, n]`, the slot that holds the token's row, negative where none does. into: int64 `[P, n]`, the slot
    that the row of a token that was missing takes from now on; `capacity`, a slot that nobody reads, for all others.
    hits: int64 without axes, how many slots were found.
    """

    slots: torch.Tensor
    into: torch.Tensor
    hits: torch.Tensor


def working_set_bytes(rows: int, geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Bytes on the device of one layer's working set of `rows` rows of each KV head, with the row that takes what is
    kept nowhere and a token and a score for each; 0 where there is none."""
    if rows == 0:
        return 0
    token_and_score = torch.int32.itemsize + torch.float32.itemsize
    return (rows + 1) * (geometry.kv_bytes(1, dtype) // geometry.layers + token_and_score * geometry.kv_heads)


class Table:
    """Which token lies in which slot, for P lists of `capacity` slots; the rows are their owner's.

    A look-up lets all missing tokens in, in their order, as long as there are slots that were not used by this very
    look-up. It costs two sorts of the slots and a few passes over the tokens; 8 bytes a slot, whatever the context.
    """

    def __init__(self, lists: int, capacity: int, device: torch.device, decay: float = DECAY) -> None:
        assert capacity >= 1 and 0 <= decay <= 1
        self.capacity, self._decay = capacity, decay
        # One slot more than there are takes what is to be stored nowhere, so that every scatter has a static shape.
        self._tokens = torch.full((lists, capacity + 1), _EMPTY, dtype=torch.int32, device=device)
        self._scores = torch.full((lists, capacity + 1), -torch.inf, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._tokens.nbytes + self._scores.nbytes

    @property
    def tokens(self) -> torch.Tensor:
        """int32 `[P, capacity]`: the token in each slot, negative where none is."""
        return self._tokens[:, : self.capacity]

    def look_up(self, tokens: torch.Tensor, meant: torch.Tensor | None = None) -> LookUp:
        """Where tokens int64 `[P, n]` are, no token twice in a list, and where those that are missing go; of those that
        are not `meant` (bool `[P, n]`; None: all are) neither is the case."""
        capacity, scores = self.capacity, self._scores[:, : self.capacity]
        wanted = tokens.to(torch.int32).contiguous()
        known, order = self.tokens.sort(dim=1)
        at = torch.searchsorted(known, wanted).clamp_(max=capacity - 1)
        hit, missing = known.gather(1, at) == wanted, known.gather(1, at) != wanted
        if meant is not None:
            hit, missing = hit & meant, missing & meant
        slots = order.gather(1, at)
        used = torch.zeros_like(self._scores).scatter_(1, slots.where(hit, capacity), 1.0)[:, :capacity]
        scores.mul_(self._decay).add_(used)
        # SlotTable by rising score, those just used behind all others: the j-th missing token takes the j-th of them.
        leaving = scores.masked_fill(used > 0, torch.inf).argsort(dim=1, stable=True)
        rank = missing.cumsum(1) - 1
        admitted = missing & (rank < capacity - hit.sum(1, keepdim=True))
        into = leaving.gather(1, rank.clamp(0, capacity - 1)).where(admitted, capacity)
        self._tokens.scatter_(1, into, wanted)
        self._scores.scatter_(1, into, 1.0)
        return LookUp(slots.where(hit, _EMPTY), into, hit.sum())

    def forget(self, token: int) -> None:
        """`token` is in no slot any more."""
        gone = self._tokens == token
        self._tokens.masked_fill_(gone, _EMPTY)
        self._scores.masked_fill_(gone, -torch.inf)

    def clone(self) -> Table:
        """An independent copy."""
        twin = object.__new__(Table)
        twin.capacity, twin._decay = self.capacity, self._decay
        twin._tokens, twin._scores = self._tokens.clone(), self._scores.clone()
        return twin

    def check_integrity(self) -> None:
        """Asserts that no token is in two slots of a list, and that exactly the empty slots have no score."""
        for tokens, scores in zip(self.tokens, self._scores[:, : self.capacity], strict=True):
            held = tokens[tokens >= 0]
            assert len(held.unique()) == len(held)
            assert torch.equal(tokens < 0, scores.isneginf())


@dataclass
class _Layer:
    """rows: `[2, Hkv, capacity + 1, width]`, K and V as the pool stores them; the last slot holds anything."""

    table: Table
    rows: torch.Tensor

    def clone(self) -> _Layer:
        return _Layer(self.table.clone(), self.rows.clone())


class WorkingSet:
    """The working set of one sequence. Rows are kept as they are stored in the pool, so that a row from here is the
    row from there, bit for bit. A layer's table and rows are made when it first selects.

    Every call belongs to the same stream (the link's prefetch stream): their order is that of the stream."""

    def __init__(self, kv_heads: int, capacity: int, width: int, storage: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self._shape = (2, kv_heads, capacity + 1, width)
        self._storage, self._device = storage, device
        self._layers: dict[int, _Layer] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device, tables included."""
        return sum(layer.rows.nbytes + layer.table.nbytes for layer in self._layers.values())

    def look_up(self, layer: int, tokens: torch.Tensor, meant: torch.Tensor | None = None) -> LookUp:
        """Where `tokens` int64 `[Hkv, n]`, those that are `meant`, are: `read` those that are there, `write` the
        others, in this order."""
        if layer not in self._layers:
            rows = torch.empty(self._shape, dtype=self._storage, device=self._device)
            self._layers[layer] = _Layer(Table(self._shape[1], self.capacity, self._device), rows)
        return self._layers[layer].table.look_up(tokens, meant)

    def read(self, layer: int, found: LookUp, out: torch.Tensor) -> None:
        """The rows that were found, into their places of out `[2, Hkv, n, width]`, whose planes are contiguous; the
        others stay as they are."""
        rows = self._layers[layer].rows
        first = torch.arange(0, rows.shape[1] * rows.shape[2], rows.shape[2], device=rows.device).view(-1, 1)
        ids = (first + found.slots).where(found.slots >= 0, _EMPTY)
        counts = torch.full((len(ids),), ids.shape[1], dtype=torch.int32, device=rows.device)
        for own, plane in zip(rows, out, strict=True):
            gather_rows(own.flatten(0, 1), ids, counts, plane)

    def write(self, layer: int, found: LookUp, rows: torch.Tensor) -> None:
        """Of rows `[2, Hkv, n, width]` those that were missing take the slots they got."""
        own = self._layers[layer].rows
        index = found.into[None, :, :, None].expand(2, -1, -1, own.shape[3])
        own.scatter_(2, index, rows)

    def forget(self, layer: int, token: int) -> None:
        """The row of `token` is another one from now on."""
        if layer in self._layers:
            self._layers[layer].table.forget(token)

    def clone(self) -> WorkingSet:
        """An independent copy."""
        _, kv_heads, _, width = self._shape
        twin = WorkingSet(kv_heads, self.capacity, width, self._storage, self._device)
        twin._layers = {number: layer.clone() for number, layer in self._layers.items()}
        return twin

    def check_integrity(self, stored: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        """Asserts that every row here is the pool's: `stored(layer, tokens [Hkv, n])` gives those, `[2, Hkv, n, width]`
        (it is asked for token 0 where a slot is empty)."""
        for number, layer in self._layers.items():
            layer.table.check_integrity()
            tokens = layer.table.tokens
            want = stored(number, tokens.clamp_min(0).long())
            same = (layer.rows[:, :, : self.capacity].cpu() == want.cpu()).all(dim=3) | (tokens < 0).cpu()
            assert bool(same.all()), f"layer {number} has a row that is not the pool's"
