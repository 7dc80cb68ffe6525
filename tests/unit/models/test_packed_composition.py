"""Test packed weights in combination with other features: tokens equal those with dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.sessions import take_turn
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, EngineConfig, SamplingParams, offload
from offload_rt.models.linear import packing_of
from offload_rt.models.linear.quantize import quantize_layers
from offload_rt.models.shape import load_shape
from offload_rt.planning.device_plan import plan_for

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128, "num_hidden_layers": 8}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = [tiny_prompt(150), tiny_prompt(70, seed=3), tiny_prompt(110, seed=4)]
SELECTS = {"sinks": 2, "recent": 8, "budget": 0.3}


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "tiny.gguf"
    write_tiny_gguf(path, "Q4_1", architecture="llama", output=True, **SHAPE)
    return path


def make_llm(model_file: Path, **options: Any) -> LLM:
    return LLM(model_file, **{"dtype": "float32", "policy": "full", "host_memory": "8MiB", "device": "cpu"} | options)


def generate_tokens(llm: LLM, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    found = [completion.token_ids for completion in completed(llm.generate(PROMPTS, sampling))]
    llm.runner.check_integrity()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": "infinigen", "policy_options": SELECTS | {"approximate_kv": "off"}},  # calibrates with both
        {"policy": "infinigen", "policy_options": SELECTS},
        {"policy": "quest", "policy_options": SELECTS},
        {"exact": True},
        {"policy": "infinigen", "policy_options": SELECTS, "exact": "sparse"},
        {"embedding_on_host": True},
        {"kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_tokens_equal_dequantised_weights(model_file: Path, options: dict[str, Any]) -> None:
    packed, dense = make_llm(model_file, **options), make_llm(model_file, **options, quantize="none")
    assert packed.runner.model.weight_bytes < 0.6 * dense.runner.model.weight_bytes
    assert generate_tokens(packed) == generate_tokens(dense)


def test_exact_gives_the_tokens_of_full_attention(model_file: Path) -> None:
    options = {"policy": "infinigen", "policy_options": SELECTS, "exact": True}
    assert generate_tokens(make_llm(model_file, **options)) == generate_tokens(make_llm(model_file))


def test_packed_draft_model_gives_the_same_tokens(model_file: Path) -> None:
    llm = make_llm(model_file, exact={"method": "model", "model": str(model_file)})
    assert generate_tokens(llm) == generate_tokens(make_llm(model_file))


def test_beams_equal_dequantised_weights(model_file: Path) -> None:
    beams = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, num_beams=3)
    assert generate_tokens(make_llm(model_file), beams) == generate_tokens(make_llm(model_file, quantize="none"), beams)


def test_sessions_continue_after_a_restart(model_file: Path, tmp_path: Path) -> None:
    first, second = tiny_prompt(150), tiny_prompt(20, seed=5)
    session = make_llm(model_file).session("s", tmp_path)
    take_turn(session, first, GREEDY)
    session.close()
    again = make_llm(model_file).session("s", tmp_path)
    found = take_turn(again, second, GREEDY)
    assert again.loaded_tokens > 100
    [expected] = completed(make_llm(model_file, quantize="none").generate([again.tokens[: -len(found)]], GREEDY))
    assert found == expected.token_ids
    again.close()


@pytest.mark.parametrize("quantize", ["auto", "int4"])
def test_streamed_layers_with_the_embedding_in_host_memory(quantize: Any, model_file: Path, tmp_path: Path) -> None:
    if quantize == "int4":
        model_file = tmp_path / "model"
        tiny_model("llama", **SHAPE).save_pretrained(model_file)
    options = {"budget": 1.0, "approximate_kv": "off"}
    config = EngineConfig(
        "infinigen", options, max_model_len=192, host_memory="16MiB", dtype="float32", embedding_on_host=True,
        quantize=quantize, device="cpu",
    )  # fmt: skip
    shape = load_shape(model_file, dtype="float32", device="cpu", quantize=quantize)
    rest = plan_for(EngineConfig(**{**vars(config), "device_memory": 1 << 30}), shape).costs.total([192])
    size = shape.sizes.fixed + 4 * max(shape.sizes.layers) + rest
    limited = EngineConfig(**{**vars(config), "device_memory": size})
    llm = LLM(model_file, limited)
    found = generate_tokens(llm)
    assert llm.runner.weights is not None and llm.runner.weights.embedding is not None
    assert llm.runner.weights.stream is not None and llm.runner.weights.stream.bytes > 0
    assert found == generate_tokens(LLM(model_file, config))


@pytest.mark.parametrize("bits", [4, 8])
def test_generate_and_drop_in_use_packed_layers(bits: int) -> None:
    model = tiny_model("llama", **SHAPE)
    quantize_layers(model, bits)
    assert packing_of(model) == "offload-rt"
    ids = torch.tensor([PROMPTS[0]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    with offload(model, policy="full", host_memory="8MiB", verify="always") as llm:
        assert model.generate(ids, **options).equal(expected)
        llm.runner.check_integrity()
