"""Test Gemma 4 E2B (layers that share KV, per-layer embeddings) with other features. The reference is transformers."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from support.architectures import VOCAB, architecture
from support.outputs import completed
from torch import nn
from transformers import PreTrainedModel

from offload_rt import LLM, ModelError, SamplingParams, offload
from offload_rt.models.linear.quantize import quantize_layers
from offload_rt.models.shape import load_shape
from offload_rt.models.weights import layer_table
from offload_rt.planning.device_plan import plan_for

SPARSE: dict[str, Any] = {"sinks": 2, "recent": 6, "preset": "rows", "budget": 0.4, "dense_layers": ()}
ALL = SPARSE | {"budget": 1.0}
WIDE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "hidden_size_per_layer_input": 64, "head_dim": 32,
    "global_head_dim": 64,
}  # fmt: skip
"""Dimensions with which weights can be packed."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return architecture("gemma4_e2b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    path: Path = tmp_path_factory.mktemp("gemma4")
    model.save_pretrained(path)
    return path


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)


def transformers_tokens(model: PreTrainedModel, prompt: list[int], tokens: int, **options: Any) -> list[int]:
    generate: Any = model.generate
    ids = generate(torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options)
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def make_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"policy": "full", "dtype": "float32", "host_memory": "8MiB", "verify": "off"} | settings
    return LLM(folder, device="cpu", **settings)


def assert_tokens_equal(llm: LLM, model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> None:
    found = [one.token_ids for one in completed(llm.generate(prompts, greedy(tokens)))]
    assert found == [transformers_tokens(model, prompt, tokens) for prompt in prompts]
    llm.runner.check_integrity()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_give_the_tokens_of_dequantised_ones(bits: int, tmp_path: Path) -> None:
    model = architecture("gemma4_e2b", **WIDE, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    packed = copy.deepcopy(model)
    quantize_layers(packed, bits)
    plain = [name for name, module in packed.named_modules() if type(module) is nn.Linear]
    # all other linear layers are packed
    assert plain == ["model.per_layer_model_projection", "lm_head"]
    for name, module in packed.named_modules():
        if hasattr(module, "packed"):
            own: Any = model.get_submodule(name)
            own.weight.data = module.form.unpack(module.packed, torch.float32)
    llm = make_llm(tmp_path, quantize=f"int{bits}")
    assert_tokens_equal(llm, model, [prompt_of(40)], 6)
    shape = load_shape(tmp_path, device="cpu", dtype="float32", quantize=f"int{bits}")
    table = layer_table(model)
    assert shape.weight_bytes == llm.runner.model.weight_bytes and table is not None
    assert shape.sizes.layer_table == table.weight.nbytes


def test_quantised_layers_are_streamed(tmp_path: Path) -> None:
    architecture("gemma4_e2b", **WIDE).save_pretrained(tmp_path)
    settings: dict[str, Any] = {"quantize": "int8", "max_model_len": 64, "prefill_chunk_size": 64}
    plain = make_llm(tmp_path, **settings)
    shape = load_shape(tmp_path, device="cpu", dtype="float32", quantize="int8")
    costs = plan_for(replace(plain.runner.config, device_memory=1 << 40), shape).costs
    limit = shape.sizes.fixed + 3 * max(shape.sizes.layers) + costs.total([64])
    streamed = make_llm(tmp_path, device_memory=limit, **settings)
    assert streamed.runner.plan is not None and streamed.runner.plan.streamed
    one, two = (completed(llm.generate([prompt_of(30)], greedy(5)))[0] for llm in (plain, streamed))
    assert one.token_ids == two.token_ids


@pytest.mark.parametrize("drafts", ["lookup", "sparse", "model"])
def test_lossless_mode_equals_transformers(drafts: str, folder: Path, model: PreTrainedModel) -> None:
    policy = {"policy": "infinigen", "policy_options": SPARSE} if drafts == "sparse" else {}
    exact: Any = {"model": str(folder)} if drafts == "model" else drafts
    assert_tokens_equal(make_llm(folder, exact=exact, **policy), model, [prompt_of(20), prompt_of(70, 1)], 8)


def test_pool_on_disk_equals_transformers(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    llm = make_llm(folder, disk=tmp_path, disk_limit="32MiB", host_memory="1MiB")
    assert_tokens_equal(llm, model, [prompt_of(20), prompt_of(170, 1)], 6)
    assert_tokens_equal(llm, model, [prompt_of(170, 1)[:140] + [5] * 20], 6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("swap", [True, False])
def test_preempted_requests_equal_transformers(
    swap: bool, folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    # two requests need more than six blocks
    llm = make_llm(folder, host_memory="96KiB", swap=tmp_path if swap else None)
    engine, prompts = llm.make_engine(), [prompt_of(50), prompt_of(62, 1)]
    requests = [engine.add(prompt, greedy(72)) for prompt in prompts]
    while not engine.idle:
        if llm._swap is not None:  # The disk is treated as infinitely fast.
            llm._swap._write_seconds_per_byte = llm._swap._read_seconds_per_byte = 0.0
        engine.step()
    assert [request.new_tokens for request in requests] == [
        transformers_tokens(model, prompt, 72) for prompt in prompts
    ]
    assert engine.scheduler.preemptions > 0 and (engine.scheduler.restored > 0) == swap
    engine.check_integrity()


def test_sessions_after_a_restart_equal_transformers(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    text: list[int] = []
    for turn, length in enumerate((150, 20, 40)):
        llm = make_llm(folder, policy="infinigen", policy_options=ALL)
        session = llm.session("s", tmp_path)
        text += prompt_of(length, turn)
        reply = [event.token_id for event in session.send(prompt_of(length, turn), greedy(6))]
        assert reply == transformers_tokens(model, text, 6)
        text += reply
        session.close()
        llm.runner.check_integrity()


def test_shared_prefix_and_queries_predicted_two_layers_ahead(folder: Path, model: PreTrainedModel) -> None:
    stem = prompt_of(130)
    llm = make_llm(folder, policy="infinigen", policy_options=ALL | {"ahead": 2})
    assert_tokens_equal(llm, model, [stem + prompt_of(9, 1), stem + prompt_of(20, 2)], 5)
    [again] = completed(llm.generate([stem + prompt_of(5, 3)], greedy(1)))
    assert again.stats.reused_tokens == 128


def test_drop_in_with_beams_equals_transformers(model: PreTrainedModel) -> None:
    replaced, prompt = copy.deepcopy(model), prompt_of(70)
    offload(replaced, policy="full", host_memory="8MiB")
    for beams in (1, 3):
        assert transformers_tokens(replaced, prompt, 6, num_beams=beams) == transformers_tokens(
            model, prompt, 6, num_beams=beams
        )


def test_gguf_files_are_refused_because_transformers_reads_wrong_dimensions(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_head_count, writer.add_context_length):
        add(4)
    writer.add_uint32("gemma4.attention.shared_kv_layers", 2)
    writer.add_tensor("token_embd.weight", torch.zeros(9, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"does not read the types of layers.*safetensors") as caught:
        load_shape(path, device="cpu")
    assert caught.value.reason == "gguf"
