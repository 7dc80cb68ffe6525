"""Compare memory requirements and printed tables with real runs."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.outputs import completed
from support.tiny_models import depth, tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.cli.tables import requirements_table, stats_table, summary_table
from offload_rt.config import EngineConfig
from offload_rt.core import BLOCK_SIZE
from offload_rt.kv_cache.pool import HostPool
from offload_rt.models.shape import load_shape
from offload_rt.outputs import Stats
from offload_rt.planning.device_plan import plan_for
from offload_rt.planning.memory_model import DeviceCosts, Requirements, SystemMemory, obstacles, requirements
from offload_rt.policies.options import FullOptions, InfiniGenOptions
from offload_rt.policies.registry import memory_demand

GIB = 2**30
PROMPT, NEW = 500, 40


def run(llm: LLM) -> Stats:
    return completed(llm.generate([tiny_prompt(PROMPT)], SamplingParams(max_tokens=NEW, temperature=0)))[0].stats


@pytest.fixture(scope="module")
def infinigen_stats(tmp_path_factory: pytest.TempPathFactory) -> Stats:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_RT_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run(LLM(tiny_model("llama"), policy_options={"preset": "rows", "scorer": "int4"}))


def render(table: object) -> str:
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def value_of(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.split("│")[1:2] and line.split("│")[1].strip() == name)
    return line.split("│")[2].strip()


def test_table_shows_the_statistics(infinigen_stats: Stats) -> None:
    text = render(stats_table(infinigen_stats))
    assert value_of(text, "prompt") == "500 tokens"
    assert value_of(text, "generated") == "40 tokens"
    assert value_of(text, "dense layers") == "0 of 3"
    assert value_of(text, "exact attention fraction") == f"{infinigen_stats.exact_fraction:.2%}"
    assert value_of(text, "fetched fraction") == f"{infinigen_stats.fetched_fraction:.2%}"
    assert infinigen_stats.missed_mass is not None
    assert value_of(text, "missed attention mass") == f"{infinigen_stats.missed_mass:.2%}"
    unmeasured = replace(infinigen_stats, missed_mass=None, missed_mass_worst_layer=None, dense_layers=(0, 1, 2))
    assert value_of(render(stats_table(unmeasured)), "missed attention mass") == "not measured"
    assert value_of(render(stats_table(unmeasured)), "dense layers") == "all 3"
    prefilled = replace(infinigen_stats, attended_by_step=[], exact_fraction=0.0)
    shown = value_of(render(summary_table(prefilled)), "exact attention fraction")
    assert shown == "100.00% of the context (prefill only)"
    verified = replace(infinigen_stats, exact_fraction=1.0)
    assert value_of(render(summary_table(verified)), "exact attention fraction") == "100.00% of the context"


def test_table_shows_usual_values_and_advice(infinigen_stats: Stats) -> None:
    high_mass = replace(infinigen_stats, missed_mass=0.26, approximate_bytes_device=0)
    assert "raise the budget" in value_of(render(stats_table(high_mass)), "too high")
    assert value_of(render(stats_table(replace(high_mass, missed_mass=0.04))), "usual range") == "below 10%"
    assert "not lost" in value_of(render(stats_table(replace(high_mass, approximate_bytes_device=1))), "usual range")
    assert "which is" not in render(stats_table(replace(high_mass, missed_mass=None)))


def test_table_shows_if_no_tokens_were_selected(infinigen_stats: Stats) -> None:
    # for 100 tokens, the budget is 20, and sinks and window together have 68
    options = {"budget": 0.2, "dense_layers": ()}
    llm = LLM(tiny_model("llama"), policy="streaming", policy_options=options)
    [done] = completed(llm.generate([tiny_prompt(100)], SamplingParams(max_tokens=4, temperature=0)))
    assert "no tokens selected" in value_of(render(stats_table(done.stats)), "in sparse layers")
    assert "selected" not in value_of(render(stats_table(infinigen_stats)), "in sparse layers")


# ----------------------------------------------------------------------------------------------------- requirements


def costs_of(name: str, dtype: torch.dtype, options: InfiniGenOptions | None) -> DeviceCosts:
    shape = load_shape(tiny_model(name, dtype=dtype, **depth(name, 4)))
    policy = "full" if options is None else "infinigen"
    return DeviceCosts(shape, memory_demand(policy, options or FullOptions(), shape.geometry, dtype), 512)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scorer", ["partial", "int4", "int2"])
def test_requirements_equal_the_memory_of_a_run(scorer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path))
    llm = LLM(
        tiny_model("qwen3", num_hidden_layers=4),
        policy_options={"preset": "rows", "scorer": scorer, "dense_layers": (1,)},
    )
    stats = run(llm)
    options = InfiniGenOptions.preset("rows", scorer=scorer, dense_layers=(1,))
    costs = costs_of("qwen3", torch.float32, options)
    needed = requirements(costs, llm.runner.model.weight_bytes, PROMPT + NEW)
    assert needed.kv_host == stats.kv_bytes_host
    assert needed.weights == stats.weight_bytes
    # Scoring keys grow by sixteenths, rounded up to 64 slots (256 tokens of int2). One layer at a time is held twice.
    layers = llm.geometry.layers
    assert stats.scoring_bytes_device <= costs.scoring(PROMPT + NEW) * (layers - 1) / layers
    assert costs.scoring(PROMPT + NEW) <= stats.scoring_bytes_device * 17 / 16 * (1 + 256 / PROMPT) * layers / (
        layers - 1
    )


@pytest.mark.parametrize(("policy", "options"), [("quest", {"page": 256}), ("infinigen", {"preset": "paper"})])
def test_scoring_keys_of_a_short_text_are_within_the_plan(
    policy: str, options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path))
    model = tiny_model("llama", num_hidden_layers=8, head_dim=128)
    llm = LLM(model, policy=policy, policy_options=options, host_memory="8MiB", verify="off")
    [done] = completed(llm.generate([tiny_prompt(20)], SamplingParams(max_tokens=2, temperature=0)))
    shape = load_shape(model)
    costs = DeviceCosts(shape, memory_demand(policy, options, shape.geometry, shape.dtype), 512)
    assert 0 < done.stats.scoring_bytes_device <= costs.scoring(22)


def test_plan_is_for_the_capacity_of_a_quantised_pool() -> None:
    shape = load_shape(tiny_model("llama", max_position_embeddings=1 << 17))
    config = EngineConfig(policy="full", device_memory="200MiB", host_memory="4MiB", kv_cache_dtype="int4")
    pool = HostPool(shape.geometry, shape.dtype, config.host_memory, kv_cache_dtype="int4")
    capacity = pool.limit_bytes // pool.block_bytes * BLOCK_SIZE
    assert capacity <= plan_for(config, shape).context < capacity + BLOCK_SIZE


def test_contexts_up_to_dense_until_are_fetched_entirely() -> None:
    shape = load_shape(tiny_model("llama"))
    options = {"dense_until": 500, "max_fraction": 0.1, "dense_layers": (1,)}
    whole, selecting = (
        DeviceCosts(shape, memory_demand("auto", given, shape.geometry, shape.dtype), 512)
        for given in (options, options | {"dense_until": 0})
    )
    tokens = (400, 600, 9000)
    # in longer contexts, the tokens that were fetched before selection began count too
    assert [whole.fetched(n, 0) for n in tokens] == [400, 500, 900]
    assert [selecting.fetched(n, 0) for n in tokens] == [40, 60, 900]
    assert whole.fetched(9000, 1) == 9000


def test_requirements_equal_values_computed_by_hand() -> None:
    full = costs_of("llama", torch.bfloat16, None)  # 4 layers, 2 KV heads of 32, hidden 64
    token = 2 * 2 * 32 * 2  # K and V of a token and layer in bfloat16
    staged = token + 8 * 8 * 2  # with token ids
    needed = requirements(full, 1000, 1000)
    assert needed.kv_per_token == 4 * token
    assert needed.kv_host == 4 * token * 16 * BLOCK_SIZE  # 1000 tokens take 16 blocks
    assert needed.resident == 4 * token
    assert needed.staging == (3 * 1000 + 1) * staged
    assert needed.device == 1000 + needed.scoring + needed.resident + max(
        needed.prefill, needed.staging + needed.decode
    )
    options = InfiniGenOptions.preset("rows", dense_layers=(), scorer="partial")
    sparse = requirements(costs_of("llama", torch.bfloat16, options), 1000, 1000)
    assert sparse.staging == (3 * 100 + 68) * staged
    assert (sparse.resident, sparse.working_set) == (68 * 4 * token, 0)
    stays = replace(costs_of("llama", torch.bfloat16, options), working_set=9)
    more = requirements(stays, 1000, 1000)
    assert more.working_set == 4 * (9 + 1) * (token + 2 * 8)  # 2 KV heads; a token id and a score for each KV entry
    assert (more.resident, more.device) == (sparse.resident, sparse.device + more.working_set)
    keys = 4 * 2 * 9 * 2 * 1000  # 30 % of 32 columns, rounded down to 9
    assert keys <= sparse.scoring - costs_of("llama", torch.bfloat16, options).fixed() <= keys * 5 / 4 * 1.35
    first = costs_of("llama", torch.bfloat16, InfiniGenOptions.preset("rows"))
    assert first.staging([1000]) == (2 * 1000 + 100 + 68) * staged
    assert first.h2d_bytes(1000) == (1000 + 3 * 100) * token


NEEDED = Requirements(
    context=10,
    kv_per_token=1,
    kv_host=4 * GIB,
    weights=2 * GIB,
    scoring=0,
    resident=0,
    working_set=0,
    staging=GIB,
    decode=0,
    prefill=0,
)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (SystemMemory(8 * GIB, 4 * GIB), []),
        (SystemMemory(8 * GIB, 3 * GIB), ["host pool"]),
        (SystemMemory(6 * GIB, 4 * GIB), ["shares it"]),
        (SystemMemory(6 * GIB, 4 * GIB, "GPU", 3 * GIB), []),
        (SystemMemory(6 * GIB, 4 * GIB, "GPU", 2 * GIB), ["GPU"]),
        (SystemMemory(3 * GIB, 2 * GIB, "GPU", 2 * GIB), ["host pool", "Host memory", "GPU"]),
    ],
)
def test_obstacles_name_missing_memory(machine: SystemMemory, words: list[str]) -> None:
    found = obstacles(NEEDED, machine)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))
    text = render(requirements_table("m", "full", NEEDED, machine))
    assert value_of(text, "device: peak") == "3 GiB"
    assert ("free: on GPU" in text) == (machine.device is not None)


def test_system_memory_is_measured() -> None:
    machine = SystemMemory.measure(None, torch.device("cpu"))
    assert machine.device is None
    assert machine.pool_limit == machine.host_free // 2
    assert SystemMemory.measure(5, torch.device("cpu")).pool_limit == 5
