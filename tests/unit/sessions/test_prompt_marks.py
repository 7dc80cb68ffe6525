"""Test the owners of stored blocks, which decide whether the deletion of a session deletes a block.

A session owns the blocks in its history. A prompt without a session owns the blocks that it has marked in their files.
"""

from __future__ import annotations

import os
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

from offload_rt.sessions.deletion import remove_prompt_blocks, remove_session
from offload_rt.sessions.history import History, document_name
from offload_rt.storage import folder
from offload_rt.storage.block_file import PROMPT_MARK, BlockWriter
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.files import read_header, read_prompt_mark, write_prompt_mark
from offload_rt.storage.options import StoreOptions

NAMES = ("a", "b", "c")
NUMBERS = st.sets(st.integers(0, 7), max_size=4)


class ClaimsAgainstModel(RuleBasedStateMachine):
    """Compare a store with sets of block numbers: stored, marked by a prompt, and used by each session."""

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
        """Save a session whose history now contains the blocks `numbers` only."""
        for number in numbers - self.stored:
            assert save(self.store, number)
        self.stored |= numbers
        self.used[name] = numbers
        history = History(name, "model", keys=[self.key(number).hex() for number in sorted(numbers)])
        self.store.documents.put(document_name(name), history.to_bytes())

    @rule(numbers=NUMBERS)
    def run_prompt(self, numbers: set[int]) -> None:
        """Use stored blocks and write missing ones."""
        for number in numbers:
            assert save(self.store, number, for_prompt=True) == (number not in self.stored)
        self.stored |= numbers
        self.marked |= numbers

    @rule(numbers=NUMBERS)
    def claim_some(self, numbers: set[int]) -> None:
        self.store.mark_for_prompts([self.key(number) for number in numbers])
        self.marked |= numbers & self.stored

    @rule(number=st.integers(0, 7), for_prompt=st.booleans())
    def begin_one(self, number: int, for_prompt: bool) -> None:
        """Begin a write that ends later, so that several writers of a block overlap."""
        writer = self.store.begin(block_name(self.store, number), LAYER_BYTES, for_prompt=for_prompt)
        assert (writer is None) == (number in self.stored)
        if writer is not None:
            self.writing.append((number, for_prompt, writer))
        elif for_prompt:
            self.marked.add(number)

    @rule(keep=st.booleans())
    def end_one(self, keep: bool) -> None:
        if not self.writing:
            return
        number, for_prompt, writer = self.writing.pop(0)
        if not keep:
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
        """Reopen the store, which then has to read the marks from its files."""
        while self.writing:
            self.end_one(keep=False)
        self.store.close()
        self.store = open_store(self.home, policy=policy)

    @rule(name=st.sampled_from(NAMES), other_process=st.booleans())
    def delete(self, name: str, other_process: bool) -> None:
        space = self.store.root.hex()
        if other_process and not self.writing:  # `offload-rt sessions delete` knows neither the model nor its layers
            self.store.close()
            store = DiskStore(self.home, "", 0, StoreOptions())
            remove_session(store, space, document_name(name))
            store.close()
            self.store = open_store(self.home)
        else:
            remove_session(self.store, space, document_name(name))
        self.used.pop(name, None)
        self.stored &= self.marked.union(*self.used.values())

    @rule()
    def clear(self) -> None:
        remove_prompt_blocks(self.store, self.store.root.hex())
        self.marked.clear()
        self.stored &= set().union(*self.used.values())

    @invariant()
    def agrees(self) -> None:
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


ClaimsAgainstModel.TestCase.settings = settings(
    max_examples=200 if "OFFLOAD_RT_STRESS" in os.environ else 15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestClaims = pytest.mark.usefixtures("no_fsync")(ClaimsAgainstModel.TestCase)


def test_a_store_of_an_earlier_version_has_no_claims(tmp_path: Path) -> None:
    """A deletion removes blocks without a mark that no history contains, as in earlier versions."""
    store = open_store(tmp_path)
    save(store, 1)
    save(store, 2)
    history = History("kept", "model", keys=[block_name(store, 2).key.hex()])
    store.documents.put(history.document, history.to_bytes())
    assert all(path.read_bytes()[4096 - len(PROMPT_MARK) : 4096] == bytes(8) for path in tmp_path.rglob("*.kv"))
    assert load(store, 1) == block_data(1)
    remove_session(store, store.root.hex(), document_name("gone"))
    assert load(store, 1) is None and load(store, 2) == block_data(2)


def test_a_claim_does_not_count_as_a_use(tmp_path: Path) -> None:
    """A claim does not change the times of a file, which contain its last use and rank."""
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


def test_a_claim_is_read_once_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reopened store reads the mark of each file at most once, and writes only new marks."""
    store = open_store(tmp_path)
    save(store, 1, for_prompt=True)
    save(store, 2)
    store.close()
    store, changes = open_store(tmp_path), list[str]()

    def counted(kind: str, function: Callable[..., Any]) -> None:
        def call(*args: Any) -> Any:
            changes.append(kind)
            return function(*args)

        monkeypatch.setattr(folder, function.__name__, call)

    counted("read", read_prompt_mark)
    counted("write", write_prompt_mark)
    keys = [block_name(store, number).key for number in (1, 2)]
    for _ in range(3):
        store.mark_for_prompts(keys)
        store.retain(set())
    assert sorted(changes) == ["read", "read", "write"]
    assert block_files(tmp_path) == 2, "both blocks are marked"


def test_the_header_of_a_kept_block_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls of `retain` read the header again only if the size of the file has changed."""
    store = open_store(tmp_path)
    for number in (1, 2):
        save(store, number)
    keys, read = {block_name(store, number).key for number in (1, 2)}, list[Path]()
    monkeypatch.setattr(folder, "read_header", lambda path: read.append(path) or read_header(path))
    for _ in range(3):
        store.retain(keys)
    assert len(read) == len(set(read)) == 2
    read[0].write_bytes(b"text of a user")
    store.retain(keys)
    assert len(read) == 3 and not read[0].exists() and block_files(tmp_path) == 1


def test_a_block_is_evicted_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saver thread may evict the block between two uses of the index."""
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


def test_a_damaged_block_has_no_claim_and_is_not_changed(tmp_path: Path) -> None:
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
