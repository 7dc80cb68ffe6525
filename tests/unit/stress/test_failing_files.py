"""Test failing file system calls: after a restart, answers are correct and previously saved data is intact.

In `make stress PART=faults`, every call fails once alone, and once together with all later calls.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.failing_files import ERRORS, FailingFiles
from support.tiny_models import assert_greedy, tiny_model, tiny_prompt

from offload_rt import LLM, OffloadError, SamplingParams
from offload_rt.errors import StoreError
from offload_rt.sessions.history import document_name
from offload_rt.sessions.session import Session
from offload_rt.storage.documents import DocumentStore

ALL_CALLS = "OFFLOAD_RT_STRESS" in os.environ
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
SHORT = SamplingParams(max_tokens=3, temperature=0)
TURNS = [tiny_prompt(70, seed=1), tiny_prompt(20, seed=2), tiny_prompt(70, seed=3), tiny_prompt(9, seed=4)]


def make_llm() -> LLM:
    return LLM(MODEL, dtype="float32", host_memory="2MiB", policy="full")


@pytest.fixture(scope="module")
def saved_session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("saved") / "store"
    with make_llm() as llm:
        session = llm.session("ada", folder)
        take_turn(session, TURNS[0])
        tokens = session.tokens
    return folder, tokens


def take_turn(session: Session, turn: list[int]) -> list[int]:
    before = session.tokens
    answer_tokens = [event.token_id for event in session.send(turn, SHORT)]
    if not session.history.shift:
        assert_greedy(MODEL, before + turn, answer_tokens)
    session.check_integrity()
    return answer_tokens


def run_session(folder: Path) -> list[list[int]]:
    """Return the session's tokens after each completed step."""
    known: list[list[int]] = []
    llm = make_llm()
    try:
        session = llm.session("ada", folder)
        known.append(session.tokens)
        for turn in TURNS[1:3]:
            with suppress(StoreError):  # the turn was answered, but its history could not be written
                take_turn(session, turn)
            known.append(session.tokens)
        with suppress(OffloadError):
            take_turn(session.fork("bob"), TURNS[3])
        session.save()
    except StoreError:
        pass
    finally:
        with suppress(StoreError):
            llm.close()
        llm.runner.check_integrity()
    return known


def check_next_start(folder: Path, saved_tokens: list[int], known: list[list[int]]) -> None:
    """Check that the session has the saved tokens or a known later state, and that it can be continued."""
    with make_llm() as llm:
        session = llm.session("ada", folder)
        assert session.tokens == saved_tokens or session.tokens in known
        take_turn(session, TURNS[3])
        with suppress(StoreError):
            take_turn(llm.session("bob", folder), TURNS[3])
    session.context.storage.check_integrity()
    assert not list(folder.rglob("*.tmp"))


def record_calls(saved_session: Path, place: Path) -> list[str]:
    shutil.copytree(saved_session, place)
    with FailingFiles(place, -1, 0, after=False).installed() as files:
        run_session(place)
    return files.calls


@pytest.mark.parametrize("after", [False, True], ids=["one call", "all later calls"])
def test_session_survives_failing_calls(after: bool, saved_session: tuple[Path, list[int]], tmp_path: Path) -> None:
    whole, tokens = saved_session
    calls = record_calls(whole, tmp_path / "counted")
    assert {"open", "pwrite", "fsync", "replace", "write", "preadv"} <= set(calls) and len(calls) > 100
    first = {name: calls.index(name) for name in set(calls)}
    places = range(len(calls)) if ALL_CALLS else sorted({*first.values(), *range(3, len(calls), 90)})
    for at in places:
        for code in ERRORS[at % 3 : at % 3 + 1]:
            folder = tmp_path / f"{at} {code}"
            shutil.copytree(whole, folder)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with FailingFiles(folder, at, code, after).installed():
                    known = run_session(folder)
                check_next_start(folder, tokens, known)
            shutil.rmtree(folder)


