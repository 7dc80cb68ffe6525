"""Layer-by-layer teacher-forced scoring: all decoded positions of a text at once, each with its own selection.

The result of token t at layer l depends only on the layers below l and on keys up to t. Layers can therefore be
computed one after another for all positions. This also holds for a bounded pool, whose victims are chosen per layer,
and for quantized KV. Results equal those of `LLM.score` up to rounding (covered by a test), at a fraction of the time.
An observer receives the full attention data of each layer, as needed for the figures of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...core import KVPart, Selection, VisibleTokens
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
"""Number of positions per attention computation; bounds the memory for attention weights."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """Data of one layer and one text for an observer, with T decoded positions and N tokens.

    Attributes:
        layer: Layer index.
        scale: Scale of the attention scores.
        query: True queries `[H, T, d]`.
        guess: Queries used for selection `[H, T, d]`; None in a dense layer.
        k: Keys `[Hkv, N, d]`.
        v: Values `[Hkv, N, d]`.
        attended: Exactly attended tokens, bool `[Hkv, T, N]`.
        causal: Attention mask of the model (causal and sliding window), bool `[T, N]`.
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
    """Layer-by-layer scores of one text.

    Attributes:
        logprobs: Natural log-probability of each scored token.
        is_greedy: Whether each scored token is the most probable one.
        trace: Trace of the decoded positions, with the missed attention mass of every step.
        output_error: Relative error |out - exact| / |exact| of the attention output by sparse layer.
        dense_layers: Layers without selection.
    """

    logprobs: list[float]
    is_greedy: list[bool]
    trace: Trace
    output_error: dict[int, float]
    dense_layers: frozenset[int]

    @property
    def fractions(self) -> Fractions:
        """Attended and fetched fractions over all decoded positions."""
        return Fractions.of(self.trace, self.dense_layers)

    @property
    def missed(self) -> tuple[float | None, float | None]:
        """Missed attention mass: (mean over layers, mean of the worst layer)."""
        return layer_means(self.trace, self.dense_layers)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Exact prefill of the first m tokens of a text: q `[H, m, d]`, k and v `[Hkv, m, d]` of each layer.

    The lists are empty if m = 0. The prefill is independent of the policy and shared by all compared policies.
    """

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(t.nbytes for part in (self.q, self.k, self.v) for t in part)


@torch.inference_mode()
def prefill_layers(adapter: ModelAdapter, tokens: Sequence[int]) -> Prefix:
    """Prefill `tokens` (possibly empty) with full attention."""
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
    """Score tokens [scored_from, N) of `tokens`, with 0 <= decode_from < scored_from < N.

    Args:
        adapter: Model.
        policy: Policy of the decoded positions [decode_from, N - 1).
        tokens: Token ids of the text.
        decode_from: Number of tokens prefilled with full attention.
        scored_from: Index of the first scored token.
        observe: Called with the `LayerView` of every layer.
        prefix: Exact prefill of the first `decode_from` tokens, if already computed.
        pool: Pool settings.

    Raises:
        PoolFullError: If the tokens do not fit into the pool.
    """
    assert 0 <= decode_from < scored_from < len(tokens)
    prefix = prefix or prefill_layers(adapter, tokens[:decode_from])
    return _Pass(adapter, policy, tokens, decode_from, prefix, observe, pool).run(scored_from)


class _Pass:
    """One pass of the decoded positions of a text through all layers."""

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
        """Compute all layers and score the tokens from `scored_from` on."""
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
        """Map x `[T, D]` to the layer output `[T, D]` and the speculated queries `[H, T, d]` of the next layer."""
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
        """Speculate the queries of `layer` from the previous layer. None if `layer` is dense or uses its true query."""
        if layer == self.geometry.layers or layer in self.policy.dense_layers or self.policy.query_source == "query":
            return None
        adapter, at = self.adapter, self.positions[self.start :]
        guess = guessed_input(adapter, layer, self.policy.query_source, x, attention_input, residual)
        return adapter.query(layer, self.policy.correct_guess(layer, guess), at)

    def _decoded(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, guess: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the attention output `[H, T, d]` of the true queries q `[H, T, d]`, each over its own selection."""
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
        """Record in `rows` the attended tokens of each decoded position, in order.

        `chosen` `[H, T, d]` are the queries used for selection; None in a dense layer.
        """
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
        self, layer: int, q: torch.Tensor, guess: torch.Tensor, visible: VisibleTokens, slots: LayerSlots
    ) -> torch.Tensor:
        """Select slots `[Hkv, n]` for one position with `guess` `[H, d]`; repair with the true query q `[H, d]`."""
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
        visible: VisibleTokens,
        slots: LayerSlots,
    ) -> None:
        """Report the attention weights of q `[H, d]` to the policy if `wants_weights` is set."""
        if not self.policy.wants_weights:
            return
        index = slots.tokens(selected).unsqueeze(-1).expand(-1, -1, q.shape[-1])
        fetched = KVPart(rows.stored.k.gather(1, index), rows.stored.v.gather(1, index))
        parts = [KVPart(rows.exact.k[:, resident], rows.exact.v[:, resident]), fetched]
        scale, softcap = self.geometry.scales[layer], self.geometry.softcap
        lse = attend(q, parts, scale, softcap)[1]
        self.state.on_attended(layer, attended_tokens(visible, selected), group_weights(q, parts, scale, lse, softcap))

    def _attend(self, layer: int, q: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Compute attention over the attended tokens. In sparse layers, also record missed mass and output error.

        Resident tokens use their exact KV, other tokens their stored KV. Missed mass is relative to all tokens so far,
        including evicted ones.
        """
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
        """Copy scores `[Hkv, G, T, N]`, replacing those of non-resident tokens by scores of the stored keys."""
        if self.format.exact:
            return scores.clone()
        return torch.where(rows.resident[block], scores, _scores(q, rows.stored.k, self.geometry.softcap))

    def _mix(self, weights: torch.Tensor, rows: _Rows, block: slice) -> torch.Tensor:
        """Weight the values by `weights` `[Hkv, G, T, N]`. Returns `[Hkv, G, T, d]`."""
        weights = weights.to(rows.exact.v.dtype)
        if self.format.exact:
            return weights @ rows.exact.v.unsqueeze(1)
        resident = rows.resident[block]
        own, others = weights.masked_fill(~resident, 0), weights.masked_fill(resident, 0)
        return own @ rows.exact.v.unsqueeze(1) + others @ rows.stored.v.unsqueeze(1)


def _scores(q: torch.Tensor, k: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return the scores `[Hkv, G, T, N]` of scaled queries q `[Hkv, G, T, d]` and keys k `[Hkv, N, d]`.

    Scores are at least float32 and capped if `softcap` is set.
    """
    scores = q @ k.transpose(1, 2).unsqueeze(1)
    return capped(scores.to(torch.promote_types(scores.dtype, torch.float32)), softcap)


class _Rows:
    """KV of one layer with the attention masks of all decoded positions.

    Attributes:
        exact: K and V `[Hkv, N, d]` as computed.
        stored: K and V `[Hkv, N, d]` after the round trip through the storage format.
        causal: Attention mask of the model, bool `[T, N]`.
        attended: Attended tokens, bool `[Hkv, T, N]`, filled position by position.
        resident: Sink and recent tokens, bool `[T, N]`, filled position by position.
        tails: Approximate attention over the remaining candidates by position; None if the policy provides none.
    """

    def __init__(self, exact: KVPart, stored: KVPart, causal: torch.Tensor) -> None:
        self.exact, self.stored, self.causal = exact, stored, causal
        self.attended = torch.zeros(len(exact.k), *causal.shape, dtype=torch.bool, device=causal.device)
        self.resident = torch.zeros_like(causal)
        self.tails: list[tuple[torch.Tensor, torch.Tensor] | None] = []

    def join_tails(self, out: torch.Tensor, scores: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge the approximate attention of the positions in `block` into `out`.

        Args:
            out: Attention output over the attended tokens only.
            scores: Scores of the attended tokens `[Hkv, G, T, N]`, -inf elsewhere.
            block: Positions.

        Returns:
            Merged output `[Hkv, G, T, d]` and its log-sum-exp `[Hkv, G, T]`.
        """
        tails = self.tails[block]
        made = next((tail for tail in tails if tail is not None), None)
        exact_lse = scores.logsumexp(-1)
        if made is None:
            return out, exact_lse
        nothing = (torch.zeros_like(made[0]), torch.full_like(made[1], -math.inf))  # for positions without candidates
        estimate, lse = (torch.stack(part, 1) for part in zip(*(tail or nothing for tail in tails), strict=True))
        return join_tail(out, exact_lse, estimate.view_as(out), lse.view_as(exact_lse))
