"""Weights that stay packed: their modules compute, the rest knows how many bytes they take. bitsandbytes' nf4 and int8
weights of torchao run on a CPU; of formats that need a device only the refusal is seen here."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import edit_config, tiny_checkpoint, tiny_prompt
from transformers import AutoModelForCausalLM

from offload_rt import LLM, EngineConfig, MemoryLimitError, ModelError, SamplingParams
from offload_rt.models.fingerprint import fingerprint
from offload_rt.models.packed import held_bytes, tensors_of
from offload_rt.models.registry import load_model, load_shape
from offload_rt.planning.device_plan import plan_for

WINDOW = {"sinks": 2, "recent": 8}
PROMPT = tiny_prompt(150)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def nf4(folder: Path) -> Any:
    from transformers import BitsAndBytesConfig

    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed, dtype=torch.float32)


def int8(folder: Path) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    packed = TorchAoConfig(Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=packed, dtype=torch.float32)


WAYS: dict[str, tuple[Callable[[Path], Any], float]] = {"bitsandbytes": (nf4, 0.6), "torchao": (int8, 1.1)}
"""How a checkpoint is packed, and the most bytes that a weight of a layer's matrices then takes, scales included."""


@pytest.fixture(scope="module", params=list(WAYS))
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small Llama in this format."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    plain = tiny_checkpoint(tmp_path_factory.mktemp("plain"), "llama", intermediate_size=128)
    folder = tmp_path_factory.mktemp("packed") / str(request.param)
    WAYS[request.param][0](plain).save_pretrained(folder)
    return folder


def ours(packed: Path, policy: str, **options: Any) -> list[int]:
    llm = LLM(packed, policy=policy, policy_options=options, host_memory="16MiB", verify="always", dtype="float32")
    return [event.token_id for event in llm.stream(PROMPT, GREEDY)]


def test_tokens_are_those_of_transformers(packed: Path) -> None:
    """Of its own modules in float32, through their prefill and their products with single tokens."""
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    given = torch.tensor([PROMPT])
    made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
    assert ours(packed, "full") == made[0, len(PROMPT) :].tolist()


def test_a_selection_of_everything_is_all(packed: Path) -> None:
    assert ours(packed, "infinigen", budget=1.0, tail="off", **WINDOW) == ours(packed, "full")


def test_memory_is_planned_with_packed_bytes(packed: Path) -> None:
    """A plan made from the file's header, before weights are read, knows what they will take, but for what a format
    keeps beside them."""
    shape, loaded = load_shape(packed, dtype="float32"), load_model(packed, dtype="float32")
    assert shape.weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.02)
    assert shape.packing == packed.name
    assert shape.sizes.widest == 128
    matrices = [
        w for layer in loaded.layers for m in layer.modules() for w in m.parameters(recurse=False) if w.dim() == 2
    ]
    numbers = sum(
        m.in_features * m.out_features for layer in loaded.layers for m in layer.modules() if hasattr(m, "in_features")
    )
    assert sum(map(held_bytes, matrices)) <= WAYS[packed.name][1] * numbers
    config = EngineConfig(policy="full", device_memory="1GiB", max_context=128)
    least = shape.weight_bytes + plan_for(config, shape).costs.total([128])
    assert not plan_for(replace(config, device_memory=least), shape).streamed
    with pytest.raises(MemoryLimitError, match=r"packed ones \(.*\) are not brought over layer by layer"):
        LLM(packed, config, device_memory=least - 1, dtype="float32")


def test_other_weights_have_another_fingerprint(packed: Path) -> None:
    model = load_model(packed, dtype="float32")
    again = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    assert fingerprint(again) == model.fingerprint
    weight = again.model.layers[2].mlp.up_proj.weight
    next(tensors_of(weight)).view(-1)[:40] += 1
    assert fingerprint(again) != model.fingerprint


def test_a_missing_part_is_one_error(packed: Path, tmp_path: Path) -> None:
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in weights if "layers.1.mlp.up_proj" in name)
    save_file({n: w for n, w in weights.items() if n != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"cannot load the weights of|lacks .*up_proj"):
        load_model(tmp_path)


def test_what_must_have_numbers_refuses(tmp_path: Path) -> None:
    from offload_rt.models.gpt2 import GPT2Adapter

    pytest.importorskip("bitsandbytes")
    model = nf4(tiny_checkpoint(tmp_path, "gpt2", n_inner=128))
    with pytest.raises(ModelError, match=r"packed \(bitsandbytes\), and GPT-2's"):
        GPT2Adapter(model)


def test_a_format_that_becomes_numbers_is_no_packing(tmp_path: Path) -> None:
    """transformers has no kernel for mxfp4 on a CPU: its layers may be brought over one by one."""
    folder = Path(tiny_checkpoint(tmp_path, "llama"))
    plain = load_shape(folder, device="cpu")
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    assert load_shape(folder, device="cpu") == plain


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_format_whose_library_is_missing_says_what_to_install(method: str, tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path, "llama"))
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4, "group_size": 64})
    with pytest.raises(ModelError, match=r"(?i)install|requires"):
        load_model(folder)


def test_a_damaged_header_is_one_error(tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path, "llama"))
    edit_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    for damage in (
        b"\xff" * 64,
        b"",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + json.dumps({"a": 1}).encode(),
    ):
        (folder / "model.safetensors").write_bytes(damage)
        with pytest.raises(ModelError, match="cannot read what the weights"):
            load_shape(folder)
