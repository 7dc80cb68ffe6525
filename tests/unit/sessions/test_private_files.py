"""Test atomic writes and file modes: with any umask, only the owner can access text, tokens, KV and keys."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.disk_blocks import open_store, padded_name, save
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.kv_cache.disk.direct_file import DirectFile
from offload_rt.server.documents import DocumentCache, digest
from offload_rt.storage.naming import NamedBlock
from offload_rt.utils.atomic_files import write_atomic
from offload_rt.utils.private_files import make_private_folder, open_private


@pytest.fixture(params=[0o000, 0o777], ids=["umask 000", "umask 777"], autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder: Path) -> set[str]:
    """Return the modes of `folder` and everything below it, such as "0700 folder" or "0600 file"."""
    result = set()
    for path in (folder, *folder.rglob("*")):
        status = path.lstat()
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
        result.add(f"{stat.S_IMODE(status.st_mode):04o} {kind}")
    return result


PRIVATE = {"0700 folder", "0600 file"}


def test_all_files_of_a_store_are_private(tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama", dtype=torch.float32), dtype="float32", host_memory="16MiB", policy="full")
    with llm.session("s", tmp_path / "new" / "store") as session:
        list(session.send(tiny_prompt(150), SamplingParams(max_tokens=3, temperature=0)))
        session.truncate(keep_last=80)
        session.context.saver.flush()  # listing fails if a file is renamed during it
        assert modes(tmp_path / "new") == PRIVATE
        temporaries = []
        for stem in (b"k" * 32, b"l" * 32):
            writer = session.context.storage.begin(NamedBlock(0, stem, "exact", bytes(64 * 8)), 512)
            assert writer is not None
            temporaries += list(tmp_path.rglob("*.tmp"))
            assert modes(tmp_path / "new") == PRIVATE
            writer.abort()
        assert temporaries
    assert modes(tmp_path / "new") == PRIVATE


def test_opening_a_store_makes_its_files_private(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    save(store, 1)
    store.documents.put(padded_name("one"), b"text")
    store.documents.put(padded_name("one"), b"more")
    store.close()
    grant_full_access(tmp_path / "store")
    open_store(tmp_path / "store").close()
    assert modes(tmp_path / "store") == PRIVATE


def test_folder_and_files_of_the_user_keep_their_modes(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "mine")
    os.chmod(tmp_path / "mine", 0o755)
    (tmp_path / "mine" / "notes.txt").touch()
    os.chmod(tmp_path / "mine" / "notes.txt", 0o644)
    store = open_store(tmp_path / "mine")
    save(store, 1)
    store.close()
    assert modes(tmp_path / "mine") == PRIVATE | {"0755 folder", "0644 file"}


def test_document_cache_is_private_and_ignores_other_files(tmp_path: Path) -> None:
    documents, name = DocumentCache(tmp_path / "server" / "conversations"), digest("a")
    documents.put(name, {"owner": "x"}, ["text"])
    folder = tmp_path / "server" / "conversations"
    assert modes(tmp_path / "server") == PRIVATE
    grant_full_access(folder)
    os.mkfifo(folder / f"{digest('b')}.json")
    (folder / f"{digest('c')}.json").symlink_to(folder / f"{name}.json")
    (folder / f"{digest('d')}.tmp").write_text("text of a killed server")
    (folder / f"{name}.{'0' * 32}.tmp").write_text("text of a killed server, a moment ago")
    os.chmod(folder / f"{name}.{'0' * 32}.tmp", 0o600)
    os.utime(folder / f"{digest('d')}.tmp", (0, 0))
    (folder / "kitchen.json").write_text(json.dumps({"owner": "x"}))
    reopened = DocumentCache(folder)
    assert list(reopened.heads()) == [name] and reopened.body(name) == ["text"]
    assert reopened.head(digest("b")) is None and reopened.body(digest("b")) is None
    assert not DocumentCache(folder, ("owner", "id")).heads(), "a head without a required field is ignored"
    reopened.delete(name)
    assert {path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()} == {"kitchen.json"}


def test_unnamed_files_are_private_and_links_are_refused(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "disk")
    assert modes(tmp_path / "disk") == {"0700 folder"}
    assert stat.S_IMODE(os.fstat(file.handle).st_mode) & 0o077 == 0
    file.close()
    assert not make_private_folder(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "x")
    with pytest.raises(OSError, match="symbolic link"):
        open_private(tmp_path / "link", os.O_WRONLY | os.O_CREAT)


@pytest.mark.parametrize("private", [True, False])
def test_atomic_write_replaces_the_file_or_does_not_change_it(
    private: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.json"
    os.umask(0o022)
    for data in (b"old", b"newer"):
        write_atomic(path, data, private=private)
        assert path.read_bytes() == data and os.listdir(tmp_path) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == (0o600 if private else 0o644)
    write_atomic(path, b"other", private=private, keep=True)
    write_atomic(tmp_path / "first", b"first", private=private, keep=True)
    assert path.read_bytes() == b"newer" and (tmp_path / "first").read_bytes() == b"first"
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, raise_no_space)
            with pytest.raises(OSError, match="No space"):
                write_atomic(path, b"other", private=private)
    assert path.read_bytes() == b"newer" and sorted(os.listdir(tmp_path)) == ["first", path.name]


def test_atomic_write_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", raise_no_space)
    for data in (b"first", b"other"):
        write_atomic(tmp_path / "key", data, keep=True)
    assert (tmp_path / "key").read_bytes() == b"first" and os.listdir(tmp_path) == ["key"]
    assert modes(tmp_path / "key") == {"0600 file"}
    monkeypatch.setattr(os, "replace", raise_no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "second", b"first", keep=True)
    assert os.listdir(tmp_path) == ["key"], "no empty file is left"


def raise_no_space(*args: object) -> None:
    raise OSError(28, "No space left on device")


def grant_full_access(folder: Path) -> None:
    """Give all users full access, as in stores written by earlier versions."""
    for path in (folder, *folder.rglob("*")):
        os.chmod(path, 0o777)
    assert modes(folder) <= {"0777 folder", "0777 file"}
