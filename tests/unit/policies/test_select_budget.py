"""Compare the policies that have a budget (oracle, streaming, h2o, quest) with reference implementations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.select_models import CPU, as_sets, geometry, no_keys, pass_keys, tokens
from support.tiny_models import tiny_model

from offload_rt import LLM
from offload_rt.core import ModelGeometry, VisibleTokens
from offload_rt.errors import ConfigError
from offload_rt.policies import h2o
from offload_rt.policies.h2o import H2O
from offload_rt.policies.options import BudgetOptions, InfiniGenOptions, QuestOptions
from offload_rt.policies.oracle import Oracle
from offload_rt.policies.quest import Quest
from offload_rt.policies.scorer import ScorerState
from offload_rt.policies.streaming import Streaming

PROMPT = 90
TOTAL = 110
OPTIONS = {"sinks": 3, "recent": 8, "dense_layers": ()}
BUDGETS = [0.05, 0.2, 0.45, 1.0]


def budget_options(budget: float) -> BudgetOptions:
    return BudgetOptions(budget=budget, **OPTIONS)  # type: ignore[arg-type]


def selected_count(budget: float, visible: VisibleTokens) -> int:
    """Return the number of tokens to select, which is the budget minus the resident tokens."""
    total = math.floor(budget * (visible.all.stop - visible.all.start) + 1e-9)
    return min(len(visible.candidates), max(0, total - len(visible.sinks) - len(visible.recent)))


def visible_tokens(length: int) -> VisibleTokens:
    return VisibleTokens.of(length, sinks=3, recent=8, window=None)


def attention_weights(
    shape: ModelGeometry, layer: int, query: torch.Tensor, k: torch.Tensor, visible: range
) -> torch.Tensor:
    """Return softmax weights `[H, N]` of queries `[H, d]` over the `visible` tokens. All other weights are 0."""
    out = torch.zeros(shape.heads, k.shape[2], dtype=torch.float64)
    for head in range(shape.heads):
        scores = k[layer, head // shape.group, visible.start : visible.stop] @ query[head] * shape.scales[layer]
        if shape.softcap is not None:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        out[head, visible.start : visible.stop] = scores.softmax(0)
    return out


def top_tokens(values: torch.Tensor, candidates: range, n: int) -> set[int]:
    """Return the n `candidates` with the largest values `[N]`. In a tie, the lower token wins."""
    return set(sorted(candidates, key=lambda t: (-float(values[t]), t))[:n])


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("group", "softcap"), [(1, None), (4, None), (4, 1.0)])
def test_oracle_selects_the_tokens_with_the_largest_weights(
    group: int, softcap: float | None, budget: float, device: torch.device
) -> None:
    shape = replace(geometry(group=group), softcap=softcap)
    q, k = tokens(shape, TOTAL)
    state = Oracle(budget_options(budget), shape, device, torch.float64).new_state(
        lambda layer, wanted: k[layer, :, wanted.start : wanted.stop]
    )
    visible = visible_tokens(TOTAL)
    for layer in range(shape.layers):
        weights = attention_weights(shape, layer, q[layer, :, -1], k, visible.candidates).view(2, group, -1).amax(1)
        expected = [top_tokens(row, visible.candidates, selected_count(budget, visible)) for row in weights]
        assert as_sets(state.select(layer, q[layer, :, -1].to(device), visible).tokens) == expected


@pytest.mark.parametrize("budget", BUDGETS)
def test_streaming_selects_the_newest_tokens(budget: float, device: torch.device) -> None:
    shape = geometry()
    state = Streaming(budget_options(budget), shape, device, torch.float64).new_state(no_keys)
    pass_keys(state, 0, torch.zeros(2, TOTAL, 16, device=device), 0)
    visible = visible_tokens(TOTAL)
    n = selected_count(budget, visible)
    expected = set(range(TOTAL - 8 - n, TOTAL - 8))
    assert as_sets(state.select(0, torch.zeros(2, 16, device=device), visible).tokens) == [expected] * 2


def quest_state(budget: float, shape: ModelGeometry, k: torch.Tensor, page: int) -> ScorerState:
    quest_options = QuestOptions(budget=budget, page=page, **OPTIONS)  # type: ignore[arg-type]
    state = Quest(quest_options, shape, k.device, torch.float64).new_state(no_keys)
    for layer in range(shape.layers):
        for start, stop in ((0, 1), (1, PROMPT), *((t, t + 1) for t in range(PROMPT, k.shape[2]))):
            pass_keys(state, layer, k[layer, :, start:stop], start)
    state.check_integrity()
    return state


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("group", "page"), [(1, 16), (4, 16), (2, 5)])
def test_quest_selects_the_pages_with_the_largest_bounds(
    group: int, page: int, budget: float, device: torch.device
) -> None:
    shape = geometry(group=group)
    q, k = tokens(shape, TOTAL)
    state = quest_state(budget, shape, k.to(device), page)
    visible = visible_tokens(TOTAL)
    for layer in range(shape.layers):
        pages = range(visible.candidates.start // page, -(-visible.candidates.stop // page))
        bounds = torch.full((shape.heads, TOTAL // page + 1), -math.inf, dtype=torch.float64)
        for head in range(shape.heads):
            for index in pages:
                keys = k[layer, head // group, index * page : (index + 1) * page]
                query = q[layer, head, -1]
                products = torch.maximum(query * keys.amin(0), query * keys.amax(0))
                bounds[head, index] = products.sum() * shape.scales[layer]
        ranks = bounds.softmax(1).view(2, group, -1).amax(1).repeat_interleave(page, 1)
        expected = [top_tokens(row, visible.candidates, selected_count(budget, visible)) for row in ranks]
        assert as_sets(state.select(layer, q[layer, :, -1].to(device), visible).tokens) == expected


def test_quest_forks_are_independent_and_small() -> None:
    shape = geometry(head_dim=64, layers=1)
    _, k = tokens(shape, 2048)
    state = Quest(QuestOptions(dense_layers=()), shape, CPU, torch.bfloat16).new_state(no_keys)
    pass_keys(state, 0, k[0].bfloat16(), 0)
    # Two bounds per page of 16 keys and values: 1/16 of the KV, plus room to grow.
    assert 1 / 16 <= state.device_bytes / shape.kv_bytes(2048, torch.bfloat16) <= 1.5 / 16
    fork = state.fork(no_keys)
    pass_keys(fork, 0, 100 * k[0, :, :1].bfloat16(), 2048)
    pass_keys(state, 0, -100 * k[0, :, :1].bfloat16(), 2048)
    for owner in (state, fork):
        owner.check_integrity()
    own, forked = (-owner._entries.data(0)[:, 128, 64:] for owner in (state, fork))
    assert torch.equal(forked, (100 * k[0, :, 0].bfloat16())) and torch.equal(own, -forked)


class ReferenceH2O:
    """Reference implementation of h2o for one layer. It handles one KV head at a time."""

    def __init__(self, shape: ModelGeometry, budget: float, layer: int) -> None:
        self.shape, self.budget, self.layer = shape, budget, layer
        self.drawn = [[0.0] * TOTAL for _ in range(shape.kv_heads)]
        self.alive = [set(range(TOTAL)) for _ in range(shape.kv_heads)]

    def prompt(self, q: torch.Tensor, k: torch.Tensor) -> None:
        for token in range(PROMPT):
            weights = attention_weights(self.shape, self.layer, q[self.layer, :, token], k, range(token + 1))
            for head, row in enumerate(weights):
                for seen, weight in enumerate(row.tolist()):
                    self.drawn[head // self.shape.group][seen] += weight

    def select(self, visible: VisibleTokens) -> list[set[int]]:
        n = selected_count(self.budget, visible)
        half = math.floor(self.budget / 2 * (visible.all.stop - visible.all.start) + 1e-9)
        local = min(n, max(0, half - len(visible.recent)))
        newest = set(list(visible.candidates)[len(visible.candidates) - local :])
        chosen = []
        for drawn, alive in zip(self.drawn, self.alive, strict=True):
            older = [t for t in visible.candidates if t in alive and t not in newest]
            heavy = sorted(older, key=lambda t: (-drawn[t], t))[: n - local]
            chosen.append(newest | set(heavy))
            alive -= set(visible.candidates) - chosen[-1]
        return chosen


def filled_h2o(shape: ModelGeometry, budget: float, q: torch.Tensor, k: torch.Tensor) -> ScorerState:
    state = H2O(budget_options(budget), shape, k.device, torch.float64).new_state(no_keys)
    for layer in range(shape.layers):
        for start, stop in ((0, 40), (40, PROMPT)):
            state.on_queries(layer, q[layer, :, start:stop], k[layer, :, :PROMPT], start)
        pass_keys(state, layer, k[layer, :, :PROMPT], 0)
    state.check_integrity()
    return state


@pytest.mark.sampled
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("group", "softcap"), [(1, None), (4, 1.0)])
def test_h2o_selects_heavy_hitters_and_never_restores_tokens(
    group: int, softcap: float | None, budget: float, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(h2o, "MAX_PREFILL_WEIGHTS", 700)  # several blocks of queries per prefill chunk
    shape = replace(geometry(group=group), softcap=softcap)
    q, k = tokens(shape, TOTAL)
    state = filled_h2o(shape, budget, q.to(device), k.to(device))
    for layer in range(shape.layers):
        reference = ReferenceH2O(shape, budget, layer)
        reference.prompt(q, k)
        dropped: list[set[int]] = [set(), set()]
        for length in range(PROMPT + 1, TOTAL + 1):
            visible = visible_tokens(length)
            pass_keys(state, layer, k[layer, :, length - 1 : length].to(device), length - 1)
            chosen = as_sets(state.select(layer, q[layer, :, 0].to(device), visible).tokens)
            assert chosen == reference.select(visible)
            assert not any(a & b for a, b in zip(chosen, dropped, strict=True))
            dropped = [earlier | (set(visible.candidates) - row) for earlier, row in zip(dropped, chosen, strict=True)]
            attended = torch.tensor([sorted(row | set(visible.sinks) | set(visible.recent)) for row in chosen])
            weights = torch.rand(attended.shape, generator=torch.Generator().manual_seed(length))
            state.on_attended(layer, visible, attended.to(device), weights.to(device))
            for head in range(2):
                for token, weight in zip(attended[head].tolist(), weights[head].tolist(), strict=True):
                    reference.drawn[head][token] += weight
        state.check_integrity()


def test_h2o_forks_are_independent() -> None:
    shape = geometry()
    q, k = tokens(shape, TOTAL)
    state = filled_h2o(shape, 0.3, q, k)
    fork = state.fork(no_keys)
    twin = filled_h2o(shape, 0.3, q, k)
    last = torch.arange(20, 40).expand(2, -1)
    for owner in (state, twin):
        owner.on_attended(
            0, VisibleTokens.of(PROMPT, sinks=PROMPT, recent=1, window=None), last, torch.full((2, 20), 50.0)
        )
    visible = visible_tokens(PROMPT)
    expected = as_sets(twin.select(0, q[0, :, 0], visible).tokens)
    unchanged = as_sets(filled_h2o(shape, 0.3, q, k).select(0, q[0, :, 0], visible).tokens)
    assert as_sets(state.select(0, q[0, :, 0], visible).tokens) == expected != unchanged
    assert as_sets(fork.select(0, q[0, :, 0], visible).tokens) == unchanged


def test_options_that_do_not_fit_the_model_are_errors() -> None:
    with pytest.raises(ConfigError, match="layers 0 to 1"):
        Oracle(BudgetOptions(dense_layers=(5,)), geometry(), CPU, torch.float32)
    for policy_options in (QuestOptions(budget=0.68), InfiniGenOptions(budget=0.68, approximate_kv="off")):
        policy_options.check_context(102)
        with pytest.raises(
            ConfigError, match=r"is 68 tokens, .* nothing would be selected; set a budget of at least 69 t"
        ):
            policy_options.check_context(101)
    InfiniGenOptions(budget=1e-4).check_context(100)
    with pytest.raises(ConfigError, match="nothing would be selected"):
        LLM(tiny_model("llama", max_position_embeddings=512), policy="oracle", policy_options={"budget": 0.01})
    for invalid in ({"budget": 0.0}, {"budget": 1.5}, {"recent": 0}, {"sinks": -1}, {"page": 0}):
        with pytest.raises(ConfigError, match=next(iter(invalid))):
            QuestOptions(**invalid)  # type: ignore[arg-type]
