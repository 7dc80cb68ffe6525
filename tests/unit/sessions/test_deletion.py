"""Test deleting sessions with arbitrary names: no data stays on disk, and other sessions do not change."""

from __future__ import annotations

import os
import unicodedata
from functools import partial
from pathlib import Path

import pytest
import torch
from support.leftovers import find_leftovers
from support.sessions import take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError, SamplingParams
from offload_rt.cli import main
from offload_rt.errors import StoreError
from offload_rt.sessions.catalog import delete_stored, find_stored, read_catalog
from offload_rt.sessions.deletion import remove_session, summary_of
from offload_rt.sessions.history import History, document_name
from offload_rt.sessions.request_factory import StoredRequestFactory
from offload_rt.sessions.session import Session
from offload_rt.sessions.store import SessionStore
from offload_rt.storage import documents
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.files import DocumentContent, read_document

SHORT = SamplingParams(max_tokens=6, temperature=0)
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
NAMES = [
    "kitchen.sinks", "kitchen", "a/b", "../../up", "/etc/passwd", ".", "..", "a@llama", "lock", "x.doc", "x.before",
    "x.damaged", "x.1.1.tmp", "x.kv", "Case", "case",
    unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"),
    document_name("kitchen"), "sinks-" + "0" * 32 + "-4", "[red]x[/]", "[/]", "a\nb\x1b[2J", "%2e%2e", " ", "x" * 200,
]  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MODEL, dtype="float32", host_memory="16MiB", policy="full")


answer = partial(take_turn, params=SHORT)


