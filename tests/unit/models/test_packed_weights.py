"""Test models with packed weights: GGUF files, and checkpoints that are quantised during loading."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.allocations import count_device_bytes
from support.outputs import completed
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import tiny_checkpoint, tiny_prompt
from torch import nn

from offload_rt import LLM, EngineConfig, SamplingParams
from offload_rt.errors import ConfigError, MemoryLimitError, ModelError
from offload_rt.kernels import packed_products
from offload_rt.kernels.packed_format import PackedFormat
from offload_rt.models import gguf_import, packed_cache, packed_checkpoint
from offload_rt.models.gguf_blocks import packed_format, packed_rows
from offload_rt.models.importing import conversion_of, packed_source
from offload_rt.models.linear import quantize
from offload_rt.models.linear.packed import PackedEmbedding
from offload_rt.models.linear.quantize import quantize_layers
from offload_rt.models.loading import load_model
from offload_rt.models.packed_checkpoint import CannotPackError
from offload_rt.models.shape import load_shape
from offload_rt.models.source import find_source
from offload_rt.models.weights import layer_bytes
from offload_rt.planning import host_memory
from offload_rt.planning.device_plan import plan_for
from offload_rt.utils.native_code import cache_folder
from offload_rt.utils.progress import observed

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128, "num_hidden_layers": 4}
"""Shape with heads of 32, so that all C code runs, and inputs that are multiples of 64."""
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2],
    "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
"""Offsets of the float16 numbers in a block of each GGUF type."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(("kind", "halves"), HALVES.items())
def test_packed_blocks_equal_the_dequantisation_of_gguf(kind: str, halves: list[int]) -> None:
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
def test_loaded_file_stays_packed(kind: str, architecture: str, output: bool, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, kind, architecture=architecture, output=output, **SHAPE)
    planned = load_shape(path, device="cpu", dtype="float32")  # from the header
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
    shape = load_shape(path, device="cpu", dtype="float32")  # from the packed checkpoint
    assert (
        shape == planned
        and shape.packing == "offload-rt"
        and shape.weight_bytes == loaded.weight_bytes < 0.4 * reference.weight_bytes
    )
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


def test_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q8_0", **SHAPE)
    first = load_model(path, device="cpu")
    monkeypatch.setattr(gguf_import.GGUFImport, "write", lambda *_: pytest.fail("converted again"))
    again = load_model(path, device="cpu")
    assert again.fingerprint == first.fingerprint and again.name == str(path)
    assert again.tokenizer is not None and first.tokenizer is not None
    assert again.tokenizer.encode("he the") == first.tokenizer.encode("he the")
    assert again.tokenizer.chat_template == first.tokenizer.chat_template


def test_rows_are_interleaved_only_for_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q4_1", output=True, **SHAPE)
    models, outputs = [], []
    for device in ("cpu", "cuda"):
        conversion = conversion_of(find_source(path), "auto", torch.device(device))
        assert conversion is not None
        folder = Path(packed_source(conversion).name_or_path)
        header = (folder / packed_checkpoint.WEIGHTS).read_bytes()[:8]
        assert (8 + int.from_bytes(header, "little")) % 64 == 0  # vectors do not cross cache lines
        models.append(LLM(folder, dtype="float32", policy="full", host_memory="4MiB"))
        # the CPU also reads the layout for GPUs, but unpacks the weights for each product
        outputs.append(completed(models[-1].generate(tiny_prompt(150), GREEDY))[0].token_ids)
    assert outputs[0] == outputs[1]
    assert models[0].runner.model.fingerprint == models[1].runner.model.fingerprint
    for own, other in zip(*(llm.runner.model.layers for llm in models), strict=True):
        tiled, plain = own.mlp.up_proj, other.mlp.up_proj
        assert tiled.form == plain.form.for_cpu() != plain.form
        assert tiled.form.rows(tiled.packed).equal(plain.packed) and not tiled.packed.equal(plain.packed)


