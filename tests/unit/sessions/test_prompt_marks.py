"""Test prompt marks, which protect the blocks of prompts when a session is deleted.

A session's history lists its blocks. If a prompt has no session name, the files of its blocks contain a prompt mark
instead.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.disk_blocks import LAYER_BYTES, block_data, block_files, block_name, fill, load, open_store, save
from support.sampling import examples

from offload_rt.sessions.deletion import remove_prompt_blocks, remove_session
from offload_rt.sessions.history import History, document_name
from offload_rt.storage import folder
from offload_rt.storage.block_file import PROMPT_MARK, BlockWriter
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.files import read_header, read_prompt_mark, write_prompt_mark
from offload_rt.storage.options import StoreOptions

NAMES = ("a", "b", "c")
NUMBERS = st.sets(st.integers(0, 7), max_size=4)


class PromptMarkMachine(RuleBasedStateMachine):
    """Compares a store with sets of block numbers: `stored`, `marked`, and those `used` by each session."""

    @initialize()
    def start(self) -> None:
        self.home = Path(tempfile.mkdtemp())
        self.stored: set[int] = set()
        self.marked: set[int] = set()
        self.used: dict[str, set[int]] = {}
        self.writing: list[tuple[int, bool, BlockWriter]] = []
        self.store = open_store(self.home)

    def key(self, number: int) -> bytes:
        return block_name(self.store, number).key

    @rule(name=st.sampled_from(NAMES), numbers=NUMBERS)
    def save_session(self, name: str, numbers: set[int]) -> None:
        for number in numbers - self.stored:
            assert save(self.store, number)
        self.stored |= numbers
        self.used[name] = numbers
        history = History(name, "model", keys=[self.key(number).hex() for number in sorted(numbers)])
        self.store.documents.put(document_name(name), history.to_bytes())

    @rule(numbers=NUMBERS)
    def run_prompt(self, numbers: set[int]) -> None:
        for number in numbers:
            assert save(self.store, number, for_prompt=True) == (number not in self.stored)
        self.stored |= numbers
        self.marked |= numbers

    @rule(numbers=NUMBERS)
    def mark_blocks(self, numbers: set[int]) -> None:
        self.store.mark_for_prompts([self.key(number) for number in numbers])
        self.marked |= numbers & self.stored

    @rule(number=st.integers(0, 7), for_prompt=st.booleans())
    def begin_write(self, number: int, for_prompt: bool) -> None:
        """Begin writing a block. The write stays open, so that several writes of a block can overlap."""
        writer = self.store.begin(block_name(self.store, number), LAYER_BYTES, for_prompt=for_prompt)
        assert (writer is None) == (number in self.stored)
        if writer is not None:
            self.writing.append((number, for_prompt, writer))
        elif for_prompt:
            self.marked.add(number)

    @rule(complete=st.booleans())
    def end_write(self, complete: bool) -> None:
        if not self.writing:
            return
        number, for_prompt, writer = self.writing.pop(0)
        if not complete:
            writer.abort()
            return
        assert fill(writer, number)
        self.stored.add(number)
        self.marked |= {number} if for_prompt else set()

    @rule(number=st.integers(0, 7))
    def evict(self, number: int) -> None:
        self.store.remove([self.key(number)])
        self.stored.discard(number)
        self.marked.discard(number)

    @rule(policy=st.sampled_from(("lookahead", "fifo")))
    def reopen(self, policy: str) -> None:
        """Reopen the store, which then reads the marks from the files."""
        while self.writing:
            self.end_write(complete=False)
        self.store.close()
        self.store = open_store(self.home, policy=policy)

    @rule(name=st.sampled_from(NAMES), other_process=st.booleans())
    def delete(self, name: str, other_process: bool) -> None:
        namespace = self.store.root.hex()
        if other_process and not self.writing:  # `offload-rt sessions delete` knows neither the model nor its layers
            self.store.close()
            store = DiskStore(self.home, "", 0, StoreOptions())
            remove_session(store, namespace, document_name(name))
            store.close()
            self.store = open_store(self.home)
        else:
            remove_session(self.store, namespace, document_name(name))
        self.used.pop(name, None)
        self.stored &= self.marked.union(*self.used.values())

    @rule()
    def clear(self) -> None:
        remove_prompt_blocks(self.store, self.store.root.hex())
        self.marked.clear()
        self.stored &= set().union(*self.used.values())

    @invariant()
    def matches_model(self) -> None:
        if not hasattr(self, "store"):
            return
        assert {number for number in range(8) if self.key(number) in self.store} == self.stored
        assert block_files(self.home) == len(self.stored)
        assert all(load(self.store, number) == block_data(number) for number in self.stored)
        files = {path.stem: read_prompt_mark(path) for path in self.home.rglob("*.kv")}
        assert {number for number in self.stored if files[self.key(number).hex()]} == self.marked
        if not self.writing:
            self.store.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.home)


PromptMarkMachine.TestCase.settings = settings(
    max_examples=examples(24, stress=200),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestPromptMarks = pytest.mark.usefixtures("no_fsync")(PromptMarkMachine.TestCase)


def test_deletion_removes_blocks_without_mark_or_history(tmp_path: Path) -> None:
    """Stores written by earlier versions contain no prompt marks."""
    store = open_store(tmp_path)
    save(store, 1)
    save(store, 2)
    history = History("remaining", "model", keys=[block_name(store, 2).key.hex()])
    store.documents.put(history.document, history.to_bytes())
    assert all(path.read_bytes()[4096 - len(PROMPT_MARK) : 4096] == bytes(8) for path in tmp_path.rglob("*.kv"))
    assert load(store, 1) == block_data(1)
    remove_session(store, store.root.hex(), document_name("deleted"))
    assert load(store, 1) is None and load(store, 2) == block_data(2)


def test_marking_a_block_does_not_change_file_times(tmp_path: Path) -> None:
    """A file's times store when the block was last used, and its eviction rank."""
    store = open_store(tmp_path)
    save(store, 1)
    [path] = tmp_path.rglob("*.kv")
    before = path.stat()
    key = block_name(store, 1).key
    for change in (
        lambda: store.mark_for_prompts([key]),
        lambda: store.retain({key}),
        lambda: store.retain({key}, keep_marked=False),
    ):
        change()
        after = path.stat()
        assert (after.st_mtime_ns, after.st_atime_ns) == (before.st_mtime_ns, before.st_atime_ns)
    assert not read_prompt_mark(path)


