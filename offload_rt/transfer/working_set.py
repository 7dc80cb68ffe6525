"""Working set: a cache of recently fetched KV on the device. Only KV that is not in the cache is transferred.

Each layer that selects tokens caches at most `capacity` entries per KV head. All operations are torch operations with
static shapes that do not synchronise with the host, so they can be captured in a graph. The entry with the lowest score
is evicted first: a use adds 1 to the score, and each look-up of the layer multiplies all scores by `DECAY` (LRFU, Lee
et al. 2001: LRU for a decay near 0, LFU for 1). Measurements: `eval/results/reference/working_set.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core import ModelGeometry
from ..kernels.dispatch import gather_rows

DECAY = 0.9
"""Factor by which each look-up multiplies all scores.

On recorded selections of the reference model, the hit rate with 0.9 is at most 0.3 percentage points below the hit rate
with the best factor in [0.5, 1], and 1 to 4 points above that of 1.0 (LFU). If a layer selects no more entries than the
capacity, the hit rate is at least that of LRU and of LFU. If it selects more, the hit rate can be up to 3 points lower.
"""

_EMPTY = -1


@dataclass(frozen=True)
class LookUp:
    """Result of a look-up of n tokens in each of P lists (one per KV head).

    Attributes:
        slots: Slot of each cached token, int64 `[P, n]`; negative for tokens that are not cached.
        into: Slot assigned to each missing token, int64 `[P, n]`. All other tokens get `capacity`, the index of a slot
            that is never read.
        hits: Number of cached tokens, as an int64 scalar on the device.
    """

    slots: torch.Tensor
    into: torch.Tensor
    hits: torch.Tensor


def working_set_bytes(rows: int, geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Return the size in bytes of a layer's working set: `rows` entries per KV head, and a table. 0 if `rows` is 0."""
    # An additional entry receives KV that is not kept.
    if rows == 0:
        return 0
    token_and_score = torch.int32.itemsize + torch.float32.itemsize
    return (rows + 1) * (geometry.kv_bytes(1, dtype) // geometry.layers + token_and_score * geometry.kv_heads)


class Table:
    """Maps tokens to slots, for P lists of `capacity` slots each. The caller stores the KV.

    A look-up inserts missing tokens in order, as long as there are slots that this look-up has not used. A look-up
    takes two sorts of the slots and a few passes over the tokens. A slot takes 8 bytes, whatever the context length.
    """

    def __init__(self, lists: int, capacity: int, device: torch.device, decay: float = DECAY) -> None:
        assert capacity >= 1 and 0 <= decay <= 1
        self.capacity, self._decay = capacity, decay
        # An additional slot receives tokens that are not stored, so that every scatter has a static shape.
        self._tokens = torch.full((lists, capacity + 1), _EMPTY, dtype=torch.int32, device=device)
        self._scores = torch.full((lists, capacity + 1), -torch.inf, device=device)

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._scores.nbytes

    @property
    def tokens(self) -> torch.Tensor:
        """The token in each slot of each list, int32 `[P, capacity]`; negative if the slot is empty."""
        return self._tokens[:, : self.capacity]

    def look_up(self, tokens: torch.Tensor, valid: torch.Tensor | None = None) -> LookUp:
        """Look up tokens int64 `[P, n]`, without duplicates in a list. Assign slots to missing tokens.

        Tokens whose entry in `valid` (bool `[P, n]`) is False are ignored.
        """
        capacity, scores = self.capacity, self._scores[:, : self.capacity]
        wanted = tokens.to(torch.int32).contiguous()
        known, order = self.tokens.sort(dim=1)
        at = torch.searchsorted(known, wanted).clamp_(max=capacity - 1)
        hit, missing = known.gather(1, at) == wanted, known.gather(1, at) != wanted
        if valid is not None:
            hit, missing = hit & valid, missing & valid
        slots = order.gather(1, at)
        used = torch.zeros_like(self._scores).scatter_(1, slots.where(hit, capacity), 1.0)[:, :capacity]
        scores.mul_(self._decay).add_(used)
        # Slots by ascending score; slots used by this look-up come last. The j-th missing token gets the j-th slot.
        leaving = scores.masked_fill(used > 0, torch.inf).argsort(dim=1, stable=True)
        rank = missing.cumsum(1) - 1
        admitted = missing & (rank < capacity - hit.sum(1, keepdim=True))
        into = leaving.gather(1, rank.clamp(0, capacity - 1)).where(admitted, capacity)
        self._tokens.scatter_(1, into, wanted)
        self._scores.scatter_(1, into, 1.0)
        return LookUp(slots.where(hit, _EMPTY), into, hit.sum())

    def forget(self, token: int) -> None:
        """Remove `token` from all lists."""
        gone = self._tokens == token
        self._tokens.masked_fill_(gone, _EMPTY)
        self._scores.masked_fill_(gone, -torch.inf)

    def clone(self) -> Table:
        twin = object.__new__(Table)
        twin.capacity, twin._decay = self.capacity, self._decay
        twin._tokens, twin._scores = self._tokens.clone(), self._scores.clone()
        return twin

    def check_integrity(self) -> None:
        """Assert that no token has two slots in a list, and that exactly the empty slots have no score."""
        for tokens, scores in zip(self.tokens, self._scores[:, : self.capacity], strict=True):
            held = tokens[tokens >= 0]
            assert len(held.unique()) == len(held)
            assert torch.equal(tokens < 0, scores.isneginf())


@dataclass
class _Layer:
    """A layer's table and its KV, `[2, Hkv, capacity + 1, width]` in the storage format.

    The last slot is never read.
    """

    table: Table
    rows: torch.Tensor

    def clone(self) -> _Layer:
        return _Layer(self.table.clone(), self.rows.clone())


class WorkingSet:
    """The working set of one sequence.

    Cached KV is in the storage format and thus bit-identical to the KV in the pool. The memory of a layer is allocated
    when the layer first selects tokens. All calls must be made in the same stream, the prefetch stream.
    """

    def __init__(self, kv_heads: int, capacity: int, width: int, storage: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self._shape = (2, kv_heads, capacity + 1, width)
        self._storage, self._device = storage, device
        self._layers: dict[int, _Layer] = {}

    @property
    def nbytes(self) -> int:
        """Size in bytes on the device, including tables."""
        return sum(layer.rows.nbytes + layer.table.nbytes for layer in self._layers.values())

    def look_up(self, layer: int, tokens: torch.Tensor, valid: torch.Tensor | None = None) -> LookUp:
        """Look up `tokens` int64 `[Hkv, n]` (see `Table.look_up`).

        The caller must then call `read` and `write`, in this order.
        """
        if layer not in self._layers:
            rows = torch.empty(self._shape, dtype=self._storage, device=self._device)
            self._layers[layer] = _Layer(Table(self._shape[1], self.capacity, self._device), rows)
        return self._layers[layer].table.look_up(tokens, valid)

    def read(self, layer: int, found: LookUp, out: torch.Tensor) -> None:
        """Copy cached KV to the positions of its tokens in out `[2, Hkv, n, width]`, whose planes are contiguous."""
        rows = self._layers[layer].rows
        first = torch.arange(0, rows.shape[1] * rows.shape[2], rows.shape[2], device=rows.device).view(-1, 1)
        ids = (first + found.slots).where(found.slots >= 0, _EMPTY)
        counts = torch.full((len(ids),), ids.shape[1], dtype=torch.int32, device=rows.device)
        for own, plane in zip(rows, out, strict=True):
            gather_rows(own.flatten(0, 1), ids, counts, plane)

    def write(self, layer: int, found: LookUp, rows: torch.Tensor) -> None:
        """Store the missing tokens of `rows` `[2, Hkv, n, width]` in their assigned slots."""
        own = self._layers[layer].rows
        index = found.into[None, :, :, None].expand(2, -1, -1, own.shape[3])
        own.scatter_(2, index, rows)

    def forget(self, layer: int, token: int) -> None:
        """Remove `token`, because its KV changes."""
        if layer in self._layers:
            self._layers[layer].table.forget(token)

    def clone(self) -> WorkingSet:
        _, kv_heads, _, width = self._shape
        twin = WorkingSet(kv_heads, self.capacity, width, self._storage, self._device)
        twin._layers = {number: layer.clone() for number, layer in self._layers.items()}
        return twin

    def check_integrity(self, stored: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        """Assert that cached KV equals the KV in the pool.

        `stored(layer, tokens)` returns the pool's KV `[2, Hkv, n, width]` of tokens `[Hkv, n]`. It is called with token
        0 for empty slots.
        """
        for number, layer in self._layers.items():
            layer.table.check_integrity()
            tokens = layer.table.tokens
            want = stored(number, tokens.clamp_min(0).long())
            same = (layer.rows[:, :, : self.capacity].cpu() == want.cpu()).all(dim=3) | (tokens < 0).cpu()
            assert bool(same.all()), f"layer {number} has cached KV that differs from the pool"
