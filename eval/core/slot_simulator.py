"""Slot simulator: tracks the token in each pool slot for one layer of one sequence.

Eviction victims are chosen per layer, so each layer can be simulated alone with its share of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...config import EvictionOptions, KVFormatName
from ...core import ModelGeometry, VisibleTokens
from ...kv_cache.pool import HostPool
from ...model_runner.slot_table import AppendOnly, InPlaceEviction, SlotTable
from ...policies.base import Policy


@dataclass(frozen=True)
class PoolSettings:
    """Pool settings of `LLM`: memory limit in bytes (None: unlimited), eviction, and KV storage format."""

    host_memory: int | None = None
    eviction: EvictionOptions | None = None
    kv_cache_dtype: KVFormatName = "auto"


class LayerSlots:
    """Token ids by slot of layer `layer`.

    The pool only counts blocks; no KV is written to it. Sliding-window layers are unbounded: no token is evicted.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        layer: int,
        dtype: torch.dtype,
        settings: PoolSettings,
        policy: Policy,
        prefilled: int,
        device: torch.device,
    ) -> None:
        """Place the `prefilled` tokens in slots of equal number.

        Slot lookups return tensors on `device`. Raises PoolFullError if the tokens do not fit.
        """
        one = replace(geometry, layers=1, scales=geometry.scales[:1], windows=(None,))
        self._geometry, self._layer = geometry, layer
        if geometry.windows[layer] is not None:
            settings = PoolSettings(kv_cache_dtype=settings.kv_cache_dtype)
        limit = None if settings.host_memory is None else max(1, settings.host_memory // geometry.layers)
        self._resident = geometry.resident(layer, policy.sinks, policy.recent)
        self._pool = HostPool(one, dtype, limit, kv_cache_dtype=settings.kv_cache_dtype)
        self._block_table = self._pool.new_block_table(max(1, prefilled))
        self._pool.commit(self._block_table, prefilled)
        self._slots: SlotTable = AppendOnly(self._pool)
        if settings.eviction is not None:
            self._slots = InPlaceEviction(self._pool, settings.eviction, policy.sinks, policy.recent)
        self._tokens = torch.arange(prefilled + 1, device=device)

    @property
    def newest(self) -> int:
        """Slot of the newest token."""
        return self._slots.newest

    def enter(self, token: int) -> tuple[int, int] | None:
        """Assign a slot to the next token.

        Returns (slot, victim) if the token in `slot` was first moved to the slot `victim`, otherwise None. Raises
        PoolFullError if the pool is full.
        """
        self._slots.begin_step(self._block_table, token)
        if self._slots.newest >= len(self._tokens):
            grown = self._tokens.new_empty(max(self._block_table.capacity, token + 1))
            grown[: len(self._tokens)] = self._tokens
            self._tokens = grown
        moved = self._slots.displaced(0)
        if moved is not None:
            self._tokens[moved[1]] = self._tokens[moved[0]]
        self._tokens[self._slots.newest] = token
        self._pool.commit(self._block_table, self._slots.context)
        return moved

    @property
    def visible(self) -> VisibleTokens:
        """Slots that the newest token may attend to."""
        sinks, recent = self._resident
        window = self._geometry.window_at(self._layer, self._slots.context - 1)
        return VisibleTokens.of(self._slots.context, sinks=sinks, recent=recent, window=window)

    def selected(self, slots: torch.Tensor) -> None:
        """Record that `slots` `[Hkv, n]` were selected in this step."""
        self._slots.selected(0, slots)

    def tokens(self, slots: torch.Tensor | range) -> torch.Tensor:
        """Return the token ids in `slots`, in the shape of `slots`. Valid until the next `enter`."""
        if isinstance(slots, range):
            return self._tokens[slots.start : slots.stop]
        return self._tokens[slots.to(self._tokens.device)]
