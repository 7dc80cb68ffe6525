"""Test that damaged or foreign weight files are refused before torch is imported, and that errors suggest a remedy."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import edit_config, tiny_checkpoint

from offload_rt.cli.common import check_before_loading
from offload_rt.config import EngineConfig
from offload_rt.errors import ModelError


@pytest.fixture(scope="module")
def checkpoint_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = Path(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(checkpoint_files: dict[str, bytes], tmp_path: Path) -> Path:
    for name, data in checkpoint_files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def assert_refused(model: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_before_loading(str(model), EngineConfig())


def edit_header(folder: Path, **changes: Any) -> None:
    """Change entries for the first tensor in the header of model.safetensors."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    next(entry for name, entry in header.items() if name != "__metadata__").update(changes)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def write(name: str, data: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(data)


def append_bytes(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(bytes(100))


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}

DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (write("model.safetensors", b""), "model.safetensors' is empty; expected a safetensors file: download"),
    "text": (write("model.safetensors", b"<html>\nNot found " * 9), "is a text that begins with '<html> Not found"),
    "pointer": (write("model.safetensors", POINTER), "is a Git LFS pointer, not a safetensors file: `git lfs pull`"),
    "header": (write("model.safetensors", b"\x99\1\0\0\0\0\0\0{"), "it states 409 bytes of header, and the file has 9"),
    "longer": (append_bytes, "has 100 bytes more than its header states"),
    "dtype": (lambda folder: edit_header(folder, dtype="F7"), "has the unknown dtype F7.*download it again"),
    "size": (lambda folder: edit_header(folder, shape=[1, 2]), r"which is not the size of \[1, 2\] elements"),
    "config": (write("config.json", b'{"a":'), "cannot read the configuration of .*config.json is damaged .*download"),
    "no config": (write("config.json", b"[1]"), "config.json has neither model_type nor architectures"),
    "quantization": (lambda folder: edit_config(folder, quantization_config=[1]), r"quantization_config is \[1\]"),
    "no gptq": (lambda folder: edit_config(folder, quantization_config=GPTQ), r"states gptq weights, .* none \(\*.qw"),
    "index": (write("model.safetensors.index.json", b"[1]"), "expected an object with the file of each weight"),
    "shard": (
        write("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}'),
        "b.safetensors' does not exist, but the index of the checkpoint names it: download the missing file",
    ),
    "layers": (
        lambda folder: edit_config(folder, num_hidden_layers=4, layer_types=None),
        r"lacks model.layers.3.self_attn.q_proj.weight and 8 more, which config.json requires \(4 layers\)",
    ),
    "shape": (
        lambda folder: edit_config(folder, vocab_size=9),
        r"another shape for model.embed_tokens.weight than config.json states: \[2048, 64\] instead of \[9, 64\]",
    ),
    "class": (lambda folder: edit_config(folder, architectures=["NoSuchModel"]), "^NoSuchModel is not supported; sup"),
    "tokenizer": (write("tokenizer.json", b'{"version": "1.0", "model": {'), "tokenizer.json is damaged or incomplete"),
    "tokenizer's page": (write("tokenizer.json", b"<html>"), "tokenizer.json is damaged or incomplete; download it"),
    "head": (lambda folder: edit_config(folder, tie_word_embeddings=True), ""),
}
"""Damage to a checkpoint folder, and the expected error. The surplus head in the last case is not an error."""


@pytest.mark.parametrize("change", DAMAGES)
def test_damaged_folders_are_refused_before_loading(change: str, folder: Path) -> None:
    damage, message = DAMAGES[change]
    damage(folder)
    if message:
        assert_refused(folder, message)
    else:
        check_before_loading(str(folder), EngineConfig())


def test_other_weight_names_are_left_to_transformers(folder: Path) -> None:
    """transformers can also load checkpoints of a decoder that has no head."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    text = re.sub(rb'"model\.', b'"', data[8 : 8 + size])
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    check_before_loading(str(folder), EngineConfig())


def gguf_bytes(fields: dict[str, str], tensors: int = 1) -> bytes:
    """Return the bytes of a GGUF file with string metadata, and float32 tensors with one element each."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(fields))
    head += b"".join(string(key) + struct.pack("<I", 8) + string(value) for key, value in fields.items())
    head += b"".join(string(f"t{i}") + struct.pack("<IQIQ", 1, 1, 0, 32 * i) for i in range(tensors))
    return head + bytes(-len(head) % 32) + bytes(32 * tensors)


LLAMA = {"general.architecture": "llama", "llama.block_count": "1", "llama.embedding_length": "1"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty; expected a GGUF file: download or copy it again"),
        (b"hello world, this is no model", "is a text that begins with 'hello world,"),
        (POINTER, "is a Git LFS pointer, not a GGUF file: `git lfs pull`"),
        (b"GGU", "is not a GGUF file: it does not begin with GGUF; pass a GGUF file, or a folder with config.json"),
        (b"PK\3\4" * 9, "is not a GGUF file"),
        (gguf_bytes(LLAMA)[:40], "is damaged, or truncated within its header; download or copy it again"),
        (gguf_bytes(LLAMA)[:-30], "is truncated: 2 bytes are missing; download or copy it again"),
        (gguf_bytes(LLAMA, tensors=0), "has no tensors, only metadata; expected a GGUF file with the weights"),
        (gguf_bytes({}), "is not a language model, or is damaged: its header lacks general.architecture"),
        (
            gguf_bytes({"general.architecture": "clip"}),
            "is not a language model, or is damaged: its header lacks clip.block_count",
        ),
    ],
)
def test_damaged_gguf_files_are_refused_before_loading(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(data)
    assert_refused(tmp_path / "a.gguf", f"a.gguf' {re.escape(message)}")


def test_a_complete_gguf_file_passes(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf_bytes(LLAMA))
    check_before_loading(str(tmp_path / "a.gguf"), EngineConfig())
