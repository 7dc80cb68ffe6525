"""Test models with packed weights: GGUF files that stay packed, and checkpoints that are quantised when loaded."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.outputs import completed
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import tiny_checkpoint, tiny_prompt
from torch import nn

from offload_rt import LLM, EngineConfig, SamplingParams
from offload_rt.errors import ConfigError, ModelError
from offload_rt.kernels import packed_products
from offload_rt.kernels.packed_format import PackedFormat
from offload_rt.models import gguf_import, packed_checkpoint
from offload_rt.models.fingerprint import cache_folder
from offload_rt.models.gguf_blocks import packed_format, packed_rows
from offload_rt.models.linear.packed import PackedEmbedding
from offload_rt.models.loading import load_model
from offload_rt.models.shape import load_shape
from offload_rt.models.weights import layer_bytes
from offload_rt.planning.device_plan import plan_for

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128, "num_hidden_layers": 4}
"""Heads of 32, so that all C code runs, and inputs in multiples of 64."""
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
"""Bytes of the blocks of each type that are float16."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(("kind", "halves"), HALVES.items())
def test_blocks_are_those_of_the_reference(kind: str, halves: list[int]) -> None:
    """Packed weights are equal to the reference bit by bit."""
    own = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[own]
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (6 * 512 // values, size), dtype=np.uint8)
    for at in halves:
        numbers = generator.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    data = blocks.reshape(6, -1)
    form = packed_format(kind, 512)
    assert form is not None and form.row_bytes <= 1.03 * data.shape[1]
    rows = packed_rows(torch.from_numpy(data), kind, form)
    assert rows is not None
    expected = torch.from_numpy(gguf.dequantize(data, own))
    assert form.unpack(rows, torch.float32).equal(expected)
    if (code := packed_products.compiled_for(torch.float32)) is not None:
        assert code.unpack(rows, form, torch.float32).equal(expected)


def test_scales_that_are_not_finite_are_not_packed() -> None:
    blocks = np.full((2, 210), 100, np.uint8)
    blocks[:, 208:] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    form = packed_format("Q6_K", 256)
    assert form is not None and packed_rows(torch.from_numpy(blocks), "Q6_K", form) is None


@pytest.mark.parametrize(
    ("kind", "architecture", "output"), [("Q4_1", "qwen2", False), ("Q8_0", "llama", True), ("Q5_0", "llama", False)]
)
def test_a_file_stays_packed(kind: str, architecture: str, output: bool, tmp_path: Path) -> None:
    """Weights are those of transformers' dequantisation, in its order of rows; tied weights are held once."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind, architecture=architecture, output=output, **SHAPE)
    llm, dense = (
        LLM(path, dtype="float32", policy="full", host_memory="4MiB", verify="always"),
        LLM(path, dtype="float32", policy="full", host_memory="4MiB", quantize="none"),
    )
    loaded, reference = llm.runner.model, dense.runner.model
    for own, other in zip(loaded.layers, reference.layers, strict=True):
        for name, module in other.named_modules():
            if isinstance(module, nn.Linear):
                packed: Any = own.get_submodule(name)
                assert packed.form.unpack(packed.packed, torch.float32).equal(module.weight)
    shape = load_shape(path, device="cpu", dtype="float32")
    assert shape.packing == "offload-rt" and shape.weight_bytes == loaded.weight_bytes < 0.4 * reference.weight_bytes
    assert sum(map(layer_bytes, loaded.layers)) == sum(shape.sizes.layers)
    prompt = tiny_prompt(150)
    outputs = [completed(each.generate(prompt, GREEDY))[0].token_ids for each in (llm, dense)]
    assert outputs[0] == outputs[1]
    assert loaded.fingerprint != reference.fingerprint


def test_streamed_layers_give_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q4_1", **SHAPE | {"num_hidden_layers": 8})
    options = {"budget": 1.0, "approximate_kv": "off"}
    config = EngineConfig("infinigen", options, max_model_len=192, host_memory="16MiB", dtype="float32")
    shape = load_shape(path, dtype="float32", device="cpu")
    rest = plan_for(replace(config, device_memory=1 << 30), shape).costs.total([192])
    small = replace(config, device_memory=shape.sizes.fixed + 4 * max(shape.sizes.layers) + rest)
    llm = LLM(path, small)
    prompt = tiny_prompt(150)
    found = completed(llm.generate(prompt, GREEDY))[0].token_ids
    assert llm.runner.weights is not None and llm.runner.weights.stream is not None
    assert llm.runner.weights.stream.bytes > 0
    llm.runner.check_integrity()
    assert found == completed(LLM(path, config).generate(prompt, GREEDY))[0].token_ids


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q8_0", **SHAPE)
    first = load_model(path, device="cpu")
    monkeypatch.setattr(gguf_import, "_convert", lambda *_, **__: pytest.fail("converted again"))
    again = load_model(path, device="cpu")
    assert again.fingerprint == first.fingerprint and again.name == str(path)
    assert again.tokenizer is not None and first.tokenizer is not None
    assert again.tokenizer.encode("he the") == first.tokenizer.encode("he the")
    assert again.tokenizer.chat_template == first.tokenizer.chat_template


def test_an_architecture_that_cannot_be_packed_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q8_0", **SHAPE)
    tried = []

    def refuse(*given: Any) -> None:
        tried.append(given)
        raise gguf_import.CannotPackError

    monkeypatch.setattr(gguf_import, "_tensor_names", refuse)
    shapes = [load_shape(path, device="cpu") for _ in range(2)]
    assert shapes[0] == shapes[1] == load_shape(path, device="cpu", quantize="none") and len(tried) == 1


def test_damaged_packed_weights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q8_0", **SHAPE)
    load_model(path, device="cpu")
    [weights] = cache_folder().glob("packed/*/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=r"the packed weights in '.*' are damaged; delete this folder"):
        load_model(path, device="cpu")


def test_the_cache_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_checkpoint.LIMIT_VARIABLE, "2500")

    def write(folder: Path) -> None:
        (folder / packed_checkpoint.WEIGHTS).write_bytes(bytes(1000))
        (folder / packed_checkpoint.DIGEST).write_text("")

    for age, name in enumerate(["a", "b"]):
        packed_checkpoint.cached_folder(tmp_path / name, write)
        os.utime(tmp_path / name, (age, age))
    packed_checkpoint.cached_folder(tmp_path / "a", write)  # used, so that "b" is the older one
    packed_checkpoint.cached_folder(tmp_path / "c", write)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "c"]

    def fail(folder: Path) -> None:
        (folder / packed_checkpoint.WEIGHTS).write_bytes(b"half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        packed_checkpoint.cached_folder(tmp_path / "d", fail)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "c"]


@pytest.mark.parametrize("quantize", ["auto", "none"])
def test_a_truncated_file_is_named_with_the_missing_bytes(quantize: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q8_0", **SHAPE)
    data = path.read_bytes()
    for end, message in (
        (len(data) - 5000, r"the file ends early: tensor [\w.]+ needs [\d,]+ more bytes"),
        (600, "the file ends early, within its header"),
        (2, "is not a GGUF file"),
    ):
        path.write_bytes(data[:end])
        with pytest.raises(ModelError, match=rf"tiny\.gguf' .*{message}"):
            load_model(path, device="cpu", quantize=quantize)


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_checkpoint_is_quantised_when_it_is_loaded(quantize: Any, tmp_path: Path) -> None:
    folder = Path(tiny_checkpoint(tmp_path / "tiny", "llama", **SHAPE | {"num_attention_heads": 2}))
    dense = load_model(folder, device="cpu", dtype="float32")
    llm = LLM(folder, dtype="float32", policy="full", host_memory="4MiB", quantize=quantize, verify="always")
    loaded, shape = llm.runner.model, load_shape(folder, device="cpu", dtype="float32", quantize=quantize)
    assert shape.weight_bytes == loaded.weight_bytes < dense.weight_bytes
    assert loaded.fingerprint != dense.fingerprint
    bits = int(quantize[-1])
    for own, other in zip(loaded.layers, dense.layers, strict=True):
        for name, module in other.named_modules():
            if isinstance(module, nn.Linear):
                packed: Any = own.get_submodule(name)
                assert isinstance(packed.form, PackedFormat) and packed.form.bits == bits
                error = packed.form.unpack(packed.packed, torch.float32) - module.weight
                assert error.norm() < (0.1 if bits == 4 else 0.01) * module.weight.norm()
    assert len(completed(llm.generate(tiny_prompt(150), GREEDY))[0].token_ids) == 12


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = write_tiny_gguf(path, "Q8_0", **SHAPE)
    with pytest.raises(ConfigError, match=r"quantize='int4' is for 16-bit checkpoints, and .*tiny\.gguf' is quantised"):
        load_model(path, device="cpu", quantize="int4")
    with pytest.raises(ConfigError, match=r"quantize='int8' changes weights while they are loaded: pass the model's"):
        load_model(model, quantize="int8")


def test_an_embedding_that_scales_its_results_still_does() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    from offload_rt.models.linear.packed import hold_packed

    form = PackedFormat(64, 8, 32, False, 128)
    embedding: Any = Gemma3TextScaledWordEmbedding(9, 64, 0, embed_scale=3.0)
    rows = form.pack(torch.randint(256, (9, 64), dtype=torch.uint8), torch.rand(9, 2))
    hold_packed(embedding, nn.Parameter(rows, requires_grad=False), form, torch.float32)
    assert isinstance(embedding, PackedEmbedding) and isinstance(embedding, Gemma3TextScaledWordEmbedding)
    tokens = torch.tensor([[1, 5], [8, 1]])
    torch.testing.assert_close(embedding(tokens), 3 * form.unpack(rows, torch.float32)[tokens])
