"""Test models from GGUF files, and the default dtype on a CPU."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.outputs import completed
from support.tiny_gguf import CHAT_TEMPLATE, END, write_tiny_gguf, write_tiny_gpt2_gguf
from support.tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.errors import MemoryLimitError, ModelError
from offload_rt.models import checkpoint, loading, registry
from offload_rt.models.fingerprint import fingerprint
from offload_rt.models.gguf_header import fast_gguf, read_header
from offload_rt.models.loading import load_model
from offload_rt.models.shape import load_shape
from offload_rt.models.source import ModelSource, find_source

REAL = Path(os.environ.get("OFFLOAD_RT_MODELS") or Path.home() / ".cache" / "offload-rt-models")


@pytest.fixture(scope="module")
def gguf_and_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_tiny_gguf(path)


@pytest.fixture(scope="module")
def loaded_model(gguf_and_model: tuple[Path, Any]) -> Any:
    return load_model(gguf_and_model[0], device="cpu", dtype="float32")


def test_loaded_file_equals_the_written_model(gguf_and_model: tuple[Path, Any], loaded_model: Any) -> None:
    path, model = gguf_and_model
    assert loaded_model.fingerprint == fingerprint(model)
    assert loaded_model.name == str(path)
    assert loaded_model.eos_token_ids == {model.config.eos_token_id}
    llm, own = LLM(path, dtype="float32", policy="full", host_memory="4MiB"), LLM(model, host_memory="4MiB")
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    assert (
        completed(llm.generate([[5, 9, 11]], greedy))[0].token_ids
        == completed(own.generate([[5, 9, 11]], greedy))[0].token_ids
    )


def test_gguf_blocks_are_dequantised_with_a_warning(gguf_and_model: tuple[Path, Any], loaded_model: Any) -> None:
    """transformers gives no warning when it dequantises this architecture."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    path = gguf_and_model[0]
    gguf_config = transformers.GgufConfig(dequantize=False)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=gguf_config, dtype=torch.float32
    )
    with pytest.warns(
        UserWarning, match=r"the weights of this GGUF file are dequantised; they stay packed if you pass the"
    ):
        given = load_model(model)
    assert given.fingerprint == loaded_model.fingerprint
    assert load_shape(model).packing is None


def test_info_notes_dequantised_gguf(gguf_and_model: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(gguf_and_model[0]), "--context", "100"]) == 0
    assert "Note: the weights of this GGUF file are dequantised" in capsys.readouterr().out


def test_tokenizer_and_chat_template_come_from_the_file(loaded_model: Any) -> None:
    assert loaded_model.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded_model.tokenizer.decode(loaded_model.tokenizer.encode("he the")) == "he the"
    assert loaded_model.tokenizer.eos_token == END


def test_shape_from_the_header_equals_the_loaded_model(gguf_and_model: tuple[Path, Any], loaded_model: Any) -> None:
    shape = load_shape(gguf_and_model[0], device="cpu", dtype="float32")
    assert (shape.geometry, shape.weight_bytes) == (loaded_model.adapter.geometry, loaded_model.weight_bytes)


def test_fast_gguf_blocks_other_threads() -> None:
    original, entered = gguf.GGUFReader, threading.Event()

    def read() -> None:
        with fast_gguf():
            entered.set()

    other = threading.Thread(target=read)
    with fast_gguf(), fast_gguf():
        other.start()
        assert not entered.wait(0.1) and gguf.GGUFReader is not original
    other.join(10)
    assert entered.is_set() and gguf.GGUFReader is original


def test_gpt2_files_are_dequantised(tmp_path: Path) -> None:
    write_tiny_gpt2_gguf(tmp_path / "model.gguf")
    loaded = load_model(tmp_path / "model.gguf")
    assert loaded.fingerprint == load_model(tmp_path / "model.gguf", quantize="none").fingerprint
    assert load_shape(tmp_path / "model.gguf").weight_bytes == loaded.weight_bytes


