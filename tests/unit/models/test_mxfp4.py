"""Test the importer for gpt-oss: all bits of packed experts equal transformers' dequantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import VOCAB, architecture
from support.cuda_cells import GRAPHS, POLICIES, captured_graphs
from support.cuda_simulator import Late, simulated
from support.outputs import completed
from support.tiny_models import edit_config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offload_rt import LLM, ModelError, SamplingParams
from offload_rt.models.linear.packed import PROJECTIONS, PackedExperts, PackedProjection
from offload_rt.models.loading import load_model
from offload_rt.models.shape import load_shape

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [torch.randint(1, VOCAB, (length,), generator=GENERATOR).tolist() for length in (90, 7, 23)]


def write_folders(folder: Path) -> tuple[Path, Path]:
    """Write the same weights in dequantised form and in MXFP4. Return both folders."""
    dense, packed = folder / "dense", folder / "packed"
    model = architecture("gpt_oss", **SIZES)
    for each in (dense, packed):
        model.save_pretrained(each)
    plain = load_file(dense / "model.safetensors")
    stored = dict(plain)
    for name, weight in load_file(dense / "model.safetensors").items():
        if name.endswith(PROJECTIONS):
            experts, ins, outs = weight.shape
            blocks = torch.randint(256, (experts, outs, ins // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, outs, ins // 32), dtype=torch.uint8)
            blocks[0, 0, 0], scales[0, 0, 0] = 0x80, 2  # zeros of both signs, whose scale float16 cannot hold
            del stored[name]
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    edit_config(packed, quantization_config=OPTIONS)
    return dense, packed


def test_packed_weights_and_tokens_equal_dequantised_ones(tmp_path: Path) -> None:
    dense, packed = write_folders(tmp_path)
    planned = load_shape(packed, device="cpu", dtype="float32")
    options: dict[str, Any] = {"dtype": "float32", "policy": "full", "host_memory": "4MiB", "device": "cpu"}
    llm, reference = LLM(packed, verify="always", **options), LLM(dense, **options)
    loaded, other = llm.runner.model, reference.runner.model
    assert planned == load_shape(packed, device="cpu", dtype="float32")
    assert planned.packing == "offload-rt" and planned.weight_bytes == loaded.weight_bytes < 0.6 * other.weight_bytes
    for own, theirs in zip(loaded.layers, other.layers, strict=True):
        experts: Any = own.get_submodule("mlp.experts")
        assert isinstance(experts, PackedExperts)
        for name in PROJECTIONS:
            stack, weight = getattr(experts, name), getattr(theirs.get_submodule("mlp.experts"), name)
            for rows, expected in zip(stack.packed, weight, strict=True):
                assert stack.form.unpack(rows, torch.float32).T.equal(expected)
    found, expected = (
        [each.token_ids for each in completed(one.generate(PROMPTS, GREEDY))] for one in (llm, reference)
    )
    assert found == expected


def test_tokens_on_a_simulated_device_equal_the_cpu_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    folder, at_once = write_folders(tmp_path)[1], []
    products = PackedProjection.products
    monkeypatch.setattr(
        PackedProjection, "products", lambda stack, x, *rest: at_once.append(len(x)) or products(stack, x, *rest)
    )
    options: dict[str, Any] = {"dtype": "float32", "policy": "full", "host_memory": "4MiB", "verify": "off"}
    few = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    [expected] = completed(LLM(folder, device="cpu", **options).generate(PROMPTS[:1], few))
    with simulated(Late()):
        llm = LLM(folder, device="cuda", **options)
        [found] = completed(llm.generate(PROMPTS[:1], few))
    assert found.token_ids == expected.token_ids
    chosen = llm.runner.model.layers[0].get_submodule("mlp.router").top_k
    # prefill computes one expert at a time, and a decode step all chosen experts at once
    assert at_once == [chosen] * len(at_once) != []


def test_captured_step_does_not_read_the_chosen_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over experts would read on the host which experts are chosen, and that would end the capture."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr("offload_rt.models.linear.packed.MAX_BATCHED_PAIRS", 1)
    folder, few = write_folders(tmp_path)[1], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    options: dict[str, Any] = {
        "dtype": "float32", "policy": "quest", "policy_options": POLICIES["quest"], "host_memory": "4MiB",
        "verify": "off", "missed_mass_every": 0,
    }  # fmt: skip
    expected = completed(LLM(folder, device="cpu", **options).generate(PROMPTS[1:], few))
    with simulated(Late()):
        llm = LLM(folder, device="cuda", **options, **GRAPHS)
        found = completed(llm.generate(PROMPTS[1:], few))
        assert captured_graphs(llm)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", lambda each: each.fill_(255), "scales that are not finite"),
        ("scales", lambda each: each[..., :1].contiguous(), "scales of shape .* do not match blocks"),
        ("blocks", lambda each: each[..., :8].contiguous(), "groups of 16 inputs; groups of 32 are supported"),
    ],
)
def test_damaged_experts_are_refused(part: str, change: Any, message: str, tmp_path: Path) -> None:
    _, packed = write_folders(tmp_path)
    path = packed / "model.safetensors"
    state, name = load_file(path), f"model.layers.1.mlp.experts.gate_up_proj_{part}"
    save_file(state | {name: change(state[name])}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load_model(packed, device="cpu")