def run_session(llm: LLM, folder: Path, name: str, *turns: list[int]) -> list[int]:
    """Run `turns` in a session, close it, and return its tokens."""
    session = llm.session(name, folder)
    for turn in turns:
        answer(session, turn)
    tokens = session.tokens
    session.close()
    return tokens


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_session_names_may_look_like_files_paths_or_markup(
    llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression test: deleting any session used to delete the session `kitchen.sinks` too."""
    store, tokens = tmp_path / "store", {}
    for i, name in enumerate(NAMES):
        tokens[name] = run_session(llm, store, name, tiny_prompt(5, seed=i))
    assert os.listdir(tmp_path) == ["store"]
    assert main(["sessions", "list", "--store", str(store)]) == 0
    listed = capsys.readouterr().out
    assert len(listed.splitlines()) == len(NAMES) + 1 and "\x1b" not in listed and "[red]x[/]" in listed
    for name in NAMES[::2]:
        llm.session(name, store).discard() if len(name) % 2 else delete_stored(store, name)
        del tokens[name]
        assert {one.history.name: one.history.tokens for one in read_catalog(store).sessions} == tokens
    for name, known in tokens.items():
        with llm.session(name, store) as session:
            assert session.tokens == known


@pytest.mark.parametrize("name", ["", "x" * 201, "\ud800", 5])
def test_invalid_names_are_refused(name: object, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 to 200 characters"):
        llm.session(name, tmp_path)  # type: ignore[arg-type]


def test_model_option_selects_between_sessions_of_equal_name(llm: LLM, tmp_path: Path) -> None:
    other = LLM(tiny_model("qwen2", num_hidden_layers=1), host_memory="16MiB", policy="full")
    for each_llm in (llm, other):
        run_session(each_llm, tmp_path, "s", tiny_prompt(5))
    run_session(llm, tmp_path, "unrelated", tiny_prompt(5))
    with pytest.raises(InputError, match=r"more than one session 's' in .*--model \([^']*\)$"):
        find_stored(tmp_path, "s")
    assert delete_stored(tmp_path, "s", other.runner.model.name).model == other.runner.model.name
    assert find_stored(tmp_path, "s").history.model == llm.runner.model.name


@pytest.mark.parametrize("method", ["discard", "command"])
def test_no_data_of_a_deleted_session_is_left(method: str, llm: LLM, tmp_path: Path) -> None:
    kept = run_session(llm, tmp_path, "kept", tiny_prompt(100, seed=1))
    session = llm.session("gone", tmp_path)
    seen = []
    for seed in (2, 3):
        seen += [*tiny_prompt(90, seed=seed), *answer(session, tiny_prompt(90, seed=seed))]
    session.truncate(keep_last=80)
    events = session.send(tiny_prompt(90, seed=4), SHORT)
    next(events)
    events.close()
    seen += tiny_prompt(90, seed=4)
    # This edit leaves unreferenced blocks behind.
    edited = list(session.extend(tiny_prompt(80, seed=5), SHORT, replaced=len(session.tokens) - 70))
    seen += [*tiny_prompt(80, seed=5), *(event.token_id for event in edited)]
    session.history.turns.append(("user", "My secret is a blue “Fahrrad”."))
    session.save()
    session.close()
    [document] = tmp_path.glob(f"*/{document_name('gone')}.doc")
    document.with_suffix(".damaged").write_bytes(document.read_bytes())
    document.with_name("session-" + "f" * 32 + ".doc").write_bytes(document.read_bytes())  # a copy made by the user
    assert find_leftovers(tmp_path, seen, [kept], ["Fahrrad"]) and list(tmp_path.rglob("sinks-*"))
    if method == "discard":
        llm.session("gone", tmp_path).discard()
    else:
        assert main(["sessions", "delete", "gone", "--store", str(tmp_path)]) == 0
    assert find_leftovers(tmp_path, seen, [kept], ["Fahrrad"]) == {}
    session = llm.session("kept", tmp_path)
    assert set(files(tmp_path)) == {"lock", f"{session.history.document}.doc", f"{session.history.document}.before"} | {
        f"{key}.kv" for key in session.history.keys
    }, "only blocks of the remaining session are left"
    assert session.tokens == kept and answer(session, tiny_prompt(9)) and session.host.stats.computed_tokens == 0
    session.close()


def copy_damaged_history(folder: Path, name: str, other: str, suffix: str) -> Path:
    """Copy the history of session `name`, minus its last byte, to a file of session `other`. Return the new path."""
    [document] = folder.glob(f"*/{document_name(name)}.doc")
    copy = document.with_name(f"{document_name(other)}{suffix}")
    copy.write_bytes(document.read_bytes()[:-1])
    return copy


@pytest.mark.parametrize("suffix", [".doc", ".before", ".damaged"])
def test_deletion_names_damaged_files_that_it_keeps(suffix: str, llm: LLM, tmp_path: Path) -> None:
    """A damaged file of another session may contain text from the deleted session."""
    seen = run_session(llm, tmp_path, "gone", tiny_prompt(70))
    kept = run_session(llm, tmp_path, "kept", tiny_prompt(9, seed=1), tiny_prompt(5, seed=2))
    copy = copy_damaged_history(tmp_path, "gone", "kept", suffix)
    removed = delete_stored(tmp_path, "gone").removed
    assert list(find_leftovers(tmp_path, seen, [kept])) == [copy]
    assert removed.kept == (copy.name,) and copy.name in removed.note and not removed.unreadable
    assert delete_stored(tmp_path, "kept").removed.note == "" and files(tmp_path) == ["lock"]


@pytest.mark.parametrize("damaged", [False, True])
def test_history_renamed_to_a_block_of_another_session_is_deleted(damaged: bool, llm: LLM, tmp_path: Path) -> None:
    seen = run_session(llm, tmp_path, "gone", tiny_prompt(70))
    kept = run_session(llm, tmp_path, "kept", tiny_prompt(70, seed=1))
    block = find_stored(tmp_path, "kept").history.keys[0]
    [path] = tmp_path.rglob(f"{block}.kv")
    [document] = tmp_path.glob(f"*/{document_name('gone')}.doc")
    path.write_bytes(document.read_bytes()[: -1 if damaged else None])
    removed = delete_stored(tmp_path, "gone").removed
    assert find_leftovers(tmp_path, seen, [kept]) == {} and not removed.note and not path.exists()
    with llm.session("kept", tmp_path) as session:
        assert session.tokens == kept and answer(session, tiny_prompt(9))


def test_commands_name_each_unreadable_file_once(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("gone", "damaged"):
        run_session(llm, tmp_path, name, tiny_prompt(70))
    damaged = list(tmp_path.glob(f"*/{document_name('damaged')}.*"))
    for path in damaged:
        path.write_bytes(b"damaged")
    for command, names in (
        (["clear"], [document_name("damaged")]),
        (["delete", "gone"], [one.name for one in damaged]),
    ):
        assert main(["sessions", *command, "--store", str(tmp_path)]) == 0
        err = capsys.readouterr().err
        assert "1 other documents cannot be read" in err and err.count(document_name("damaged")) == len(names)
        assert all(err.count(name) == 1 for name in names)


@pytest.mark.parametrize("opened", [True, False])
def test_engine_warns_of_damaged_files_that_a_deletion_keeps(opened: bool, llm: LLM, tmp_path: Path) -> None:
    for name in ("gone", "kept"):
        run_session(llm, tmp_path, name, tiny_prompt(70))
    copy = copy_damaged_history(tmp_path, "gone", "kept", ".before")
    store = SessionStore(llm.runner, tmp_path)
    sessions = StoredRequestFactory(store, [].append)
    if opened:
        store.open("gone")
    with pytest.warns(UserWarning, match=f"'gone' was deleted; files that cannot be read were kept .{copy.name}"):
        sessions.delete("gone")
    sessions.close()


def test_blocks_of_forks_stay_until_the_last_fork_is_deleted(llm: LLM, tmp_path: Path) -> None:
    def truncated_session(folder: Path) -> Session:
        session = llm.session("one", folder)
        answer(session, tiny_prompt(150))
        session.truncate(keep_last=100)
        answer(session, tiny_prompt(60, seed=2))
        return session

    with truncated_session(tmp_path / "without forks") as reference:
        expected = answer(reference, tiny_prompt(9))
    folder = tmp_path / "forks"
    session = truncated_session(folder)
    twin = session.fork("two")
    session.discard()
    assert list(folder.rglob("sinks-*")), "the twin needs the originals too"
    twin.close()
    twin = llm.session("two", folder)
    assert answer(twin, tiny_prompt(9)) == expected and twin.host.stats.computed_tokens == 0
    twin.discard()
    assert files(folder) == ["lock"]


def test_deletion_keeps_unsaved_blocks_of_an_open_session(llm: LLM, tmp_path: Path) -> None:
    """The blocks of a running answer are not listed in any history yet."""
    other, session = llm.session("other", tmp_path), llm.session("s", tmp_path)
    answer(other, tiny_prompt(80, seed=7))
    events = session.send(tiny_prompt(150), SamplingParams(max_tokens=80, temperature=0))
    for _ in range(70):
        next(events)
    session.context.saver.flush()
    paths = set(tmp_path.rglob("*.kv"))
    other.discard()
    assert len(paths & set(tmp_path.rglob("*.kv"))) >= 3
    list(events)
    tokens = session.tokens
    session.close()
    again = llm.session("s", tmp_path)
    assert again.tokens == tokens and answer(again, tiny_prompt(9)) and again.host.stats.computed_tokens == 0
    again.close()


def test_second_deletion_reads_only_changed_histories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = DiskStore(tmp_path, "deletions", layers=1), list[str]()
    namespace = store.root.hex()

    def recording_read(path: Path) -> DocumentContent:
        read.append(path.name)
        return read_document(path)

    def write(name: str, block: str) -> None:
        store.documents.put(document_name(name), History(name, "model", keys=[block * 64]).to_bytes())

    for name in "abcd":
        write(name, "1")
    monkeypatch.setattr(documents, "read_document", recording_read)
    remove_session(store, namespace, document_name("a"))  # the files are too new to be cached
    monkeypatch.setattr(documents, "_SETTLED_NS", -1)
    for _ in range(2):
        read.clear()
        remove_session(store, namespace, document_name("none"))
    assert not read
    write("b", "2")
    retained: list[set[bytes]] = []
    monkeypatch.setattr(store, "retain", lambda keys, *args, **options: retained.append(set(keys)) or 0)
    remove_session(store, namespace, document_name("c"))
    assert set(read) == {f"{document_name('b')}.doc", f"{document_name('b')}.before"}
    assert retained == [{bytes.fromhex("1" * 64), bytes.fromhex("2" * 64)}]
    assert set(store.documents.summaries(namespace, summary_of)) == {document_name("b"), document_name("d")}
    store.close()


def test_session_deleted_during_an_answer_writes_nothing_afterwards(llm: LLM, tmp_path: Path) -> None:
    session = llm.session("s", tmp_path)
    events = session.send(tiny_prompt(150), SamplingParams(max_tokens=80, temperature=0))
    next(events)
    session.discard()
    assert list(events) == [] and files(tmp_path) == ["lock"]


def test_file_that_cannot_be_deleted_is_an_error(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_session(llm, tmp_path, "s", tiny_prompt(70))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".kv":
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.raises(StoreError, match=r"cannot delete .*\.kv.*still in the store"):
            delete_stored(tmp_path, "s")
    assert find_stored(tmp_path, "s").history.tokens, "the deletion can be repeated"
    delete_stored(tmp_path, "s")
    assert files(tmp_path) == ["lock"]


def test_server_deletes_damaged_sessions(llm: LLM, tmp_path: Path) -> None:
    store = SessionStore(llm.runner, tmp_path)
    sessions = StoredRequestFactory(store, [].append)
    for name in ("damaged", "stored", "open"):
        session = store.open(name)
        answer(session, tiny_prompt(70))
        if name != "open":
            session.close()
    for path in tmp_path.glob(f"*/{document_name('damaged')}.*"):
        path.write_bytes(b"damaged")
    for name in ("damaged", "stored", "open", "none"):
        sessions.delete(name)
    sessions.close()
    assert files(tmp_path) == ["lock"]
