"""Test `device_memory`: streamed weights give the same tokens, and plans state the memory that is in use.

`test_device_limit.py` compares the peak with the limit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.allocations import count_device_bytes
from support.outputs import completed
from support.tiny_models import NAMES, depth, tiny_model, tiny_prompt
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.core import BLOCK_SIZE, ModelGeometry
from offload_rt.errors import ConfigError, DeviceFullError, MemoryLimitError
from offload_rt.models.shape import ModelShape, load_shape
from offload_rt.models.weights import WeightSizes, decoder_layers, layer_bytes, weight_sizes
from offload_rt.planning.device_plan import plan_device, plan_for
from offload_rt.planning.memory_model import DeviceCosts
from offload_rt.policies.options import InfiniGenOptions
from offload_rt.policies.registry import memory_demand
from offload_rt.transfer.weights.streamed import WeightStream

LAYERS, PROMPT, NEW = 12, 110, 5
CONTEXT = 2 * BLOCK_SIZE
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)

POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("infinigen", {}),
    ("infinigen", {"preset": "rows"}),
    ("infinigen", {"preset": "paper"}),
    (
        "infinigen",
        {"preset": "rows", "scorer": "int4", "max_missed_mass": 0.02, "dense_layers": (), "source": "attention_input"},
    ),
    ("h2o", {}),
    ("quest", {}),
]


def deep_model(name: str) -> PreTrainedModel:
    # KV of heads of 16 is smaller than the weights
    heads = {"head_dim": 16} if name == "llama" else {}
    return tiny_model(name, **depth(name, LAYERS), **heads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that saves the deep model under a given name and returns the folder."""
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            deep_model(name).save_pretrained(made[name])
        return made[name]

    return save