def test_architecture_that_cannot_be_packed_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q8_0", **SHAPE)
    tried = []

    def refuse(*given: Any) -> None:
        tried.append(given)
        raise CannotPackError

    monkeypatch.setattr(gguf_import, "_TensorMap", refuse)
    assert load_shape(path, device="cpu") == load_shape(path, device="cpu", quantize="none") and len(tried) == 1
    dense = load_model(path, device="cpu", quantize="none")
    for _ in range(2):
        loaded = load_model(path, device="cpu")
        assert (loaded.fingerprint, loaded.weight_bytes) == (dense.fingerprint, dense.weight_bytes)
    assert len(tried) == 2, "the second load does not try again"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("model.safetensors", "are damaged; delete this folder"),
        ("config.json", "are damaged; delete this folder"),
        ("added", "are damaged; delete this folder"),
        ("shape", r"are damaged; .* \(model.norm.weight has the shape \(32,\)\)"),
    ],
)
def test_damaged_packed_weights_are_refused(
    file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, "Q8_0", **SHAPE)
    load_model(path, device="cpu")
    [entry] = packed_cache.packed_entries(cache_folder() / "packed")
    assert entry.origin == str(path)
    if file == "shape":
        weights = load_file(entry.folder / "model.safetensors")
        save_file(weights | {"model.norm.weight": torch.ones(32)}, entry.folder / "model.safetensors")
        monkeypatch.setattr(packed_checkpoint, "is_intact", lambda folder: True)
    else:
        data = bytearray((entry.folder / file).read_bytes() if file != "added" else b"text")
        data[-4] ^= 0 if file == "config.json" else 1
        (entry.folder / file).write_bytes(data.replace(b'"silu"', b'"relu"'))
    with pytest.raises(ModelError, match=rf"the packed weights in '.*' {message}"):
        load_model(path, device="cpu")


def test_size_of_the_packed_cache_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_cache.LIMIT_VARIABLE, "2500")

    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(bytes(1000))

    def names() -> list[str]:
        return sorted(each.name for each in tmp_path.iterdir())

    for age, name in enumerate(["a", "b"]):
        packed_cache.cached_folder(tmp_path / name, name, write)
        os.utime(tmp_path / name, (age, age))
    (tmp_path / "new-d").mkdir()  # left behind by a killed process
    packed_cache.cached_folder(tmp_path / "a", "a", write)  # used, so that "b" is the older one
    packed_cache.cached_folder(tmp_path / "c", "c", write)
    assert names() == ["a", "c", "lock"]

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        packed_cache.cached_folder(tmp_path / "d", "d", fail)
    assert names() == ["a", "c", "lock"]
    assert [entry.origin for entry in packed_cache.shrink_packed(tmp_path, 1100)] == ["a"]
    assert [entry.origin for entry in packed_cache.packed_entries(tmp_path)] == ["c"]


def test_processes_convert_a_file_once(tmp_path: Path) -> None:
    """Threads stand in for processes. This works because a lock belongs to an open file."""
    written, seen = [], threading.Event()

    def write(folder: Path) -> None:
        written.append(folder)
        assert seen.wait(10)
        (folder / "weights").write_bytes(bytes(10))

    def convert(_: int) -> Path:
        with observed(lambda *_: seen.set()):  # the other one waits
            return packed_cache.cached_folder(tmp_path / "a", "a", write)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(convert, range(2))) == [tmp_path / "a"] * 2
    assert len(written) == 1 and packed_cache.is_intact(tmp_path / "a")


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_checkpoint_is_quantised_when_it_is_loaded(quantize: Any, tmp_path: Path) -> None:
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
                assert isinstance(packed.form, PackedFormat) and packed.form.bits == bits and packed.form.interleaved
                error = packed.form.unpack(packed.packed, torch.float32) - module.weight
                assert error.norm() < (0.1 if bits == 4 else 0.01) * module.weight.norm()
    assert len(completed(llm.generate(tiny_prompt(150), GREEDY))[0].token_ids) == 12


