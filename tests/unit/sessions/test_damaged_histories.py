"""Test damaged histories: a single damaged file never loses a conversation.

A session falls back to its previous history and warns about it. If no history can be read, opening the session fails,
and no new session replaces it.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from support.disk_blocks import open_store, padded_name
from support.outputs import completed
from support.sessions import take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError, SamplingParams, StoreError
from offload_rt.cli import main
from offload_rt.sessions.history import History, document_name
from offload_rt.storage.documents import Document

SHORT = SamplingParams(max_tokens=8, temperature=0)
TURNS = [tiny_prompt(150, seed=1), tiny_prompt(30, seed=2), tiny_prompt(75, seed=3)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama", dtype=torch.float32), dtype="float32", host_memory="16MiB", policy="full")


answer = partial(take_turn, params=SHORT)


def run_two_turns(llm: LLM, folder: Path, name: str = "s") -> tuple[list[int], list[int]]:
    """Run two turns, then close the session without saving it again. Return the tokens after each turn."""
    session = llm.session(name, folder)
    answer(session, TURNS[0])
    first = session.tokens
    answer(session, TURNS[1])
    second = session.tokens
    session.kv.write_out()
    session.save = session.kv.save = lambda: None  # type: ignore[method-assign]
    session.close()
    return first, second


def document_path(folder: Path, name: str = "s.doc") -> Path:
    """Return the path of a document. The stem "s" stands for the history of session "s"."""
    stem, _, suffix = name.partition(".")
    [path] = folder.glob(f"*/{document_name(stem) if stem == 's' else stem}.{suffix}")
    return path


def flip_bit(path: Path, bit: int = 803) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def with_checksum(fields: dict[str, Any]) -> bytes:
    data = json.dumps(fields).encode()
    return xxhash.xxh3_64(data).digest() + data


DAMAGES: dict[str, Callable[[Path], object]] = {
    "one bit": flip_bit,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_bytes(b"Dear diary, this is nothing of yours."),
    "gone": Path.unlink,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link": lambda path: (path.rename(path.parent / "elsewhere"), path.symlink_to(path.parent / "elsewhere")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_previous_history_replaces_a_damaged_one_with_a_warning(damage: str, llm: LLM, tmp_path: Path) -> None:
    first, _ = run_two_turns(llm, tmp_path)
    DAMAGES[damage](document_path(tmp_path))
    with pytest.warns(UserWarning, match=r"session 's' was opened in its previous version, with 1 .*session-\w+\.doc"):
        session = llm.session("s", tmp_path)
    assert session.tokens == first and len(session.turns) == 2
    expected = completed(llm.generate([first + TURNS[2]], SHORT))[0].token_ids
    assert answer(session, TURNS[2]) == expected and session.history.computed == len(first + TURNS[2] + expected) - 1
    tokens = session.tokens
    session.save()
    session.context.storage.check_integrity()
    session.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = llm.session("s", tmp_path)
        assert session.tokens == tokens, "the second open gives no warning"
        session.close()


def test_store_copied_during_an_answer_has_the_last_saved_state(llm: LLM, tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    session = llm.session("s", store)
    answer(session, TURNS[0])
    saved, events = session.tokens, session.send(TURNS[1], SHORT)
    next(events)
    [block, *_] = store.rglob("*.kv")
    shutil.copytree(store, copy)
    for half_written in copy.rglob("*.tmp"):
        half_written.unlink()  # leaves only the temporary file created below
    stale_file = (copy / block.relative_to(store)).with_suffix(".77.1.tmp")
    stale_file.write_bytes(block.read_bytes()[:1000])
    list(events)
    session.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = llm.session("s", copy)
    assert copied.tokens == saved and not stale_file.exists()
    expected = completed(llm.generate([saved + TURNS[2]], SHORT))[0].token_ids
    assert answer(copied, TURNS[2]) == expected
    copied.context.saver.flush()
    copied.context.storage.check_integrity()
    copied.close()


@pytest.mark.parametrize("damage", ["one bit", "empty", "a pipe"])
def test_error_names_the_files_if_no_history_is_intact(damage: str, llm: LLM, tmp_path: Path) -> None:
    run_two_turns(llm, tmp_path)
    DAMAGES[damage](document_path(tmp_path))
    flip_bit(document_path(tmp_path, "s.before"))
    paths = sorted(tmp_path.rglob("*"))
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"'s' cannot be opened.*session-\w+\.doc.*\.before.*or delete the session"
        ):
            llm.session("s", tmp_path)
    assert sorted(tmp_path.rglob("*")) == paths, "no file was added or renamed"
    other = llm.session("t", tmp_path)
    with pytest.raises(InputError, match="there is a session 's' already"):
        other.fork("s")
    other.close()


def test_bit_flip_after_closing_loses_no_token(llm: LLM, tmp_path: Path) -> None:
    """Closing a session stores its history twice."""
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    tokens = session.tokens
    session.close()
    flip_bit(document_path(tmp_path))
    with pytest.warns(UserWarning, match="with 1 turns"):
        session = llm.session("s", tmp_path)
    assert session.tokens == tokens
    session.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "of another format"),
        ({"colour": "blue"}, "of another format"),
        ({"tokens": "abc"}, "of another format"),
        ({"tokens": [-1] * 158}, "of another format"),
        ({"computed": 10**9}, "of another format"),
        ({"id": "../../elsewhere"}, "of another format"),
        ({"keys": ["../x"]}, "of another format"),
        ({"name": "\ud800"}, "of another format"),
        ({"decoded": [[5, 2]]}, "of another format"),
        ({"name": "t"}, "the history of another session"),
        ({"tokens": [10**6] * 300}, "the history of another session"),
    ],
)
def test_history_of_unknown_format_or_other_session_is_not_replaced(
    change: dict[str, Any], message: str, llm: LLM, tmp_path: Path
) -> None:
    run_two_turns(llm, tmp_path)
    path = document_path(tmp_path)
    record = with_checksum(json.loads(path.read_bytes()[8:]) | change)
    path.write_bytes(record)
    for _ in range(2):
        with pytest.raises(StoreError, match=message):
            llm.session("s", tmp_path)
    assert path.read_bytes() == record and not list(tmp_path.rglob("*.damaged"))


def test_deep_or_invalid_json_is_refused() -> None:
    for data in (b"[" * 100_000, b"[]", b'"x"', b"1e999", b'{"format": 2, "name": [], "model": {}}', b"\xff\xfe"):
        assert History.from_bytes(data) is None


def test_deletion_warns_of_damaged_histories_and_deletes_their_blocks(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_two_turns(llm, tmp_path)
    session = llm.session("s", tmp_path)
    session.truncate(keep_last=100)
    session.close()
    twin = llm.session("twin", tmp_path)
    answer(twin, TURNS[0])
    twin.close()
    for name in ("s.doc", "s.before"):
        flip_bit(document_path(tmp_path, name))
    assert list(tmp_path.rglob("sinks-*.doc"))
    assert main(["sessions", "list", "--store", str(tmp_path)]) == 0
    assert "damaged" in capsys.readouterr().out
    assert main(["sessions", "show", "s", "--store", str(tmp_path)]) == 2
    assert "or delete the session" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=f"'passing' was deleted; 1 other documents.*{document_name('s')}"):
        llm.session("passing", tmp_path).discard()
    twin = llm.session("twin", tmp_path)
    assert answer(twin, TURNS[1]) and twin.host.stats.computed_tokens == 0, "the blocks of the twin are not deleted"
    twin.close()
    assert main(["sessions", "delete", "twin", "--store", str(tmp_path)]) == 0
    assert document_name("s") in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.kv")) and not list(tmp_path.rglob("sinks-*"))
    assert main(["sessions", "delete", "s", "--store", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["lock"]


def test_session_list_names_damaged_histories(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_two_turns(llm, tmp_path)
    flip_bit(document_path(tmp_path))
    assert main(["sessions", "list", "--store", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "s" in out and f"{document_name('s')}.doc" in err and "the previous save" in err


def test_lost_sinks_are_recomputed_with_a_warning(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32, max_position_embeddings=256)
    llm = LLM(model, dtype="float32", host_memory="16MiB", policy="full")
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    session.truncate(keep_last=80)
    answer(session, TURNS[1])
    for path in tmp_path.rglob("sinks-*"):
        flip_bit(path)
    tokens = session.tokens
    with pytest.warns(UserWarning, match="first tokens of session 's' are lost.* are computed again"):
        found = answer(session, TURNS[2])
    assert found == completed(llm.generate([tokens + TURNS[2]], SHORT))[0].token_ids
    session.close()


# ----------------------------------------------------------------------------------------------------------- documents


class Killed(BaseException):
    """Exception that simulates the end of the process."""


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_document_is_intact_after_a_kill_before_any_system_call(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, steps = ("fsync", "replace", "link"), 0

    def refuse(*args: object) -> None:
        raise OSError(38, "Function not implemented")

    for stop in range(20):
        folder = tmp_path / str(stop)
        store, count = open_store(folder), 0
        store.documents.put(padded_name("one"), b"first")
        store.documents.put(padded_name("one"), b"second")
        with monkeypatch.context() as patch:
            for name in calls:
                real = refuse if name == "link" and not links else getattr(os, name)

                def call(*args: Any, real: Any = real, stop: int = stop, **options: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count > stop:
                        raise Killed
                    return real(*args, **options)

                patch.setattr(os, name, call)
            patch.setattr(Path, "unlink", lambda *args, **options: None)  # a killed process does not clean up
            try:
                store.documents.put(padded_name("one"), b"third")
                finished = True
            except Killed:
                finished = False
        store.close()
        reopened = open_store(folder)
        assert reopened.documents.get(padded_name("one")) in (Document(b"second"), Document(b"third"))
        assert not list(folder.rglob("*.tmp"))
        reopened.check_integrity()
        reopened.documents.put(padded_name("one"), b"fourth")
        flip_bit(document_path(folder, f"{padded_name('one')}.doc"), 70)
        last = reopened.documents.get(padded_name("one"))
        assert last is not None and last.damage and last.data in (b"second", b"third")
        reopened.close()
        steps = stop
        if finished:
            break
    assert steps >= 5, "the process was killed before every call"


def test_damaged_document_never_becomes_the_previous_one(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.documents.put(padded_name("one"), b"first")
    store.documents.put(padded_name("one"), b"second")
    flip_bit(document_path(tmp_path, f"{padded_name('one')}.doc"), 70)
    store.documents.put(padded_name("one"), b"third")
    assert len(list(tmp_path.rglob(f"{padded_name('one')}.damaged"))) == 1, "the damaged document is kept for the user"
    flip_bit(document_path(tmp_path, f"{padded_name('one')}.doc"), 70)
    last = store.documents.get(padded_name("one"))
    assert last is not None and last.data == b"first"
    store.check_integrity()
    for _ in range(2):
        store.documents.delete(padded_name("one"))
        assert store.documents.get(padded_name("one")) is None and not list(tmp_path.rglob(f"{padded_name('one')}.*"))
    store.close()


def test_huge_sparse_document_is_damaged(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.documents.put(padded_name("one"), b"first")
    with document_path(tmp_path, f"{padded_name('one')}.doc").open("r+b") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(StoreError, match=r"one-0+\.doc.* is damaged"):
        store.documents.get(padded_name("one"))
    assert list(store.documents.read_all().values()) == [None]
    store.close()


def test_crash_after_linking_leaves_no_stale_file(tmp_path: Path) -> None:
    """If `put` crashes, `.doc` and `.before` may be left as links to the same file."""
    store = open_store(tmp_path)
    store.documents.put(padded_name("one"), b"first")
    os.link(
        document_path(tmp_path, f"{padded_name('one')}.doc"),
        document_path(tmp_path, f"{padded_name('one')}.doc").with_suffix(".before"),
    )
    store.close()
    store = open_store(tmp_path)
    store.documents.put(padded_name("one"), b"second")
    store.check_integrity()
    assert not list(tmp_path.rglob("*.tmp")) and len(list(tmp_path.rglob(f"{padded_name('one')}.*"))) == 2
    flip_bit(document_path(tmp_path, f"{padded_name('one')}.doc"), 70)
    last = store.documents.get(padded_name("one"))
    assert last is not None and last.data == b"first"
    store.close()