@pytest.fixture(autouse=True)
def no_memory_for_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no memory for calibration, which needs more than these contexts. `test_device_limit.py` tests it."""
    monkeypatch.setattr(DeviceCosts, "calibration", lambda self: 0)


def costs_of(folder: Path, policy: str, options: dict[str, Any]) -> DeviceCosts:
    shape = load_shape(folder, device="cpu")
    demand = memory_demand(policy, options, shape.geometry, shape.dtype)
    return DeviceCosts(shape, demand, 512)


def streaming_limit(costs: DeviceCosts, contexts: list[int], resident: int = 4) -> int:
    """Return the bytes needed for `contexts`, `resident` layers and two weight buffers."""
    sizes = costs.shape.sizes
    return sizes.fixed + (resident + 2) * sizes.layers[0] + costs.total(contexts)


def limited(folder: Path, policy: str, options: dict[str, Any], limit: int, **settings: Any) -> LLM:
    return LLM(
        folder,
        policy=policy,
        policy_options=options,
        device="cpu",
        device_memory=limit,
        host_memory="64MiB",
        max_model_len=settings.pop("max_model_len", CONTEXT),
        **settings,
    )


def stream_of(llm: LLM) -> WeightStream | None:
    return None if llm.runner.weights is None else llm.runner.weights.stream


# --------------------------------------------------------------------------------------------------------- same tokens


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "policy", "options"), [(name, *POLICIES[1]) for name in NAMES] + [("llama", *POLICIES[0])]
)
def test_streamed_weights_give_the_same_tokens(folder: Any, name: str, policy: str, options: dict[str, Any]) -> None:
    limit = streaming_limit(costs_of(folder(name), policy, options), [CONTEXT])
    prompt = tiny_prompt(PROMPT)
    whole = LLM(folder(name), policy=policy, policy_options=options, device="cpu", host_memory="64MiB")
    [expected] = completed(whole.generate([prompt], GREEDY))
    llm = limited(folder(name), policy, options, limit)
    [completion] = completed(llm.generate([prompt], GREEDY))
    assert completion.token_ids == expected.token_ids
    stream, stats = stream_of(llm), completion.stats
    assert stream is not None and len(stream.layers) == LAYERS - 4
    stream.check_integrity()
    one_pass = sum(layer_bytes(llm.runner.model.layers[layer]) for layer in stream.layers)
    # One prefill, NEW - 1 steps, and the layers prefetched for the step after the last.
    assert NEW * one_pass <= stats.h2d_weight_bytes <= NEW * one_pass + 2 * one_pass // len(stream.layers)
    assert stats.weight_bytes == expected.stats.weight_bytes == whole.runner.model.weight_bytes
    assert stats.h2d_bytes == expected.stats.h2d_bytes
    assert stats.weight_bytes_device < stats.weight_bytes


def test_batch_shares_streamed_weights(folder: Any) -> None:
    rows = {"preset": "rows", "source": "residual"}
    costs = costs_of(folder("llama"), "infinigen", rows)
    prompts = [tiny_prompt(length, seed=length) for length in (40, 110, 55)]
    llm = limited(folder("llama"), "infinigen", rows, streaming_limit(costs, [CONTEXT] * 3))
    stream = stream_of(llm)
    assert stream is not None
    calibrated = stream.bytes
    together = completed(llm.generate(prompts, GREEDY))
    alone = completed(
        LLM(folder("llama"), policy_options=rows, device="cpu", host_memory="64MiB").generate(prompts, GREEDY)
    )
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert sum(c.stats.h2d_weight_bytes for c in together) + stream.device_bytes >= stream.bytes - calibrated > 0


# ------------------------------------------------------------------------------------------------------ under the limit


def addresses_of_host_blocks(llm: LLM) -> list[int]:
    stream = stream_of(llm)
    return [] if stream is None else [block.host.untyped_storage().data_ptr() for block in stream._blocks.values()]


def test_device_memory_before_a_run_equals_the_plan(folder: Any) -> None:
    costs = costs_of(folder("qwen2"), "full", {})
    limit = streaming_limit(costs, [CONTEXT])
    llm, counted = count_device_bytes(
        lambda: limited(folder("qwen2"), "full", {}, limit),
        lambda llm: {llm.runner.pool.rows.untyped_storage().data_ptr(), *addresses_of_host_blocks(llm)},
        lambda llm: (torch.zeros(1), llm)[1],
    )
    plan = llm.runner.plan
    assert plan is not None and len(plan.streamed) == LAYERS - 4
    assert counted.before == plan.weights


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "options"), POLICIES)
def test_cuda_allocator_peak_is_below_the_limit(folder: Any, policy: str, options: dict[str, Any]) -> None:
    """The limit includes the cuBLAS workspace. `test_device_limit.py` covers a simulated device, which has none."""
    shape = load_shape(folder("llama"), device="cuda", dtype="float32")
    demand = memory_demand(policy, options, shape.geometry, shape.dtype)
    limit = streaming_limit(DeviceCosts(shape, demand, 512), [CONTEXT, CONTEXT], resident=0)
    prompts = [tiny_prompt(PROMPT, seed=seed) for seed in (1, 2)]
    settings: dict[str, Any] = {"policy": policy, "policy_options": options, "device": "cuda", "dtype": "float32"}
    expected = [
        c.token_ids for c in completed(LLM(folder("llama"), host_memory="64MiB", **settings).generate(prompts, GREEDY))
    ]
    torch.cuda.empty_cache()
    earlier = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    llm = LLM(folder("llama"), host_memory="64MiB", device_memory=limit, max_model_len=CONTEXT, **settings)
    assert [c.token_ids for c in completed(llm.generate(prompts, GREEDY))] == expected
    assert torch.cuda.max_memory_allocated() - earlier <= limit


# --------------------------------------------------------------------------------------------- scoring keys on the host


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, POLICIES[2][1], POLICIES[3][1]])
def test_scoring_keys_on_the_host_give_the_same_tokens(folder: Any, options: dict[str, Any]) -> None:
    costs = costs_of(folder("llama"), "infinigen", options)
    on_device = streaming_limit(costs, [CONTEXT], resident=0)
    plan = plan_device(on_device, costs, CONTEXT)
    assert plan.streamed == tuple(range(LAYERS)) and not plan.keys_on_host
    llm = limited(folder("llama"), "infinigen", options, on_device - 1)  # too little for scoring keys
    assert llm.runner.plan is not None and llm.runner.plan.keys_on_host
    prompt = tiny_prompt(PROMPT)
    [here] = completed(llm.generate([prompt], GREEDY))
    [there] = completed(
        LLM(folder("llama"), policy_options=options, device="cpu", host_memory="64MiB").generate([prompt], GREEDY)
    )
    assert here.token_ids == there.token_ids
    assert here.stats.h2d_bytes == there.stats.h2d_bytes
    assert (here.stats.scoring_bytes_device, there.stats.scoring_bytes_host) == (0, 0)
    assert here.stats.scoring_bytes_host == there.stats.scoring_bytes_device > 0


@pytest.mark.parametrize("corrected", [True, False])
def test_query_corrections_are_always_on_the_device(folder: Any, corrected: bool) -> None:
    costs = costs_of(folder("llama"), "infinigen", {"corrected": corrected})
    geometry, size = costs.shape.geometry, costs.shape.dtype.itemsize
    held = 2 * geometry.hidden * LAYERS * size if corrected else 0  # slope and offset
    assert replace(costs, keys_on_host=True).basis() == held
    assert costs.basis() == held + costs.demand.basis_bytes > held


# ------------------------------------------------------------------------------------------------------------- the plan


def test_plan_keeps_as_many_layers_as_fit(folder: Any) -> None:
    costs = costs_of(folder("opt"), "full", {})
    sizes, rest = costs.shape.sizes, costs.total([CONTEXT])
    everything = sizes.fixed + sum(sizes.layers) + rest
    assert plan_device(everything, costs, CONTEXT).streamed == ()
    for kept in range(LAYERS - 2):
        plan = plan_device(sizes.fixed + (kept + 2) * sizes.layers[0] + rest, costs, CONTEXT)
        assert len(plan.streamed) == LAYERS - kept and plan.weights <= plan.limit - rest
        assert plan.streamed_bytes == (LAYERS - kept) * sizes.layers[0]
        gaps = [b - a for a, b in zip(plan.streamed, plan.streamed[1:], strict=False)]
        assert max(gaps) - min(gaps) <= 1, "streamed layers are spread evenly"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_planned_sizes_equal_the_loaded_model(folder: Any, name: str) -> None:
    shape = load_shape(folder(name), device="cpu")
    model = deep_model(name)
    assert shape.sizes == weight_sizes(model)
    own = {id(p) for layer in decoder_layers(model) for p in layer.parameters()}
    assert len(shape.sizes.layers) == LAYERS
    assert shape.weight_bytes - shape.sizes.fixed == sum(p.nbytes for p in model.parameters() if id(p) in own)


def test_error_of_a_small_limit_names_a_sufficient_context(folder: Any) -> None:
    costs = costs_of(folder("llama"), "full", {})
    least = streaming_limit(costs, [CONTEXT], resident=0)
    with pytest.raises(MemoryLimitError, match=r"1 B are missing. Up to 64 tokens would fit: pass max_model_len"):
        limited(folder("llama"), "full", {}, least - 1)
    limited(folder("llama"), "full", {}, least - 1, max_model_len=64)
    with pytest.raises(MemoryLimitError, match="Not even one token fits"):
        limited(folder("llama"), "full", {}, "64KiB")  # type: ignore[arg-type]


def test_prompt_longer_than_planned_is_refused_and_shorter_ones_run(folder: Any) -> None:
    costs = costs_of(folder("llama"), "full", {})
    llm = limited(folder("llama"), "full", {}, streaming_limit(costs, [CONTEXT], resident=0))
    with pytest.raises(DeviceFullError, match=r"this plan is for 128 tokens"):
        llm.generate([tiny_prompt(400)], GREEDY)
    llm.generate([tiny_prompt(PROMPT)], GREEDY)
    llm.runner.check_integrity()


def test_sequences_that_do_not_fit_together_run_one_after_another(folder: Any) -> None:
    costs = costs_of(folder("llama"), "full", {})
    llm = limited(folder("llama"), "full", {}, streaming_limit(costs, [CONTEXT], resident=0))
    prompts = [tiny_prompt(length, seed=length) for length in (100, 90, 119)]
    together = [c.token_ids for c in completed(llm.generate(prompts, GREEDY))]
    assert together == [completed(llm.generate([prompt], GREEDY))[0].token_ids for prompt in prompts]
    assert llm.runner.pool.sequence_bytes == 0


def test_weights_of_a_loaded_model_are_not_streamed() -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    sizes = weight_sizes(model)
    with pytest.raises(ConfigError, match="pass the model's folder"):
        LLM(model, policy="full", device_memory=sizes.fixed + 900_000, max_model_len=64, host_memory="1MiB")
    LLM(model, policy="full", device_memory=sizes.fixed + sum(sizes.layers) + 1_000_000, max_model_len=64)


@pytest.mark.parametrize("invalid", [{"device_memory": 0}, {"device_memory": "x"}, {"max_model_len": 0}])
def test_invalid_settings_are_refused(folder: Any, invalid: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(invalid))):
        LLM(folder("llama"), policy="full", **invalid)


def test_memory_demand_follows_the_options() -> None:
    geometry = load_shape(tiny_model("llama")).geometry  # 3 layers, 2 KV heads of 32
    options = InfiniGenOptions.preset("rows", dense_layers=(0, 1), budget=0.3)
    demand = memory_demand("infinigen", options, geometry, torch.bfloat16)
    assert (demand.dense, demand.resident, demand.fetched_fraction, demand.key_bytes) == (
        (0, 1),
        68,
        0.3,
        2 * 16,
    )  # 4 columns, padded
    assert memory_demand("full", {}, geometry, torch.float32).dense == (0, 1, 2)
    assert memory_demand("quest", {"page": 8}, geometry, torch.float32).key_bytes == 2 * 2 * 32 * 4 / 8


def shape_of_8b_model(windows: tuple[int | None, ...]) -> ModelShape:
    layer = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
    sizes = WeightSizes(2 * (2 * 128_256 + 1) * 4096, (layer,) * 32, 14336)
    geometry = ModelGeometry(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128_256,
        scales=(128**-0.5,) * 32,
        windows=windows,
        max_positions=131_072,
        absolute_positions=False,
        default_alpha=5.0,
    )
    return ModelShape(geometry, sizes.fixed + sum(sizes.layers), sizes, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("windows", "context"),
    [((None,) * 32, 8192), ((1024, None) * 16, 2 * 8192 - 17 * 64), ((1024,) * 32, 131_072)],
    ids=["full", "every second layer", "sliding"],
)
def test_plans_are_for_the_longest_context_that_the_host_memory_holds(
    windows: tuple[int | None, ...], context: int
) -> None:
    config = EngineConfig(policy="full", device_memory=60_000_000_000, host_memory=1 << 30)
    assert plan_for(config, shape_of_8b_model(windows)).context == context


@pytest.mark.parametrize(
    ("preset", "layers", "row"),
    [("rows", 31, 48), ("default", 32, 130)],
    ids=[
        "rows: 38 of 128 columns as int8 in rows of 48 bytes, layer 0 dense",
        "tail: 128 columns of keys and values in 4 bits, two steps",
    ],
)
def test_plan_of_an_8b_model_with_128k_tokens(preset: str, layers: int, row: int) -> None:
    shape = shape_of_8b_model((None,) * 32)
    layer = shape.sizes.layers[0]
    demand = memory_demand("infinigen", {"preset": preset}, shape.geometry, torch.bfloat16)
    costs = DeviceCosts(shape, demand, 512)
    assert plan_device(24_000_000_000, costs, 131_072).streamed == ()
    small = plan_device(12_000_000_000, costs, 131_072)
    assert not small.keys_on_host and 0 < len(small.streamed) < 32
    assert small.weights + costs.total([131_072]) <= 12_000_000_000 < small.weights + costs.total([131_072]) + layer
    assert small.streamed_bytes == len(small.streamed) * layer
    exact = small.weights + costs.total([131_072])
    for limit, slices in ((24_000_000_000, 2048), (exact, 512)):
        config = EngineConfig(policy_options={"preset": preset}, device_memory=limit, max_model_len=131_072)
        chosen = plan_for(replace(config, host_memory=1 << 36), shape)
        assert chosen.costs.slice_tokens == slices and chosen.streamed == plan_device(limit, costs, 131_072).streamed
    keys = layers * 8 * row * 131_072
    assert keys <= costs.scoring(131_072) <= 1.1 * keys
    with pytest.raises(MemoryLimitError, match="scoring keys on the host"):
        plan_device(4_000_000_000, costs, 131_072)