def test_weights_are_converted_only_if_they_fit_into_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are not converted are mapped from the file and need no host memory."""
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", **SHAPE | {"num_attention_heads": 2})
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1 << 16)
    message = r"int4' first converts the float32 weights of .* to bfloat16, which takes .*: pass dtype='float32'"
    with pytest.raises(MemoryLimitError, match=message):
        LLM(folder, dtype="bfloat16", host_memory="4MiB", quantize="int4")
    LLM(folder, dtype="float32", host_memory="4MiB", quantize="int4")
    LLM(folder, dtype="bfloat16", host_memory="4MiB")


@pytest.mark.parametrize("bits", [4, 8])
def test_memory_for_quantisation_does_not_depend_on_the_weight(bits: int) -> None:
    form = PackedFormat(1024, bits, 32, bits == 4, 0 if bits == 4 else 128)
    extra = []
    for rows in (4096, 8192):
        weight = torch.randn(rows, 1024)
        _, used = count_device_bytes(
            lambda w=weight: w, lambda w: set(), lambda w: quantize._quantized(w, form, w.device)
        )
        # `count_device_bytes` includes the result, which a GPU would store in host memory
        extra.append(used.peak - used.before - rows * form.row_bytes)
    assert extra[0] == extra[1] < 50 * quantize._WEIGHTS_AT_ONCE


@pytest.mark.parametrize("bits", [4, 8])
def test_small_weights_keep_their_precision(bits: int) -> None:
    """In plain float16, the scales of such weights would have only a few significant bits."""
    weight = torch.randn(64, 128) * torch.logspace(0, -5, 64)[:, None]
    model: Any = nn.Module()
    model.body, model.gate_of_state = nn.Linear(128, 64, bias=False), nn.Linear(128, 4)
    model.get_output_embeddings = model.get_input_embeddings = lambda: None
    model.body.weight.data = 2.0**-9 * weight
    quantize_layers(model, bits)
    error = model.body.form.unpack(model.body.packed, torch.float32) - 2.0**-9 * weight
    assert (error.norm(dim=1) < (0.1 if bits == 4 else 0.01) * 2.0**-9 * weight.norm(dim=1)).all()
    assert type(model.gate_of_state) is nn.Linear  # has few outputs


def test_quantised_weights_are_not_quantised_again(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model = write_tiny_gguf(path, "Q8_0", **SHAPE)
    with pytest.raises(ConfigError, match=r"quantize='int4' is for 16-bit checkpoints, and .*tiny\.gguf' is quantised"):
        load_model(path, device="cpu", quantize="int4")
    with pytest.raises(ConfigError, match=r"quantize='int8' changes weights while they are loaded: pass the model's"):
        load_model(model, quantize="int8")


def test_models_without_layers_to_quantise_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", "gpt2")
    for load in (load_shape, load_model):
        with pytest.raises(ConfigError, match="quantize='int4' has no effect on GPT2LMHeadModel"):
            load(folder, device="cpu", quantize="int4")


def test_packed_embedding_keeps_its_scale() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    from offload_rt.models.linear.packed import use_packed_weights

    form = PackedFormat(64, 8, 32, False, 128)
    embedding: Any = Gemma3TextScaledWordEmbedding(9, 64, 0, embed_scale=3.0)
    rows = form.pack(torch.randint(256, (9, 64), dtype=torch.uint8), torch.rand(9, 2))
    use_packed_weights(embedding, form, torch.float32, rows)
    assert isinstance(embedding, PackedEmbedding) and isinstance(embedding, Gemma3TextScaledWordEmbedding)
    tokens = torch.tensor([[1, 5], [8, 1]])
    torch.testing.assert_close(embedding(tokens), 3 * form.unpack(rows, torch.float32)[tokens])
