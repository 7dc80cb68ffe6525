"""Test killed processes, full disks and damaged files: afterwards, sessions are correct or recompute their KV."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.child_processes import fork_until_killed
from support.disk_blocks import (
    FILE_BYTES,
    KILLS,
    block_data,
    block_files,
    fork_saver,
    load,
    open_store,
    padded_name,
    save,
    token_bytes,
)
from support.outputs import completed
from support.sessions import take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.errors import StoreError
from offload_rt.kv_cache.prefix_tree import block_key
from offload_rt.sessions.history import document_name
from offload_rt.storage.documents import Document

STRESS = "OFFLOAD_RT_STRESS" in os.environ
SHORT = SamplingParams(max_tokens=20, temperature=0)
TURNS = [tiny_prompt(150, seed=1), tiny_prompt(30, seed=2), tiny_prompt(75, seed=3)]


def make_llm(seed: int = 0) -> LLM:
    return LLM(tiny_model("llama", dtype=torch.float32, seed=seed), dtype="float32", host_memory="16MiB", policy="full")


answer = partial(take_turn, params=SHORT)


def expected_tokens(history: list[int], turn: list[int], seed: int = 0) -> list[int]:
    llm = make_llm(seed)
    return completed(llm.generate([history + turn], SHORT))[0].token_ids


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Yield a function that mounts a file system of a given size. Skip the test if mounting is not permitted."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        process = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
        )
        if process.returncode:
            pytest.skip("mounting a small disk is not allowed here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_keeps_complete_blocks(mount_disk: Callable[[str], Path]) -> None:
    folder = mount_disk("128k")
    store = open_store(folder / "store")
    saved = [save(store, number) for number in range(30)]
    assert any(saved) and not all(saved) and "No space left" in store.last_error
    store.check_integrity()
    assert [load(store, number) for number in range(30)] == [
        block_data(n) if ok else None for n, ok in enumerate(saved)
    ]
    assert not list(folder.rglob("*.tmp"))
    store.documents.put(padded_name("history"), bytes(6000))
    assert store.documents.get(padded_name("history")) == Document(bytes(6000))
    assert block_files(folder) < sum(saved), "a block is evicted for the history"
    store.check_integrity()
    with pytest.raises(StoreError, match="No space left"):
        store.documents.put(padded_name("history"), bytes(1 << 20))
    assert store.documents.get(padded_name("history")) == Document(bytes(6000))
    assert block_files(folder) > 0, "no block is evicted if evicting all would not be enough"
    store.remove([block_key(store.root, "exact", token_bytes(number)) for number in range(30)])
    assert save(store, 99) and load(store, 99) == block_data(99)
    store.close()


def test_session_on_a_full_disk_warns_and_continues(mount_disk: Callable[[str], Path]) -> None:
    folder = mount_disk("450k")
    session = make_llm().session("s", folder)
    tokens: list[int] = []
    for turn in TURNS:
        new_tokens = answer(session, turn)
        assert new_tokens == expected_tokens(tokens, turn)
        tokens += turn + new_tokens
    with pytest.warns(UserWarning, match="not saved completely .*No space left"):
        session.close()
    session = make_llm().session("s", folder)
    assert session.tokens == tokens and answer(session, TURNS[1]) == expected_tokens(tokens, TURNS[1])
    with pytest.warns(UserWarning, match="not saved completely"):
        session.close()


def test_reader_gets_correct_blocks_while_another_process_writes(tmp_path: Path) -> None:
    child = fork_saver(tmp_path, 0)
    try:
        with pytest.raises(StoreError, match=f"process {child}"):
            open_store(tmp_path)
        reader, seen = open_store(tmp_path, read_only=True), 0
        end = time.monotonic() + 20
        while seen < 20 and time.monotonic() < end:
            for number in range(0, 400, 7):
                blocks = load(reader, number)
                assert blocks in (None, block_data(number))
                seen += blocks is not None
        assert seen >= 20
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    store = open_store(tmp_path, 40 * FILE_BYTES)
    assert save(store, 10**6)
    store.close()


def test_other_model_or_layout_starts_a_new_session_of_equal_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_llm().session("s", tmp_path)
    first = answer(session, TURNS[0])
    session.close()
    other = make_llm(seed=1).session("s", tmp_path)
    assert other.tokens == [] and answer(other, TURNS[0]) == expected_tokens([], TURNS[0], seed=1)
    assert other.loaded_tokens == 0
    other.close()
    with monkeypatch.context() as patch:
        for module in ("storage.block_file", "sessions.store"):
            patch.setattr(f"offload_rt.{module}.LAYOUT_VERSION", 0)
        older = make_llm().session("s", tmp_path)
        assert older.tokens == []
        answer(older, TURNS[2])
        older.close()
    session = make_llm().session("s", tmp_path)
    assert session.tokens == TURNS[0] + first
    assert answer(session, TURNS[1]) == expected_tokens(TURNS[0] + first, TURNS[1])
    assert session.loaded_tokens == len(TURNS[0] + first) - 1
    session.close()


def test_kv_of_a_truncated_session_is_not_shared(tmp_path: Path) -> None:
    """The KV of the kept tokens depends on the removed tokens."""
    llm = make_llm()
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    session.truncate(keep_last=100)
    answer(session, TURNS[1])
    prompt = [*session.tokens, 5]
    session.close()
    [output] = completed(llm.generate([prompt], SHORT))
    assert output.stats.reused_tokens == 0 and output.token_ids == expected_tokens([], prompt)


@pytest.mark.slow
def test_bit_flip_in_a_store_changes_no_token(tmp_path: Path) -> None:
    llm = make_llm()
    session = llm.session("s", tmp_path)
    history = TURNS[0] + answer(session, TURNS[0])
    session.close()
    expected_answer = expected_tokens(history, TURNS[1])
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
    rng, damaged = random.Random(5), 0
    for _ in range(max(12, KILLS // 2)):
        for path in tmp_path.rglob("*.*"):
            path.is_file() and path.unlink()
        for path, data in files.items():
            path.write_bytes(data)
        path = rng.choice([path for path in files if path.suffix in (".kv", ".doc")])
        data = bytearray(files[path])
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            session = make_llm().session("s", tmp_path)
        assert session.tokens == history, "closing stores the history twice"
        assert len(caught_warnings) == (path.name == f"{document_name('s')}.doc")
        assert answer(session, TURNS[1]) == expected_answer
        damaged += session.loaded_tokens < len(history) - 1
        session.discard()
    assert damaged > 3


@pytest.mark.slow
def test_session_continues_after_a_kill_during_saving(tmp_path: Path) -> None:
    rng, restored = random.Random(2), 0
    llm = make_llm()
    for i in range(KILLS // 4 if STRESS else 2):
        folder = tmp_path / str(i)
        child = fork_until_killed(run_turns(folder))
        time.sleep(rng.random() * 0.4)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        session = llm.session("s", folder)
        tokens = session.tokens
        assert not list(folder.rglob("*.tmp"))
        session.context.storage.check_integrity()
        turn = tiny_prompt(40, seed=999)
        assert answer(session, turn) == expected_tokens(tokens, turn)
        restored += session.loaded_tokens > 0
        session.close()
    assert restored > 0


def run_turns(folder: Path) -> Iterator[None]:
    """Run the turns of a session, and yield after each one."""
    session: Any = make_llm().session("s", folder)
    for number in range(80):
        list(session.send(tiny_prompt(70, seed=number), SHORT))
        yield
    time.sleep(60)
