"""Test custom policies, which are classes with one method, on single sequences, in batches and in CUDA graphs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.cuda_cells import GRAPHS, captured_graphs
from support.cuda_simulator import Lazy, simulated
from support.outputs import completed
from support.select_models import CPU, as_sets, geometry, no_keys, pass_keys, tokens
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.core import VisibleTokens
from offload_rt.policies import registry
from offload_rt.policies.options import BudgetOptions
from offload_rt.policies.registry import memory_demand, register_policy
from offload_rt.policies.scorer import ScorerPolicy, TokenLists

OPTIONS: dict[str, Any] = {"budget": 0.4, "sinks": 2, "recent": 8, "dense_layers": (0,)}


class LowNorm(ScorerPolicy[BudgetOptions]):
    """Policy that selects keys with a small norm.

    See Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression".
    """

    name = "low-norm"

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        return -keys.entries.norm(dim=-1)


class BestQuery(ScorerPolicy[BudgetOptions]):
    name = "best-query"

    def score(self, layer: int, queries: torch.Tensor, keys: TokenLists) -> torch.Tensor:
        return torch.bmm(queries, keys.entries.to(queries.dtype).transpose(1, 2)).amax(1)


CUSTOM_POLICIES = {"low-norm": LowNorm, "best-query": BestQuery}


@pytest.fixture(autouse=True)
def register_custom_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for name, policy in CUSTOM_POLICIES.items():
        register_policy(name, f"{__name__}:{policy.__name__}")(BudgetOptions)


@pytest.mark.parametrize("name", CUSTOM_POLICIES)
@pytest.mark.parametrize("group", [1, 4])
def test_tokens_with_the_largest_scores_are_selected_within_the_budget(name: str, group: int) -> None:
    shape = geometry(group=group)
    q, k = tokens(shape, 100)
    policy = CUSTOM_POLICIES[name](BudgetOptions(**OPTIONS | {"dense_layers": ()}), shape, CPU, torch.float64)
    state = policy.new_state(no_keys)
    visible = VisibleTokens.of(100, sinks=2, recent=8, window=None)
    for layer in range(shape.layers):
        pass_keys(state, layer, k[layer, :, :90], 0)
        pass_keys(state, layer, k[layer, :, 90:], 90)
        scores = -k[layer].norm(dim=-1)
        if name == "best-query":
            scores = torch.einsum("hgd,hnd->hgn", q[layer, :, 0].view(2, group, -1), k[layer]).amax(1)
        best = scores[:, 2:92].topk(30).indices + 2  # 40 tokens, of which 10 are resident
        assert as_sets(state.select(layer, q[layer, :, 0], visible).tokens) == as_sets(best)
    assert state.device_bytes >= shape.kv_bytes(100, torch.float64) // 2


def generate(device: str, name: str, head_dim: int, **settings: Any) -> tuple[list[list[int]], Any]:
    """Return the greedy tokens and captured CUDA graphs of a batch of four requests that crosses a block boundary."""
    model: Any = tiny_model("llama", num_hidden_layers=2, head_dim=head_dim).to(device)
    settings = {"host_memory": "8MiB", "missed_mass_every": 0, "device": device} | settings
    llm = LLM(model, policy=name, policy_options=OPTIONS, **settings)
    prompts = [tiny_prompt(length, seed=length) for length in (59, 60, 31, 45)]
    outputs = completed(llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0)))
    llm.runner.check_integrity()
    assert all(output.stats.exact_fraction < 0.8 for output in outputs)
    return [output.token_ids for output in outputs], captured_graphs(llm)


def test_custom_policy_is_batched_and_captured_in_cuda_graphs() -> None:
    expected, no_graphs = generate("cpu", "best-query", 16)  # first, because the first start verifies the model
    with simulated(Lazy()):
        tokens, graphs = generate("cuda", "best-query", 16, **GRAPHS)
    assert tokens == expected and no_graphs is None and graphs is not None and set(graphs) >= {(4, 64), (4, 128)}


def test_policy_of_the_documentation_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[3] / "docs" / "pages" / "extending.md"
    snippet = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[0]
    module = ModuleType("my_policy")
    monkeypatch.setitem(sys.modules, "my_policy", module)
    registry._registered.pop("low-norm")
    exec(compile(snippet, str(page), "exec"), vars(module))
    assert capsys.readouterr().out.strip()


def test_memory_is_planned_for_stored_entries() -> None:
    shape = geometry(layers=3, head_dim=64)
    demand = memory_demand("low-norm", OPTIONS, shape, torch.bfloat16)
    assert demand.scoring_bytes(2, 1000) == 2 * shape.kv_bytes(1000, torch.bfloat16) // 3 // 2
    assert (demand.fetched_fraction, demand.resident, demand.dense) == (0.4, 10, (0,))
