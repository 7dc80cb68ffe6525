"""Compare the selection rules of other published systems with their definitions, for one sequence and for a batch."""

from __future__ import annotations

import importlib
import runpy
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.select_models import CPU, as_sets, geometry, no_keys, pass_keys, tokens
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.core import VisibleTokens
from offload_rt.eval.core.rival_options import LandmarkOptions, SnapKVOptions, register_rivals
from offload_rt.eval.core.variants import make_variants
from offload_rt.eval.quality.rivals import Landmarks, SnapKV
from offload_rt.policies import registry
from offload_rt.policies.base import PolicyState

register_rivals()

WINDOW: dict[str, Any] = {"budget": 0.4, "sinks": 2, "recent": 8, "dense_layers": ()}


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
def test_rivals_are_registered_only_by_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    for name in ("core.rival_options", "core.variants", "quality.rivals", "quality.comparison"):
        runpy.run_module(importlib.import_module(f"offload_rt.eval.{name}").__name__)
    assert not {"snapkv", "landmarks"} & {*registry.policy_names()}
    assert make_variants(["snapkv"], [0.1], [], [])[1].policy == "snapkv"


@pytest.mark.parametrize("group", [1, 4])
def test_landmarks_rank_blocks_by_their_mean_key(group: int) -> None:
    shape = geometry(group=group)
    q, k = tokens(shape, 100)
    policy = Landmarks(LandmarkOptions(**WINDOW), shape, CPU, torch.float64)
    state = policy.new_state(no_keys)
    pass_keys(state, 0, k[0], 0)
    visible = VisibleTokens.of(100, sinks=2, recent=8, window=None)  # candidates: tokens 2 to 91, 12 blocks
    blocks = [range(max(2, i * 8), min(92, i * 8 + 8)) for i in range(12)]
    means = torch.stack([k[0][:, block.start : block.stop].mean(1) for block in blocks], 1)
    queries = q[0, :, 0].view(2, group, -1) * shape.scales[0]
    ranks = torch.einsum("hgd,hnd->hgn", queries, means).log_softmax(-1).amax(1)
    for head, found in enumerate(as_sets(state.select(0, q[0, :, 0], visible).tokens)):
        order = [token for i in ranks[head].argsort(descending=True).tolist() for token in blocks[i]]
        assert found == set(order[:30])  # 40 tokens, of which 10 are resident


@pytest.mark.parametrize("last_chunk", [90, 40, 2])
def test_snapkv_keeps_tokens_attended_to_by_the_prompt_end(last_chunk: int) -> None:
    shape = geometry(group=2)
    q, k = tokens(shape, 100)
    options = SnapKVOptions(**WINDOW, observed=5, pooled=3)
    state: PolicyState = SnapKV(options, shape, CPU, torch.float64).new_state(no_keys)
    prompt, start = q[0, :, :90], 90 - last_chunk
    if start:
        state.on_queries(0, prompt[:, :start], k[0, :, :start], 0)
        state = state.fork(no_keys)
    state.on_queries(0, prompt[:, start:], k[0, :, :90], start)
    pass_keys(state, 0, k[0, :, 90:], 90)
    observed = prompt[:, 85:90].view(2, 2, 5, -1)
    scores = torch.einsum("hgmd,hnd->hgmn", observed * shape.scales[0], k[0, :, :90])
    later = torch.arange(90) > torch.arange(85, 90).unsqueeze(1)
    votes = scores.masked_fill(later, -torch.inf).softmax(-1).sum((1, 2))
    pooled = torch.stack([votes[:, max(0, i - 1) : i + 2].amax(1) for i in range(90)], 1)
    visible = VisibleTokens.of(100, sinks=2, recent=8, window=None)
    for head, found in enumerate(as_sets(state.select(0, q[0, :, 0], visible).tokens)):
        # Token 89 is next to generated tokens, and tokens 90 and 91 are generated. Pooled neighbours have equal votes.
        old = sorted(found - {89, 90, 91})
        assert len(old) == 27 and {89, 90, 91} < found
        assert pooled[head, old].sort().values.tolist() == pooled[head, 2:89].topk(27).values.sort().values.tolist()


@pytest.mark.parametrize("policy", ["landmarks", "snapkv"])
def test_batched_tokens_equal_those_of_single_requests(policy: str) -> None:
    llm = LLM(
        tiny_model("llama", num_hidden_layers=2, head_dim=32),
        policy=policy,
        policy_options=WINDOW | {"dense_layers": (0,)},
        host_memory="8MiB",
        missed_mass_every=0,
    )
    prompts = [tiny_prompt(length, seed=length) for length in (59, 60, 31, 45)]
    sampling = SamplingParams(max_tokens=10, temperature=0)
    together = [one.token_ids for one in completed(llm.generate(prompts, sampling))]
    assert together == [completed(llm.generate([prompt], sampling))[0].token_ids for prompt in prompts]
