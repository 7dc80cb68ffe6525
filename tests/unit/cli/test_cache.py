"""Test `offload-rt cache` with the packed weights of tiny GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.commands import Cli
from support.tiny_gguf import write_tiny_gguf

from offload_rt.models import gguf_import
from offload_rt.models.loading import load_model

SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128, "num_hidden_layers": 4}


@pytest.fixture
def packed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return two GGUF files whose packed weights are cached. The first file was used most recently."""
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    files = tmp_path / "a.gguf", tmp_path / "b.gguf"
    for kind, file in zip(("Q4_1", "Q8_0"), files, strict=True):
        write_tiny_gguf(file, kind, **SHAPE)
        load_model(file, device="cpu", verify="off")
    for age, folder in enumerate(
        sorted(cache_entries(tmp_path), key=lambda each: (each / "origin").read_text(), reverse=True)
    ):
        os.utime(folder, (age, age))
    return files


def cache_entries(home: Path) -> list[Path]:
    return [each for each in (home / "cache" / "packed").iterdir() if each.is_dir()]


def test_packed_weights_are_listed_and_deleted(packed_files: tuple[Path, Path], cli: Cli, tmp_path: Path) -> None:
    listed = cli("cache")
    head, first, second = (line.split() for line in listed.out.splitlines())
    assert head == ["checkpoint", "id", "size", "last", "used"]
    assert (first[0], second[0]) == (str(packed_files[0]), str(packed_files[1]))
    sizes = [sum(file.stat().st_size for file in each.iterdir()) for each in cache_entries(tmp_path)]
    assert f"{sum(sizes) / 1024:.0f} KiB of at most 64 GiB in {tmp_path}" in listed.err
    assert "deleted" in cli("cache", "delete", first[1]).err
    assert [line.split()[0] for line in cli("cache", "list").out.splitlines()[1:]] == [str(packed_files[1])]
    assert cli("cache", "delete", str(packed_files[1])).code == 0
    assert cli("cache").out == "no packed weights\n"
    cli("cache", "delete", str(packed_files[1])).fails_with("no packed weights of", "cache list")


def test_the_cache_is_shrunk_and_cleared(packed_files: tuple[Path, Path], cli: Cli, tmp_path: Path) -> None:
    assert cli("cache", "shrink", "--limit", "1GiB").err == "nothing was deleted\n"
    size = sum(file.stat().st_size for each in cache_entries(tmp_path) for file in each.iterdir())
    # The file that was used least recently is deleted.
    assert f"deleted {packed_files[1]}" in cli("cache", "shrink", "--limit", str(size - 1)).err
    assert len(cache_entries(tmp_path)) == 1
    assert f"deleted {packed_files[0]}" in cli("cache", "clear").err and not cache_entries(tmp_path)


def test_wrong_arguments_are_refused(cli: Cli) -> None:
    cli("cache", "delete").fails_with("needs NAME")
    cli("cache", "clear", "x").fails_with("cache clear takes no NAME")
    cli("cache", "list", "--limit", "1GiB").fails_with("cache list takes no --limit")
    cli("cache", "shrink").fails_with("needs --limit")
    cli("cache", "shrink", "--limit", "many").fails_with("--limit", "is not a size")
    cli("cache", "burn").fails_with("'burn' is unknown")


def test_info_packs_no_weights(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "a.gguf", "Q8_0", **SHAPE)
    monkeypatch.setattr(gguf_import.GGUFImport, "write", lambda *_: pytest.fail("converted"))
    assert cli("info", str(tmp_path / "a.gguf"), "--context", "100").code == 0
    assert cli("cache").out == "no packed weights\n"