def test_folder_with_one_gguf_file_is_a_model(gguf_and_model: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copy(gguf_and_model[0], tmp_path / "a.gguf")
    assert find_source(tmp_path) == ModelSource(str(tmp_path), "a.gguf") == find_source(tmp_path / "a.gguf")
    shutil.copy(gguf_and_model[0], tmp_path / "b.GGUF")
    with pytest.raises(ModelError, match=r"holds 2 GGUF files \(a\.gguf, b\.GGUF"):
        find_source(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert find_source(tmp_path) == ModelSource(str(tmp_path))


def test_hub_ids_and_paths_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_source("owner/name/file-q4.gguf") == ModelSource("owner/name", "file-q4.gguf")
    assert find_source("owner/name/sub/file.gguf") == ModelSource("owner/name", "sub/file.gguf")
    assert find_source("owner/name") == ModelSource("owner/name")
    for name in ("nowhere.gguf/x/y", "./a/b/c.gguf", "/a/b/c.gguf", "../b/c.gguf", "a/c.gguf/"):
        with pytest.raises(ModelError, match="does not exist"):
            find_source(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()  # so the name is a path, not a hub id
    with pytest.raises(ModelError, match=r"model file 'owner/name/file\.gguf' does not exist"):
        find_source("owner/name/file.gguf")


def test_missing_package_is_named_in_one_line(
    gguf_and_model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    with pytest.raises(ModelError, match=r"tiny\.gguf' needs the package gguf: pip install 'gguf>=") as caught:
        load_model(gguf_and_model[0], device="cpu")
    assert "\n" not in str(caught.value)


def test_unsupported_architecture_is_reported_from_the_header(
    gguf_and_model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_adapters", {"LlamaForCausalLM": "none"})
    monkeypatch.setattr(loading, "read_weights", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(ModelError, match=r"^Qwen2ForCausalLM is not supported: it is not a tested architecture"):
        load_model(gguf_and_model[0], device="cpu", verify="off")


def test_out_of_memory_during_loading_is_a_memory_limit_error(
    gguf_and_model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_out_of_memory(*given: Any, **named: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate\n2 GiB")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raise_out_of_memory)
    with pytest.raises(MemoryLimitError, match=r"the device does not have enough memory \(Tried to allocate 2 GiB\)"):
        load_model(gguf_and_model[0], device="cpu")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"GGUX" + data[4:], "is not a GGUF file"),
        (lambda data: data[:600], "is damaged, or truncated within its header"),
        (lambda data: data[:-5000], r"is truncated: [45],\d\d\d bytes are missing"),
    ],
)
def test_damaged_file_is_refused_before_torch_is_imported(
    gguf_and_model: tuple[Path, Any], damage: Any, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(gguf_and_model[0].read_bytes()))
    with pytest.raises(ModelError, match=rf"bad\.gguf' {message}"):
        load_model(path, device="cpu")
    code = "import sys; from offload_rt.cli import main; main(['info', sys.argv[1]]); assert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert re.search(rf"bad\.gguf' {message}", found.stderr) and not found.returncode


def test_header_reader_equals_the_gguf_package(gguf_and_model: tuple[Path, Any], tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, kind in gguf.GGUFValueType.__members__.items():
        if name != "ARRAY":
            writer.add_key_value(name, "ä" if name == "STRING" else 1, kind)
    writer.add_array("strings", ["a", "", "ü"])
    writer.add_array("numbers", [1, -2])
    writer.add_array("floats", [0.5])
    writer.add_tensor("half", torch.arange(6).half().view(2, 3).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for path in (tmp_path / "a.gguf", gguf_and_model[0]):
        own, reference = read_header(path), gguf.GGUFReader(path)
        theirs = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
        assert own.fields.keys() == theirs.keys()
        for name, field in theirs.items():
            expected = [field.parts[i].tolist() for i in field.data]
            assert own.fields[name].types == field.types
            assert [list(own.fields[name].parts[i]) for i in own.fields[name].data] == expected
        for tensor, other in zip(own.tensors, reference.tensors, strict=True):
            assert (tensor.name, tensor.tensor_type, list(tensor.shape)) == (
                other.name,
                other.tensor_type,
                other.shape.tolist(),
            )
            assert np.array_equal(tensor.data, other.data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", *(["qwen"] if "OFFLOAD_RT_STRESS" in os.environ else [])])
def test_shape_of_real_gguf_files_equals_their_checkpoints(name: str) -> None:
    if not (REAL / f"{name}.gguf").exists() or not (REAL / name).exists():
        pytest.skip(f"{name} is not among the downloaded models")
    assert load_shape(REAL / f"{name}.gguf", device="cpu", dtype="bfloat16", quantize="none") == load_shape(
        REAL / name, device="cpu", dtype="bfloat16"
    )


@pytest.mark.parametrize("multiplies", [True, False])
def test_default_dtype_on_a_cpu(multiplies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "computes_bfloat16", lambda: multiplies)
    for own in (torch.bfloat16, torch.float16, torch.float32):
        tiny_model("llama", dtype=own).save_pretrained(tmp_path)
        taken = torch.bfloat16 if multiplies and own != torch.float32 else torch.float32
        assert load_shape(tmp_path, device="cpu").dtype == taken
    # bundled models use float32 on every processor
    assert load_shape("reference", device="cpu").dtype == torch.float32