def test_reopened_store_reads_and_writes_each_mark_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    save(store, 1, for_prompt=True)
    save(store, 2)
    store.close()
    store, calls = open_store(tmp_path), list[str]()

    def count_calls(kind: str, function: Callable[..., Any]) -> None:
        def call(*args: Any) -> Any:
            calls.append(kind)
            return function(*args)

        monkeypatch.setattr(folder, function.__name__, call)

    count_calls("read", read_prompt_mark)
    count_calls("write", write_prompt_mark)
    keys = [block_name(store, number).key for number in (1, 2)]
    for _ in range(3):
        store.mark_for_prompts(keys)
        store.retain(set())
    assert sorted(calls) == ["read", "read", "write"]
    assert block_files(tmp_path) == 2, "both blocks are marked"


def test_retain_reads_a_header_again_only_if_the_file_size_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    for number in (1, 2):
        save(store, number)
    keys, read_paths = {block_name(store, number).key for number in (1, 2)}, list[Path]()
    monkeypatch.setattr(folder, "read_header", lambda path: read_paths.append(path) or read_header(path))
    for _ in range(3):
        store.retain(keys)
    assert len(read_paths) == len(set(read_paths)) == 2
    read_paths[0].write_bytes(b"text of a user")
    store.retain(keys)
    assert len(read_paths) == 3 and not read_paths[0].exists() and block_files(tmp_path) == 1


def test_block_is_evicted_during_retain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver thread may evict a block between two uses of the index."""
    store = open_store(tmp_path)
    save(store, 1)
    key, write_stamp = block_name(store, 1).key, store._index.write_stamp
    saver = threading.Thread(target=store.remove, args=([key],))

    def evict_first(path: Path) -> None:
        saver.start()
        saver.join(0.2)
        write_stamp(path)

    monkeypatch.setattr(store._index, "write_stamp", evict_first)
    store.retain({key})
    saver.join()
    assert block_files(tmp_path) == 0
    store.check_integrity()


def test_damaged_block_has_no_mark_and_is_not_changed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, 1, for_prompt=True)
    [path] = tmp_path.rglob("*.kv")
    path.write_bytes(path.read_bytes()[:-1])
    damaged = path.read_bytes()
    assert not read_prompt_mark(path)
    write_prompt_mark(path, False)
    assert path.read_bytes() == damaged
    reader = open_store(tmp_path, read_only=True)
    reader.mark_for_prompts([block_name(reader, 1).key])
    assert path.read_bytes() == damaged, "a reader writes nothing"
