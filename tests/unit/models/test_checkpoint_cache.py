"""Test cached fingerprints and shapes of checkpoints: they are used unless a file, option or package has changed."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import architecture
from support.tiny_models import edit_config, tiny_checkpoint, tiny_model

from offload_rt.models import checkpoint_cache, loading, shape
from offload_rt.models import fingerprint as fingerprint_module
from offload_rt.models.fingerprint import fingerprint
from offload_rt.models.loading import LoadedModel, load_model
from offload_rt.models.shape import load_shape


class FingerprintCounter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, model: Any) -> str:
        self.count += 1
        return fingerprint(model)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FingerprintCounter:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint_cache, "SETTLED_SECONDS", 0.0)
    counted = FingerprintCounter()
    monkeypatch.setattr(fingerprint_module, "fingerprint", counted)
    return counted


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_checkpoint(tmp_path / "tiny", "llama"))


def load(folder: Path, **options: Any) -> LoadedModel:
    return load_model(folder, device="cpu", verify="off", **options)


def edit_embedding(folder: Path) -> None:
    """Change one element in place, so that the file keeps its size, inode and mtime."""
    path = folder / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    tensors["model.embed_tokens.weight"][-1, -1] += 0.5
    save_file(tensors, folder.parent / "changed", metadata={"format": "pt"})
    with path.open("r+b") as file:
        file.write((folder.parent / "changed").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (before.st_size, before.st_ino, before.st_mtime_ns) == (after.st_size, after.st_ino, after.st_mtime_ns)


def test_second_load_uses_the_cached_fingerprint(folder: Path, counter: FingerprintCounter, tmp_path: Path) -> None:
    first, second = load(folder).fingerprint, load(folder).fingerprint
    assert first == second == fingerprint(tiny_model("llama", vocab_size=2048))
    assert counter.count == 1
    [entry] = (tmp_path / "cache" / "fingerprints").iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600 and stat.S_IMODE(entry.parent.stat().st_mode) == 0o700


def replace_weights(folder: Path) -> None:
    other = Path(tiny_checkpoint(folder.parent / "other", "llama", seed=1))
    os.replace(other / "model.safetensors", folder / "model.safetensors")


@pytest.mark.parametrize(
    "change", [edit_embedding, replace_weights, lambda folder: edit_config(folder, rms_norm_eps=0.01)]
)
def test_changed_files_have_another_fingerprint(
    change: Callable[[Path], None], folder: Path, counter: FingerprintCounter
) -> None:
    before = load(folder)
    change(folder)
    assert load(folder).fingerprint != before.fingerprint and counter.count == 2


def test_cache_key_includes_the_dtype(folder: Path, counter: FingerprintCounter) -> None:
    assert load(folder).fingerprint != load(folder, dtype="bfloat16").fingerprint  # rounding changes the model
    assert counter.count == 2


def test_shards_in_other_folders_are_checked(folder: Path, counter: FingerprintCounter) -> None:
    tiny_model("llama", vocab_size=2048).save_pretrained(folder, max_shard_size="200kB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    index = folder / "model.safetensors.index.json"
    index_data = json.loads(index.read_text())
    name = index_data["weight_map"]["model.embed_tokens.weight"]
    (folder / "parts").mkdir()
    os.replace(folder / name, folder / "parts" / name)
    index_data["weight_map"] = {
        key: f"parts/{own}" if own == name else own for key, own in index_data["weight_map"].items()
    }
    index.write_text(json.dumps(index_data))
    before = load(folder)
    tensors = load_file(folder / "parts" / name)
    tensors["model.embed_tokens.weight"][0, 0] += 0.5
    save_file(tensors, folder / "parts" / name, metadata={"format": "pt"})
    assert load(folder).fingerprint != before.fingerprint and counter.count == 2


@pytest.mark.parametrize("step", [(fingerprint_module, "fingerprint"), (loading, "read_weights")])
def test_files_that_change_during_a_load_are_not_cached(
    step: tuple[Any, str], folder: Path, counter: FingerprintCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(*step)

    def change_files_afterwards(*args: Any, **named: Any) -> Any:
        result = original(*args, **named)
        replace_weights(folder)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(*step, change_files_afterwards)
        before = load(folder)
    assert not (tmp_path / "cache" / "fingerprints").exists()
    assert load(folder).fingerprint != before.fingerprint


def test_files_that_have_just_been_written_are_not_cached(
    folder: Path, counter: FingerprintCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If such a file changes again within the clock's resolution, all its timestamps may stay the same."""
    monkeypatch.setattr(checkpoint_cache, "SETTLED_SECONDS", 60.0)
    load(folder)
    assert not (tmp_path / "cache" / "fingerprints").exists()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 61 * 10**9)
    load(folder)
    load(folder)
    assert counter.count == 2


