"""Reference for sparse decoding: every decoded token attends to its selection with one masked softmax per layer.

The policy makes the selections. Everything else is plain: each layer has one KV tensor, indexed by token and rounded as
in the pool's format. A bounded pool is simulated layer by layer with the runtime's slot table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload_rt.config import EngineConfig
from offload_rt.core import KVPart, ModelGeometry, Selection, VisibleTokens
from offload_rt.kernels.decode_attention import attend, group_weights
from offload_rt.kv_cache.kv_format import make_kv_format
from offload_rt.kv_cache.pool import HostPool
from offload_rt.model_runner.slot_table import InPlaceEviction, SlotTable
from offload_rt.models.full_attention import residual_after_attention
from offload_rt.models.loading import LoadedModel
from offload_rt.policies.base import Policy, PolicyState
from offload_rt.policies.registry import make_policy
from offload_rt.skewing.calibrate import cached_artifact
from offload_rt.transfer.plan import attended_tokens


@dataclass(frozen=True)
class PlainScore:
    """Results of `plain_scores`. Fractions and missed attention mass are indexed by position, then by layer."""

    logprobs: list[float]
    is_greedy: list[bool]
    attended: list[list[float]]
    fetched: list[list[float]]
    missed: list[list[float]]


class _Slots:
    """The slots of one layer in a separate pool, and the KV `[Hkv, N, d]` of all tokens, both exact and as stored."""

    def __init__(
        self, geometry: ModelGeometry, layer: int, policy: Policy, config: EngineConfig, prefix: KVPart
    ) -> None:
        self._geometry, self._layer = geometry, layer
        slides = geometry.windows[layer] is not None
        one = replace(geometry, layers=1, scales=geometry.scales[:1], windows=(None,))
        limit = None if slides or config.host_memory is None else int(config.host_memory) // geometry.layers
        dtype, prefilled = prefix.k.dtype, prefix.k.shape[1]
        self._pool = HostPool(one, dtype, limit, kv_cache_dtype=config.kv_cache_dtype)
        self._blocks = self._pool.new_block_table(max(1, prefilled))
        self._pool.commit(self._blocks, prefilled)
        self._table: SlotTable = SlotTable(self._pool)
        if config.eviction is not None and not slides:
            self._table = InPlaceEviction(self._pool, config.eviction, policy.sinks, policy.recent)
        self._resident = geometry.resident(layer, policy.sinks, policy.recent)
        self._format = make_kv_format(config.kv_cache_dtype, dtype, geometry.head_dim)
        self.exact, self.stored = prefix, KVPart(self._rounded(prefix.k), self._rounded(prefix.v))
        self._tokens = list(range(prefilled))

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._format.exact else self._format.decode(self._format.encode(rows))

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int] | None:
        """Add the next token. If the token in `slot` was first moved to the slot `victim`, return (slot, victim)."""
        token = self.exact.k.shape[1]
        self._table.begin_step(self._blocks, token)
        moved = self._table.moves.get(0)
        if moved is not None:
            self._tokens[moved[1]] = self._tokens[moved[0]]
        self._tokens += [token] * (self._table.newest + 1 - len(self._tokens))
        self._tokens[self._table.newest] = token
        self._pool.commit(self._blocks, self._table.context)
        rounded = KVPart(self._rounded(k), self._rounded(v))
        self.exact = KVPart(torch.cat((self.exact.k, k), 1), torch.cat((self.exact.v, v), 1))
        self.stored = KVPart(torch.cat((self.stored.k, rounded.k), 1), torch.cat((self.stored.v, rounded.v), 1))
        return moved

    @property
    def newest(self) -> int:
        return self._table.newest

    @property
    def visible(self) -> VisibleTokens:
        sinks, recent = self._resident
        window = self._geometry.window_at(self._layer, self._table.context - 1)
        return VisibleTokens.of(self._table.context, sinks=sinks, recent=recent, window=window)

    def tokens(self, slots: torch.Tensor | range) -> torch.Tensor:
        return torch.tensor(self._tokens)[list(slots) if isinstance(slots, range) else slots]

    def selected(self, slots: torch.Tensor) -> None:
        self._table.record_selected(0, slots)


@torch.inference_mode()
def plain_scores(
    loaded: LoadedModel,
    policy: str,
    options: Mapping[str, Any],
    ids: Sequence[int],
    start: int,
    engine: Mapping[str, Any] | None = None,
) -> PlainScore:
    """Score `ids[start + 1 :]`. The first `start` tokens are prefilled, and all others are decoded with the policy."""
    adapter, geometry, config = loaded.adapter, loaded.adapter.geometry, EngineConfig(**engine or {})
    made = make_policy(
        policy, options, geometry=geometry, device=adapter.device, dtype=adapter.dtype,
        artifact=lambda method: cached_artifact(loaded, method),
    )  # fmt: skip
    state = made.new_state(lambda layer, at: layers[layer].stored.k[:, layers[layer].tokens(at)])
    layers: list[_Slots] = []
    given, at = torch.tensor(ids[:start], dtype=torch.int64), torch.arange(start)
    x = adapter.embed(given, at)
    nothing = torch.empty(geometry.kv_heads, 0, geometry.head_dim, dtype=adapter.dtype)
    for layer in range(geometry.layers):
        if not start:
            layers.append(_Slots(geometry, layer, made, config, KVPart(nothing, nothing)))
            continue
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), at)
        layers.append(_Slots(geometry, layer, made, config, KVPart(k, v)))
        if layer not in made.dense_layers:
            state.on_queries(layer, q, k, 0)
            state.on_kv(layer, k, v, 0)
        x = adapter.mlp(layer, residual_after_attention(adapter, layer, x, q, KVPart(k, v), start), given)
    found = PlainScore([], [], [], [], [])
    for t in range(start, len(ids) - 1):
        logits = _step(loaded, made, state, layers, ids[t], t, found)
        found.logprobs.append(float(logits.log_softmax(-1)[ids[t + 1]]))
        found.is_greedy.append(bool(logits[ids[t + 1]] == logits.max()))
    return found


def _step(
    loaded: LoadedModel, policy: Policy, state: PolicyState, layers: list[_Slots], token: int, t: int, found: PlainScore
) -> torch.Tensor:
    adapter, at = loaded.adapter, torch.tensor([t])
    x, guess = adapter.embed(torch.tensor([token]), at), None
    for one in (found.attended, found.fetched, found.missed):
        one.append([0.0] * len(layers))
    for layer, slots in enumerate(layers):
        attention_input = adapter.attention_input(layer, x)
        q, k, v = adapter.qkv(layer, attention_input, at)
        moved = slots.append(k, v)
        if layer in policy.dense_layers:
            chosen = None
        else:
            if moved is not None:
                state.on_moved(layer, *moved)
            state.on_kv(layer, k, v, slots.newest)
            chosen = _select(state, layer, q[:, 0], q[:, 0] if guess is None else guess, slots)
        out = _attend(loaded, policy, state, layer, q[:, 0], slots, chosen, found)
        residual = adapter.after_attention(layer, x, out.flatten()[None])
        guess = None
        if layer + 1 < len(layers) and layer + 1 not in policy.dense_layers and policy.query_source != "query":
            guessed = attention_input
            if policy.query_source != "attention_input":  # InfiniGen §4.3
                hidden = x if policy.query_source == "normed_input" else residual
                guessed = adapter.attention_input(layer + 1, hidden)
            guess = adapter.query(layer + 1, policy.correct_prediction(layer + 1, guessed), at)[:, 0]
        x = adapter.mlp(layer, residual, torch.tensor([token]))
    return adapter.logits(x)[0]


def _select(state: PolicyState, layer: int, q: torch.Tensor, guess: torch.Tensor, slots: _Slots) -> torch.Tensor:
    """Return the slots `[Hkv, n]` selected with the predicted query `guess`, and those added with the true query."""
    selection = state.select(layer, guess, slots.visible).known()
    slots.selected(selection.tokens)
    extra = state.repair(layer, q, slots.visible, selection)
    return selection.tokens if extra is None else torch.cat((selection.tokens, extra.tokens), 1)


def _attend(
    loaded: LoadedModel,
    policy: Policy,
    state: PolicyState,
    layer: int,
    q: torch.Tensor,
    slots: _Slots,
    chosen: torch.Tensor | None,
    found: PlainScore,
) -> torch.Tensor:
    geometry, visible = loaded.adapter.geometry, slots.visible
    scale, softcap, heads = geometry.scales[layer], geometry.softcap, len(slots.exact.k)
    n = slots.exact.k.shape[1]
    resident = torch.zeros(n, dtype=torch.bool)
    resident[torch.cat((slots.tokens(visible.sinks), slots.tokens(visible.recent)))] = True
    attended = resident.expand(heads, n).clone()
    if chosen is None:
        attended[:, slots.tokens(visible.all)] = True
    else:
        attended.scatter_(1, slots.tokens(chosen), True)
    exact, stored, near = slots.exact, slots.stored, resident[:, None]
    keys, values = torch.where(near, exact.k, stored.k), torch.where(near, exact.v, stored.v)
    grouped = q.view(heads, -1, q.shape[-1]) * scale
    scores = _capped(grouped @ keys.mT, softcap).masked_fill(~attended[:, None], -math.inf)
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    if chosen is not None:
        exact = out.reshape(q.shape), lse.flatten()
        merged, total = state.merge_approximate(layer, q, visible, Selection(chosen), *exact)
        out, lse = merged.view_as(out), total.view_as(lse)
    count = len(visible.candidates) if chosen is None else chosen.shape[1]
    found.fetched[-1][layer] = count / len(visible.all)
    found.attended[-1][layer] = (visible.resident + count) / len(visible.all)
    if chosen is not None:
        seen = n if (window := geometry.window_at(layer, n - 1)) is None else window
        whole = _capped(grouped @ slots.exact.k[:, max(0, n - seen) :].mT, softcap).logsumexp(-1)
        found.missed[-1][layer] = max(0.0, 1.0 - float((scores.logsumexp(-1) - whole).exp().mean()))
        if policy.wants_weights:
            index = slots.tokens(chosen).unsqueeze(-1).expand(-1, -1, q.shape[-1])
            parts = [KVPart(slots.exact.k[:, resident], slots.exact.v[:, resident])]
            parts.append(KVPart(slots.stored.k.gather(1, index), slots.stored.v.gather(1, index)))
            weights = group_weights(q, parts, scale, attend(q, parts, scale, softcap)[1], softcap)
            state.on_attended(layer, visible, attended_tokens(visible, chosen), weights)
    sinks = loaded.adapter.sinks[layer]
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.view_as(lse)).unsqueeze(-1)
    return out.to(q.dtype)


def _capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
