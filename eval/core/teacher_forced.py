"""The decode path layer by layer: all decoded positions of a text at once, each with its own selection.

A policy never looks ahead within a layer, so the positions of a teacher-forced text need not wait for each other: what
the step-by-step path computes for token t at layer l depends on layers below l and on keys up to t only. The same is
true of a bounded pool, whose victims are chosen layer by layer, and of rounded rows. The results are those of
`LLM.score` up to rounding (a test holds the two together); the time is a small part of it. And because a whole layer is
at hand, an observer can look at everything that the paper's pictures show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...core import KVPart, Selection, Visible
from ...engine.stats import Fractions, layer_means
from ...kernels.reference import capped
from ...kv_cache.kv_format import make_kv_format
from ...model_runner.attention import attend, give_to_sinks, group_weights, join_tail
from ...model_runner.trace import Trace
from ...models.adapter import ModelAdapter
from ...models.exact_layer import guessed_input, residual_after_attention
from ...policies.base import KeyReader, Policy, PolicyState
from ...transfer.plan import attended_tokens
from .slot_simulator import LayerSlots, PoolSettings

BLOCK = 128
"""Positions whose attention weights exist at once."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of one text for an observer. T decoded positions, N tokens.

    query: true queries `[H, T, d]`; guess: what the policy selected with, `[H, T, d]` (None in a dense layer).
    k, v `[Hkv, N, d]`; attended: bool `[Hkv, T, N]`; causal: bool `[T, N]`, what the model itself would see.
    """

    layer: int
    scale: float
    query: torch.Tensor
    guess: torch.Tensor | None
    k: torch.Tensor
    v: torch.Tensor
    attended: torch.Tensor
    causal: torch.Tensor


Observer = Callable[[LayerView], None]

UNLIMITED = PoolSettings()


@dataclass(frozen=True, eq=False)
class LayerwiseScore:
    """Of one text: log-probability (nats) and greedy match of each scored token, the trace of its decoded positions
    (missed mass at every step), and per selecting layer the mean relative error of the attention output
    |out - exact| / |exact|."""

    logprobs: list[float]
    is_greedy: list[bool]
    trace: Trace
    output_error: dict[int, float]
    dense_layers: frozenset[int]

    @property
    def fractions(self) -> Fractions:
        """Of all positions that were decoded."""
        return Fractions.of(self.trace, self.dense_layers)

    @property
    def missed(self) -> tuple[float | None, float | None]:
        """(mean, worst layer's mean) missed attention mass."""
        return layer_means(self.trace, self.dense_layers)


@dataclass(frozen=True, eq=False)
class Prefix:
    """The exact prefill of a text's first m tokens (lists are empty where m = 0): q `[H, m, d]`, k and v
    `[Hkv, m, d]` of each layer. The same for
    every policy, so it is computed once for all that are compared."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for part in (self.q, self.k, self.v) for t in part)


@torch.inference_mode()
def prefill_layers(adapter: ModelAdapter, tokens: Sequence[int]) -> Prefix:
    """Prefills `tokens` (none is allowed) exactly."""
    geometry, found = adapter.geometry, Prefix([], [], [])
    if not tokens:
        return found
    positions = torch.arange(len(tokens), device=adapter.device)
    x = adapter.embed(torch.tensor(tokens, dtype=torch.int64, device=adapter.device), positions)
    for layer in range(geometry.layers):
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), positions)
        for part, tensor in ((found.q, q), (found.k, k), (found.v, v)):
            part.append(tensor)
        if layer < geometry.layers - 1:
            x = adapter.mlp(layer, residual_after_attention(adapter, layer, x, q, KVPart(k, v), len(tokens)))
    return found


@torch.inference_mode()
def score_layerwise(
    adapter: ModelAdapter,
    policy: Policy,
    tokens: Sequence[int],
    decode_from: int,
    scored_from: int,
    observe: Observer | None = None,
    prefix: Prefix | None = None,
    pool: PoolSettings = UNLIMITED,
) -> LayerwiseScore:
    """Scores tokens [scored_from, N) of `tokens`: the first `decode_from` are prefilled exactly (or were, as `prefix`),
    the others go through the policy, the last one's own prediction excepted. 0 <= decode_from < scored_from < N.
    Raises PoolFullError where `pool` has no room."""
    assert 0 <= decode_from < scored_from < len(tokens)
    prefix = prefix or prefill_layers(adapter, tokens[:decode_from])
    return _Pass(adapter, policy, tokens, decode_from, prefix, observe, pool).run(scored_from)


class _Pass:
    """The decoded positions of one text on their way through the layers."""

    def __init__(
        self,
        adapter: ModelAdapter,
        policy: Policy,
        tokens: Sequence[int],
        decode_from: int,
        prefix: Prefix,
        observe: Observer | None,
        pool: PoolSettings,
    ) -> None:
        self.adapter, self.policy, self.prefix, self.observe = adapter, policy, prefix, observe
        self.geometry, self.pool = adapter.geometry, pool
        self.format = make_kv_format(pool.kv_cache_dtype, adapter.dtype, adapter.geometry.head_dim)
        self.ids = torch.tensor(tokens, device=adapter.device)
        self.start, self.stop = decode_from, len(tokens) - 1
        self.positions = torch.arange(self.stop, device=adapter.device)
        self.trace = Trace(self.geometry.layers, missed_every=1)
        for _ in range(self.start, self.stop):
            self.trace.begin_step()
        self.trace.missed = [(t, [0.0] * self.geometry.layers) for t in range(self.stop - self.start)]
        self.output_error: dict[int, float] = {}
        self._keys: KeyReader = lambda layer, slots: torch.empty(0)
        self.state: PolicyState = policy.new_state(lambda layer, slots: self._keys(layer, slots))

    def run(self, scored_from: int) -> LayerwiseScore:
        """All layers, then the head."""
        x = self.adapter.embed(self.ids[self.start : self.stop], self.positions[self.start :])
        guess: torch.Tensor | None = None
        for layer in range(self.geometry.layers):
            x, guess = self._layer(layer, x, guess)
        targets = self.ids[scored_from:]
        logprobs = torch.log_softmax(self.adapter.logits(x[scored_from - 1 - self.start :]), dim=-1)
        values = logprobs.gather(1, targets[:, None])[:, 0]
        greedy = values == logprobs.amax(1)
        dense = self.policy.dense_layers
        return LayerwiseScore(values.tolist(), greedy.tolist(), self.trace, self.output_error, dense)

    def _layer(
        self, layer: int, x: torch.Tensor, guess: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x `[T, D]` -> (layer's output `[T, D]`, the next layer's speculated queries `[H, T, d]`)."""
        adapter, prefix = self.adapter, self.prefix
        attention_input = adapter.attention_input(layer, x)
        q, k, v = adapter.qkv(layer, attention_input, self.positions[self.start :])
        if self.start:
            if layer not in self.policy.dense_layers:
                self.state.on_queries(layer, prefix.q[layer], prefix.k[layer], 0)
                self.state.on_keys(layer, prefix.k[layer], 0)
                self.state.on_values(layer, prefix.v[layer], 0)
            k, v = torch.cat((prefix.k[layer], k), 1), torch.cat((prefix.v[layer], v), 1)
        out = self._decoded(layer, q, k, v, guess)
        residual = adapter.after_attention(layer, x, out.transpose(0, 1).flatten(1))
        upcoming = self._speculate(layer + 1, x, attention_input, residual)
        return adapter.mlp(layer, residual), upcoming

    def _speculate(
        self, layer: int, x: torch.Tensor, attention_input: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """What layer `layer` selects with, from the layer before; None where it takes its true query."""
        if layer == self.geometry.layers or layer in self.policy.dense_layers or self.policy.query_source == "query":
            return None
        adapter, at = self.adapter, self.positions[self.start :]
        guess = guessed_input(adapter, layer, self.policy.query_source, x, attention_input, residual)
        return adapter.query(layer, self.policy.correct_guess(layer, guess), at)

    def _decoded(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, guess: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention `[H, T, d]` of the decoded positions' true queries q `[H, T, d]`, each over its selection."""
        at = range(self.start, self.stop)
        ago = self.positions[self.start :, None] - self.positions
        shown = torch.tensor([self.geometry.window_at(layer, t) or self.stop for t in at], device=ago.device)
        causal = (ago >= 0) & (ago < shown[:, None])
        stored = KVPart(k, v)
        if not self.format.exact:
            stored = KVPart(*(self.format.decode(self.format.encode(rows)) for rows in (k, v)))
        rows = _Rows(KVPart(k, v), stored, causal)
        chosen = None if layer in self.policy.dense_layers else q if guess is None else guess
        self._walk(layer, q, rows, chosen)
        out = self._attend(layer, q, rows)
        if self.observe is not None:
            scale = self.geometry.scales[layer]
            self.observe(LayerView(layer, scale, q, chosen, k, v, rows.attended, causal))
        return out

    def _walk(self, layer: int, q: torch.Tensor, rows: _Rows, chosen: torch.Tensor | None) -> None:
        """Enters in `rows` what each decoded position attends to, asked of the policy in order; chosen `[H, T, d]` is
        what it selects with, None in a dense layer."""
        slots = LayerSlots(
            self.geometry, layer, self.adapter.dtype, self.pool, self.policy, self.start, self.adapter.device
        )
        self._keys = lambda _, at: rows.stored.k[:, slots.tokens(at)]
        for t in range(q.shape[1]):
            token = self.start + t
            moved = slots.enter(token)
            visible = slots.visible
            resident = torch.cat((slots.tokens(visible.sinks), slots.tokens(visible.recent)))
            rows.resident[t, resident] = True
            count = len(visible.candidates)
            if chosen is None:
                rows.attended[:, t, slots.tokens(visible.all)] = True
            else:
                if moved is not None:
                    self.state.on_moved(layer, *moved)
                self.state.on_keys(layer, rows.exact.k[:, token : token + 1], slots.newest)
                self.state.on_values(layer, rows.exact.v[:, token : token + 1], slots.newest)
                selected = self._select(layer, q[:, t], chosen[:, t], visible, slots)
                rows.tails.append(self.state.tail(layer, q[:, t], visible, Selection(selected)))
                count = selected.shape[1]
                rows.attended[:, t, resident] = True
                rows.attended[:, t].scatter_(1, slots.tokens(selected), True)
                self._learn(layer, q[:, t], rows, resident, selected, visible, slots)
            context = len(visible.all)
            self.trace.fetched[t][layer] = count / context
            self.trace.attended[t][layer] = (visible.resident + count) / context

    def _select(
        self, layer: int, q: torch.Tensor, guess: torch.Tensor, visible: Visible, slots: LayerSlots
    ) -> torch.Tensor:
        """SlotTable `[Hkv, n]` of one position: selected with `guess` `[H, d]`, and repaired with the true query q."""
        selection = self.state.select(layer, guess, visible).known()
        slots.selected(selection.tokens)
        extra = self.state.repair(layer, q, visible, selection)
        return selection.tokens if extra is None else torch.cat((selection.tokens, extra.tokens), 1)

    def _learn(
        self,
        layer: int,
        q: torch.Tensor,
        rows: _Rows,
        resident: torch.Tensor,
        selected: torch.Tensor,
        visible: Visible,
        slots: LayerSlots,
    ) -> None:
        """Tells the policy the attention weights of the position's query q `[H, d]`, if it wants them."""
        if not self.policy.wants_weights:
            return
        index = slots.tokens(selected).unsqueeze(-1).expand(-1, -1, q.shape[-1])
        fetched = KVPart(rows.stored.k.gather(1, index), rows.stored.v.gather(1, index))
        parts = [KVPart(rows.exact.k[:, resident], rows.exact.v[:, resident]), fetched]
        scale, softcap = self.geometry.scales[layer], self.geometry.softcap
        lse = attend(q, parts, scale, softcap)[1]
        self.state.on_attended(layer, attended_tokens(visible, selected), group_weights(q, parts, scale, lse, softcap))

    def _attend(self, layer: int, q: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Attention over what is attended: resident rows as they are, others as they are stored. In selecting layers
        also the missed mass (of all tokens so far, those included that the pool has lost) and the output error."""
        heads, _, d = q.shape
        out = torch.empty_like(q)
        error = norm = 0.0
        dense, softcap, sinks = layer in self.policy.dense_layers, self.geometry.softcap, self.adapter.sinks(layer)
        sinks = None if sinks is None else sinks.view(len(rows.exact.k), -1, 1)
        for begin in range(0, q.shape[1], BLOCK):
            block = slice(begin, begin + BLOCK)
            grouped = q[:, block].reshape(len(rows.exact.k), -1, *q[:, block].shape[1:]) * self.geometry.scales[layer]
            scores = _scores(grouped, rows.exact.k, softcap).masked_fill_(~rows.causal[block], -math.inf)
            chosen = self._chosen_scores(grouped, scores, rows, block)
            chosen.masked_fill_(~rows.attended[:, block].unsqueeze(1), -math.inf)
            mine = give_to_sinks(*rows.join_tails(self._mix(chosen.softmax(-1), rows, block), chosen, block), sinks)
            out[:, block] = mine.reshape(heads, -1, d)
            if dense:
                continue
            exact = scores.softmax(-1).to(q.dtype) @ rows.exact.v.unsqueeze(1)
            exact = give_to_sinks(exact, scores.logsumexp(-1), sinks)
            error += float((mine - exact).norm(dim=-1).sum())
            norm += float(exact.norm(dim=-1).sum())
            caught = (chosen.logsumexp(-1) - scores.logsumexp(-1)).exp().mean((0, 1))
            for t, mass in enumerate(caught.tolist(), start=begin):
                self.trace.missed[t][1][layer] = max(0.0, 1.0 - mass)
        if norm:
            self.output_error[layer] = error / norm
        return out

    def _chosen_scores(self, q: torch.Tensor, scores: torch.Tensor, rows: _Rows, block: slice) -> torch.Tensor:
        """A copy of scores `[Hkv, G, T, N]` with those of rows that are not resident as the stored keys give them."""
        if self.format.exact:
            return scores.clone()
        return torch.where(rows.resident[block], scores, _scores(q, rows.stored.k, self.geometry.softcap))

    def _mix(self, weights: torch.Tensor, rows: _Rows, block: slice) -> torch.Tensor:
        """Values `[Hkv, G, T, d]` weighted by `[Hkv, G, T, N]`."""
        weights = weights.to(rows.exact.v.dtype)
        if self.format.exact:
            return weights @ rows.exact.v.unsqueeze(1)
        resident = rows.resident[block]
        own, others = weights.masked_fill(~resident, 0), weights.masked_fill(resident, 0)
        return own @ rows.exact.v.unsqueeze(1) + others @ rows.stored.v.unsqueeze(1)


def _scores(q: torch.Tensor, k: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Scores `[Hkv, G, T, N]`, float32 at least, of scaled queries q `[Hkv, G, T, d]` with k `[Hkv, N, d]`, capped
    where there is a softcap."""
    scores = q @ k.transpose(1, 2).unsqueeze(1)
    return capped(scores.to(torch.promote_types(scores.dtype, torch.float32)), softcap)


class _Rows:
    """One layer's K and V `[Hkv, N, d]` as they are and as they are stored; bool: causal `[T, N]`, what the model
    itself sees; attended `[Hkv, T, N]` and resident `[T, N]`, filled position by position, and so are the policy's
    estimates of what it leaves out, if it makes any."""

    def __init__(self, exact: KVPart, stored: KVPart, causal: torch.Tensor) -> None:
        self.exact, self.stored, self.causal = exact, stored, causal
        self.attended = torch.zeros(len(exact.k), *causal.shape, dtype=torch.bool, device=causal.device)
        self.resident = torch.zeros_like(causal)
        self.tails: list[tuple[torch.Tensor, torch.Tensor] | None] = []

    def join_tails(self, out: torch.Tensor, scores: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over attended rows and tails `[Hkv, G, T, d]` of the positions in `block` and its log-sum-exp
        `[Hkv, G, T]`, from the attention `out` over the attended rows alone and their scores `[Hkv, G, T, N]`, -inf
        elsewhere."""
        tails = self.tails[block]
        made = next((tail for tail in tails if tail is not None), None)
        exact_lse = scores.logsumexp(-1)
        if made is None:
            return out, exact_lse
        nothing = (torch.zeros_like(made[0]), torch.full_like(made[1], -math.inf))  # where there are no candidates
        estimate, lse = (torch.stack(part, 1) for part in zip(*(tail or nothing for tail in tails), strict=True))
        return join_tail(out, exact_lse, estimate.view_as(out), lse.view_as(exact_lse))