@pytest.mark.parametrize("content", [b"", b"x" * 64, b"0" * 63, b"0" * 65, b"\xff" * 64, b"0" * 64 + b"\n"])
def test_damaged_fingerprint_is_replaced(
    folder: Path, counter: FingerprintCounter, tmp_path: Path, content: bytes
) -> None:
    expected = load(folder).fingerprint
    [entry] = (tmp_path / "cache" / "fingerprints").iterdir()
    entry.write_bytes(content)
    assert load(folder).fingerprint == expected
    assert counter.count == 2 and entry.read_text() == expected


def test_unwritable_cache_is_no_error(folder: Path, counter: FingerprintCounter, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert load(folder).fingerprint == load(folder).fingerprint
    assert counter.count == 2


@pytest.fixture
def built_skeletons(counter: FingerprintCounter, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of checkpoints for which `load_shape` builds a model without weights."""
    built: list[str] = []
    original = shape.build_skeleton

    def build(source: Any, *args: Any) -> Any:
        built.append(source.name_or_path)
        return original(source, *args)

    monkeypatch.setattr(shape, "build_skeleton", build)
    monkeypatch.setattr(shape, "plain_shape", lambda source: None)  # needs no cache
    return built


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "qwen3_next"])
def test_second_load_shape_builds_no_model(name: str, tmp_path: Path, built_skeletons: list[str]) -> None:
    architecture(name).save_pretrained(tmp_path / "model")
    first = load_shape(tmp_path / "model", device="cpu")
    assert load_shape(tmp_path / "model", device="cpu") == first and len(built_skeletons) == 1
    assert load_shape(tmp_path / "model", device="cpu", dtype="float64") != first and len(built_skeletons) == 2
    edit_config(tmp_path / "model", max_position_embeddings=77)
    assert load_shape(tmp_path / "model", device="cpu").geometry.max_positions == 77 and len(built_skeletons) == 3


def test_shape_is_computed_again_with_another_package_version(
    folder: Path, built_skeletons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for versions in ({}, {"gguf": "1"}, {"gguf": None}, {"gguf": None}):
        monkeypatch.setattr(shape, "installed_version", versions.get)
        load_shape(folder)
    assert len(built_skeletons) == 2


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b"\xff"])
def test_damaged_shape_is_replaced(folder: Path, built_skeletons: list[str], tmp_path: Path, content: bytes) -> None:
    expected = load_shape(folder)
    [entry] = (tmp_path / "cache" / "shapes").iterdir()
    text = entry.read_text()
    entry.write_bytes(content)
    assert load_shape(folder) == expected
    assert len(built_skeletons) == 2 and entry.read_text() == text


def test_fingerprint_of_a_loaded_model_is_not_cached(
    counter: FingerprintCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is unknown from which files the model was loaded, and they may have changed."""
    monkeypatch.setattr(loading, "fingerprint", counter)
    model = tiny_model("llama", dtype=torch.float32)
    for _ in range(2):
        assert load_model(model, verify="off").fingerprint == fingerprint(model)
    assert counter.count == 2 and not (tmp_path / "cache" / "fingerprints").exists()
