"""Working set: a cache of recently fetched KV on the device. Only KV that is not in the cache is transferred.

Each layer that selects tokens caches at most `capacity` entries per KV head. All operations have static shapes and do
not synchronise with the host, so they can be captured in a graph.

The entry with the lowest score is evicted first. Each use of an entry adds 1 to its score, and each look-up multiplies
all scores of the layer by `DECAY` (LRFU, Lee et al. 2001). For measurements, see
`eval/results/reference/working_set.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core import ModelGeometry, RowShape

DECAY = 0.9
"""Factor by which each look-up multiplies all scores.

On recorded selections of the reference model, the hit rate with 0.9 is at most 0.3 percentage points below the hit rate
with the best factor in [0.5, 1], and 1 to 4 points above the hit rate with 1.0 (LFU).
"""

_EMPTY = -1


@dataclass(frozen=True)
class LookUp:
    """Result of looking up n tokens in each of P lists (one list per KV head)."""

    slots: torch.Tensor  # slot of each cached token, int64 `[P, n]`; -1 for all other tokens
    # Slot assigned to each missing token, int64 `[P, n]`; -1 for cached tokens, or if no slot was left for the token.
    into: torch.Tensor
    hits: torch.Tensor  # number of cached tokens in each list, int64 `[P]`


def working_set_bytes(rows: int, geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Return the size in bytes of a layer's working set with `rows` entries per KV head."""
    # One additional entry receives the KV that is not kept.
    if rows == 0:
        return 0
    token_and_score = torch.int32.itemsize + torch.float32.itemsize
    return (rows + 1) * (geometry.full_rows.bytes(dtype) + token_and_score * geometry.kv_heads)


def look_up(table: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor | None = None) -> LookUp:
    """Look up tokens, and assign slots to missing tokens.

    Missing tokens replace the entries with the lowest scores, but not other tokens of this look-up.

    Args:
        table: Tables of all lists, int32 `[P, capacity + 1, 2]`, contiguous (`LayerSet.table`). Updated in place.
        tokens: Token indices, int64 `[P, n]`, without duplicates within a list.
        valid: Whether each token is looked up, bool `[P, n]`. None looks up all tokens.
    """
    capacity, held, every = table.shape[1] - 1, table[..., 0], table.view(torch.float32)[..., 1]
    scores, wanted = every[:, :capacity], tokens.to(torch.int32).contiguous()
    known, order = held[:, :capacity].sort(dim=1)
    at = torch.searchsorted(known, wanted).clamp_(max=capacity - 1)
    hit = known.gather(1, at) == wanted
    missing = ~hit
    if valid is not None:
        hit, missing = hit & valid, missing & valid
    slots = order.gather(1, at)
    used = torch.zeros_like(every).scatter_(1, slots.where(hit, capacity), 1.0)[:, :capacity]
    scores.mul_(DECAY).add_(used)
    # Sort the slots by ascending score, slots of found tokens last. The j-th missing token takes the j-th slot.
    leaving = scores.masked_fill(used > 0, torch.inf).argsort(dim=1, stable=True)
    rank, hits = missing.cumsum(1) - 1, hit.sum(1)
    admitted = missing & (rank < capacity - hits.unsqueeze(1))
    into = leaving.gather(1, rank.clamp_(0, capacity - 1))
    # The additional entry at the end receives tokens that are not stored, so that every scatter has a static shape.
    index = into.where(admitted, capacity)
    held.scatter_(1, index, wanted)
    every.scatter_(1, index, 1.0)
    return LookUp(slots.where(hit, _EMPTY), into.where(admitted, _EMPTY), hits)


@dataclass(frozen=True)
class LayerSet:
    # For each slot, the token (negative if the slot is empty) and the bits of its float32 score, int32
    # `[Hkv, capacity + 1, 2]`. The last slot is never read.
    table: torch.Tensor
    # Cached KV `[planes * Hkv, capacity + 1, width]` in the storage format: K of all heads and then, unless the keys
    # contain the values, V of all heads.
    rows: torch.Tensor

    @classmethod
    def empty(cls, shape: RowShape, capacity: int, storage: torch.dtype, device: torch.device) -> LayerSet:
        """Create an empty working set. `shape.head_dim` is the number of stored elements per vector."""
        table = torch.full((shape.kv_heads, capacity + 1, 2), _EMPTY, dtype=torch.int32, device=device)
        table.view(torch.float32)[..., 1] = -torch.inf
        size = shape.planes * shape.kv_heads, capacity + 1, shape.head_dim
        return cls(table, torch.empty(size, dtype=storage, device=device))

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.rows.nbytes

    @property
    def tokens(self) -> torch.Tensor:
        """Token in each slot, for each KV head, int32 `[Hkv, capacity]`. Negative if the slot is empty."""
        return self.table[:, :-1, 0]

    def forget(self, token: int) -> None:
        gone = self.table[..., 0] == token
        self.table[..., 0].masked_fill_(gone, _EMPTY)
        self.table.view(torch.float32)[..., 1].masked_fill_(gone, -torch.inf)

    def clone(self) -> LayerSet:
        return LayerSet(self.table.clone(), self.rows.clone())

    def check_integrity(self) -> None:
        for tokens, scores in zip(self.tokens, self.table.view(torch.float32)[:, :-1, 1], strict=True):
            held = tokens[tokens >= 0]
            assert len(held.unique()) == len(held)
            assert torch.equal(tokens < 0, scores.isneginf())


class WorkingSet:
    """The working set of one sequence. It is used only in the prefetch stream.

    Cached KV is in the storage format and thus bit-identical to the KV in the pool. The memory for a layer is allocated
    when the layer first selects tokens, and its address never changes.
    """

    def __init__(self, shape: RowShape, capacity: int, storage: torch.dtype, device: torch.device) -> None:
        assert capacity >= 1
        self._shape = shape, capacity, storage, device
        self._layers: dict[int, LayerSet] = {}

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers.values())

    def layer(self, layer: int) -> LayerSet:
        if layer not in self._layers:
            self._layers[layer] = LayerSet.empty(*self._shape)
        return self._layers[layer]

    def forget(self, layer: int, token: int) -> None:
        if layer in self._layers:
            self._layers[layer].forget(token)

    def clone(self) -> WorkingSet:
        twin = WorkingSet(*self._shape)
        twin._layers = {number: layer.clone() for number, layer in self._layers.items()}
        return twin

    def check_integrity(self, stored: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        """Assert that cached KV equals the KV in the pool.

        `stored(layer, tokens)` must return the pool's KV `[planes, Hkv, n, width]` of `tokens` `[Hkv, n]`.
        """
        for number, layer in self._layers.items():
            layer.check_integrity()
            tokens = layer.tokens
            rows = layer.rows[:, :-1].unflatten(0, (-1, len(tokens)))
            want = stored(number, tokens.clamp_min(0).long())
            same = (rows.cpu() == want.cpu()).all(dim=3) | (tokens < 0).cpu()
            assert bool(same.all()), f"layer {number} has cached KV that differs from the pool"