def test_turn_ends_while_block_writes_are_blocked(
    saved_session: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(saved_session[0], tmp_path / "store")
    free, real = threading.Event(), os.fsync

    def blocked(handle: int) -> None:
        if threading.current_thread().name == "offload-rt saver":
            assert free.wait(60)
        real(handle)

    monkeypatch.setattr(os, "fsync", blocked)
    with make_llm() as llm:
        session = llm.session("ada", tmp_path / "store")
        take_turn(session, TURNS[1])
        assert not free.is_set()
        free.set()
        take_turn(session, TURNS[2])
        tokens = session.tokens
    check_next_start(tmp_path / "store", tokens, [])


def test_blocked_history_write_delays_only_its_own_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, free, real = threading.Event(), threading.Event(), os.fsync
    answer_tokens: list[int] = []

    def fsync(handle: int) -> None:
        if threading.current_thread().name == "writer":
            blocked.set()
            assert free.wait(60)
        real(handle)

    def write() -> None:
        for event in ada.send(TURNS[1], SHORT):
            answer_tokens.append(event.token_id)

    def compute() -> None:
        llm.generate([TURNS[3]], SHORT)
        next(answer)

    with make_llm() as llm:
        take_turn(llm.session("bob", tmp_path), TURNS[0])
    monkeypatch.setattr(os, "fsync", fsync)
    with make_llm() as llm:
        ada, bob = (llm.session(name, tmp_path) for name in ("ada", "bob"))
        answer = bob.send(TURNS[2], SHORT)
        writer = threading.Thread(target=write, name="writer", daemon=True)
        others = threading.Thread(target=compute, daemon=True)
        writer.start()
        try:
            assert blocked.wait(20) and ada.busy and len(answer_tokens) == SHORT.max_tokens - 1
            others.start()
            others.join(20)
            assert not others.is_alive() and ada.busy and len(answer_tokens) == SHORT.max_tokens - 1
        finally:
            free.set()
            writer.join()
        assert len(answer_tokens) == SHORT.max_tokens and not ada.busy
        list(answer)
    with make_llm() as llm:
        assert llm.session("ada", tmp_path).tokens == TURNS[1] + answer_tokens


def test_answer_is_complete_if_history_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_tokens: list[int] = []
    with make_llm() as llm:
        session = llm.session("ada", tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(DocumentStore, "put", fail_put)
            with pytest.raises(StoreError, match="no room"):
                answer_tokens.extend(event.token_id for event in session.send(TURNS[0], SHORT))
        assert_greedy(MODEL, TURNS[0], answer_tokens)
        assert len(answer_tokens) == SHORT.max_tokens and not session.busy
    with make_llm() as llm:
        assert llm.session("ada", tmp_path).tokens == TURNS[0] + answer_tokens


def fail_put(store: DocumentStore, name: str, data: bytes) -> None:
    raise StoreError("no room")


def test_session_survives_file_size_limits(saved_session: tuple[Path, list[int]], tmp_path: Path) -> None:
    shutil.copytree(saved_session[0], tmp_path / "store")
    tokens = saved_session[1]
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size in (20_000, 3_000, 100, 0):  # smaller than a block; a history may fit
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                known = run_session(tmp_path / "store")
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            with make_llm() as llm:
                found = llm.session("ada", tmp_path / "store").tokens
            assert found == tokens or found in known
            tokens = found
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    check_next_start(tmp_path / "store", tokens, [])


def test_close_saves_other_sessions_before_it_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    for name in ("ada", "bob", "cyd"):
        take_turn(llm.session(name, tmp_path), TURNS[0])
    with monkeypatch.context() as patch:
        real = DocumentStore.put

        def fail_put_of_bob(store: DocumentStore, name: str, data: bytes) -> None:
            if name == document_name("bob"):
                raise StoreError("no room for bob")
            real(store, name, data)

        patch.setattr(DocumentStore, "put", fail_put_of_bob)
        with pytest.raises(StoreError, match="no room for bob"):
            llm.close()
    llm.close()
    assert not llm.runner.reclaimables and llm.runner.pool.sequence_bytes == 0
    with make_llm() as again:
        for name in ("ada", "bob", "cyd"):
            take_turn(again.session(name, tmp_path), TURNS[1])
