"""Test killed processes, full disks and damaged files: a session is then correct, or its KV is recomputed."""

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

SHORT = SamplingParams(max_tokens=20, temperature=0)
TURNS = [tiny_prompt(150, seed=1), tiny_prompt(30, seed=2), tiny_prompt(75, seed=3)]


def make_llm(seed: int = 0) -> LLM:
    return LLM(tiny_model("llama", dtype=torch.float32, seed=seed), dtype="float32", host_memory="16MiB", policy="full")


answer = partial(take_turn, params=SHORT)


def expected(history: list[int], turn: list[int], seed: int = 0) -> list[int]:
    llm = make_llm(seed)
    return completed(llm.generate([history + turn], SHORT))[0].token_ids


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a file system of a given size. Skip the test if this is not permitted.

    `test_disk` simulates failing writes without a mount.
    """
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a small disk is not allowed here")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_complete_blocks(small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("128k")
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
    assert block_files(folder) > 0, "no block leaves where all of them are not enough"
    store.remove([block_key(store.root, "exact", token_bytes(number)) for number in range(30)])
    assert save(store, 99) and load(store, 99) == block_data(99)
    store.close()


def test_a_session_on_a_full_disk_warns_and_continues(small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("450k")
    session = make_llm().session("s", folder)
    tokens: list[int] = []
    for turn in TURNS:
        got = answer(session, turn)
        assert got == expected(tokens, turn)
        tokens += turn + got
    with pytest.warns(UserWarning, match="not saved completely .*No space left"):
        session.close()
    session = make_llm().session("s", folder)
    assert session.tokens == tokens and answer(session, TURNS[1]) == expected(tokens, TURNS[1])
    with pytest.warns(UserWarning, match="not saved completely"):
        session.close()


def test_two_processes_one_writes_and_the_other_reads(tmp_path: Path) -> None:
    """One process writes and evicts as fast as possible, and every block that the other one reads is correct.

    Opening a second writer fails with the process id of the first one until that ends.
    """
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


def test_a_store_of_another_model_or_an_older_layout_is_a_new_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of the same name is empty with another model or layout. The old session is unchanged."""
    session = make_llm().session("s", tmp_path)
    first = answer(session, TURNS[0])
    session.close()
    other = make_llm(seed=1).session("s", tmp_path)
    assert other.tokens == [] and answer(other, TURNS[0]) == expected([], TURNS[0], seed=1)
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
    assert answer(session, TURNS[1]) == expected(TURNS[0] + first, TURNS[1])
    assert session.loaded_tokens == len(TURNS[0] + first) - 1
    session.close()


def test_kv_of_a_truncated_session_is_not_shared(tmp_path: Path) -> None:
    """A prompt of the kept tokens reuses no KV, because their KV depends on the removed tokens."""
    llm = make_llm()
    session = llm.session("s", tmp_path)
    answer(session, TURNS[0])
    session.truncate(keep_last=100)
    answer(session, TURNS[1])
    prompt = [*session.tokens, 5]
    session.close()
    [done] = completed(llm.generate([prompt], SHORT))
    assert done.stats.reused_tokens == 0 and done.token_ids == expected([], prompt)


@pytest.mark.slow
def test_a_flipped_bit_is_never_a_wrong_token(tmp_path: Path) -> None:
    """Sampled bits are flipped in stored blocks and in the history."""
    llm = make_llm()
    session = llm.session("s", tmp_path)
    history = TURNS[0] + answer(session, TURNS[0])
    session.close()
    right = expected(history, TURNS[1])
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
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            session = make_llm().session("s", tmp_path)
        assert session.tokens == history, "a history that was closed is there twice"
        assert len(said) == (path.name == f"{document_name('s')}.doc")
        assert answer(session, TURNS[1]) == right
        damaged += session.loaded_tokens < len(history) - 1
        session.discard()
    assert damaged > 3


@pytest.mark.slow
def test_killed_while_a_session_is_saved(tmp_path: Path) -> None:
    """A process is killed at random times during turns that are saved in the background.

    The restored session continues like a prompt of its tokens.
    """
    rng, come_back = random.Random(2), 0
    llm = make_llm()
    for i in range(max(4, KILLS // 4)):
        folder = tmp_path / str(i)
        child = fork_until_killed(talk(folder))
        time.sleep(rng.random() * 0.4)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        session = llm.session("s", folder)
        tokens = session.tokens
        assert not list(folder.rglob("*.tmp"))
        session.context.storage.check_integrity()
        turn = tiny_prompt(40, seed=999)
        assert answer(session, turn) == expected(tokens, turn)
        come_back += session.loaded_tokens > 0
        session.close()
    assert come_back > 0


def talk(folder: Path) -> Iterator[None]:
    """Run turns. The first step ends after the first turn."""
    session: Any = make_llm().session("s", folder)
    for number in range(80):
        list(session.send(tiny_prompt(70, seed=number), SHORT))
        yield
    time.sleep(60)
