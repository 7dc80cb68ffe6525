"""Test the block store on disk: compare it with a plain model, damage its files, and let system calls fail."""

from __future__ import annotations

import itertools
import os
import random
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.disk_blocks import (
    FILE_BYTES,
    KILLS,
    LAYER_BYTES,
    LAYERS,
    block_data,
    block_files,
    block_name,
    fork_saver,
    load,
    open_store,
    padded_name,
    save,
    token_bytes,
)
from support.sampling import examples

from offload_rt.errors import StoreError
from offload_rt.storage import index
from offload_rt.storage.block_file import BlockHeader
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.naming import NamedBlock
from offload_rt.storage.options import LIVE_POLICIES


class StoreMachine(RuleBasedStateMachine):
    """Compares a store with a plain model of its eviction order.

    The least recently used block is evicted first. Blocks that waiting turns need are evicted last, the ones needed
    latest before those needed soonest.
    """

    limited = False

    @initialize(policy=st.sampled_from(LIVE_POLICIES))
    def start(self, policy: str) -> None:
        import tempfile

        self.home = tempfile.TemporaryDirectory()
        # The model ignores recomputation costs. With a cost, `touch` would keep a block longer than `save` without one.
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(index, "NS_PER_TOKEN", 0)
        self.now = 10**18
        self.policy = policy
        self.limit = 4 * FILE_BYTES + 100 if self.limited else None
        self.stamps: dict[int, int] = {}  # number -> time of the last use
        self.unneeded: list[int] = []  # not needed by waiting turns, oldest first
        self.needed: list[int] = []  # needed by waiting turns, soonest first
        self.window: list[int] = []
        self.clock = itertools.count()
        self.reopen()

    def reopen(self) -> None:
        self.store = open_store(Path(self.home.name), self.limit, policy=self.policy, clock=lambda: self.now)

    def key(self, number: int) -> bytes:
        return block_name(self.store, number).key

    def free_space(self) -> None:
        if self.limited and len(self.stamps) == 4:
            self.forget(self.unneeded[0] if self.unneeded else self.needed[-1])

    def forget(self, number: int) -> None:
        del self.stamps[number]
        (self.unneeded if number in self.unneeded else self.needed).remove(number)

    @rule(number=st.integers(0, 9))
    def save_block(self, number: int) -> None:
        assert save(self.store, number) == (number not in self.stamps)
        if number not in self.stamps:
            self.free_space()
            self.stamps[number] = next(self.clock)
            (self.needed if number in self.window else self.unneeded).append(number)

    @rule(number=st.integers(0, 9))
    def load_block(self, number: int) -> None:
        assert load(self.store, number) == (block_data(number) if number in self.stamps else None)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=3, unique=True))
    def touch_blocks(self, numbers: list[int]) -> None:
        self.store.touch([self.key(number) for number in numbers])
        for number in reversed([n for n in numbers if n in self.stamps and self.policy != "fifo"]):
            self.stamps[number] = next(self.clock)
            if number in self.unneeded:
                self.unneeded.remove(number)
                self.unneeded.append(number)

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def expect_blocks(self, numbers: list[int]) -> None:
        self.store.expect([self.key(number) for number in numbers])
        if self.policy != "lookahead":
            return
        self.window = numbers
        for number in [n for n in self.needed if n not in numbers]:
            self.stamps[number] = next(self.clock)
            self.unneeded.append(number)
        self.needed = [n for n in numbers if n in self.stamps]
        self.unneeded = [n for n in self.unneeded if n not in self.needed]

    @rule(number=st.integers(0, 9))
    def remove_block(self, number: int) -> None:
        self.store.remove([self.key(number)])
        if number in self.stamps:
            self.forget(number)

    @rule(number=st.integers(0, 9))
    def abort_write(self, number: int) -> None:
        writer = self.store.begin(block_name(self.store, number), LAYER_BYTES)
        if writer is not None:
            self.free_space()
            writer.write(1, memoryview(bytes(LAYER_BYTES)))
            writer.abort()

    @rule(step=st.integers(-5 * 10**9, 10**10))
    def move_clock(self, step: int) -> None:
        self.now += step

    @rule()
    def restart(self) -> None:
        """Reopen the store. It remembers the ages of its blocks, but not which blocks waiting turns need."""
        self.store.close()
        self.reopen()
        self.unneeded, self.needed, self.window = sorted(self.stamps, key=self.stamps.__getitem__), [], []

    @invariant()
    def matches_model(self) -> None:
        self.store.check_integrity()
        assert block_files(Path(self.home.name)) == len(self.stamps)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.home.cleanup()
            self.patches.undo()


class LimitedStoreMachine(StoreMachine):
    limited = True


_settings = settings(
    max_examples=examples(25), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase
TestStore.settings = _settings
TestLimitedStore = LimitedStoreMachine.TestCase
TestLimitedStore.settings = _settings


def test_restart_discards_ranks_from_a_clock_that_moved_back() -> None:
    """With these ranks, blocks stored after the restart would be evicted before older blocks."""
    model = LimitedStoreMachine()
    model.start(policy="lookahead")
    try:
        model.save_block(number=0)
        model.move_clock(step=-5)
        for number in (2, 3, 4):
            model.save_block(number=number)
        model.restart()
        for number in (1, 5):
            model.save_block(number=number)
            model.matches_model()
    finally:
        model.teardown()


def test_decoded_header_equals_the_encoded_one() -> None:
    header = BlockHeader(b"k" * 32, 1 << 40, tuple(range(2**63, 2**63 + 80)))
    data = header.encode()
    assert len(data) == header.data_offset and len(data) % 4096 == 0
    assert BlockHeader.decode(data) == header


@pytest.mark.slow
def test_bit_flip_in_a_block_is_a_miss_or_has_no_effect(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, 1)
    [path] = tmp_path.glob("*/*/*.kv")
    original, rng, expected = path.read_bytes(), random.Random(0), block_data(1)
    used = len(BlockHeader.decode(original).encode().rstrip(b"\0"))  # type: ignore[union-attr]
    misses = 0
    for _ in range(2000):
        bit = rng.randrange(8 * len(original))
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        store._folder.index.add(path, len(original))
        blocks = load(store, 1)
        assert blocks in (None, expected)
        in_padding = used <= bit // 8 < 4096
        assert (blocks is None) != in_padding, "only the padding after the header has no checksum"
        misses += blocks is None
    assert misses > 500


@pytest.mark.parametrize("layer", range(LAYERS))
def test_verify_removes_a_block_with_damage_in_any_layer(layer: int, tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert not store.verify(block_name(store, 1)), "it is not stored"
    assert save(store, 1) and store.verify(block_name(store, 1))
    [path] = tmp_path.glob("*/*/*.kv")
    data = bytearray(path.read_bytes())
    data[4096 + layer * LAYER_BYTES] ^= 1
    path.write_bytes(data)
    assert block_name(store, 1).key in store and not store.verify(block_name(store, 1)) and not path.exists()
    assert save(store, 1) and store.verify(block_name(store, 1))
    store.check_integrity()


@pytest.mark.parametrize("size", [0, 1, 23, 24, 200, 4095, 4096, 4097, FILE_BYTES - 1, FILE_BYTES + 1])
def test_truncated_and_overlong_files_are_misses_and_replaced(tmp_path: Path, size: int) -> None:
    store = open_store(tmp_path)
    save(store, 1)
    [path] = tmp_path.glob("*/*/*.kv")
    path.write_bytes(path.read_bytes().ljust(size, b"x")[:size])
    store.close()
    store = open_store(tmp_path)
    assert load(store, 1) is None
    store.check_integrity()
    assert save(store, 1) and load(store, 1) == block_data(1)


def test_file_of_another_key_or_version_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    save(store, 1)
    [path] = tmp_path.glob("*/*/*.kv")
    for parent, provenance_key, tokens in (
        (b"x" * 16, "exact", token_bytes(1)),
        (store.root, "other", token_bytes(1)),
        (store.root, "exact", token_bytes(2)),
        (store.root, "exact", token_bytes(1, 63)),
    ):
        name = NamedBlock(0, parent, provenance_key, tokens)
        copy = store._path(name.key)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
        store._folder.index.add(copy, FILE_BYTES)
        assert store.find(name) is None and not copy.exists()
    store.close()
    other = DiskStore(tmp_path, "model b", LAYERS)
    assert load(other, 1) is None
    other._path(block_name(other, 1).key).parent.mkdir(parents=True)
    forged = other._path(block_name(other, 1).key)
    forged.write_bytes(path.read_bytes())
    other._folder.index.add(forged, FILE_BYTES)
    assert load(other, 1) is None
    other.close()
    with monkeypatch.context() as patch:
        patch.setattr("offload_rt.storage.block_file.FILE_VERSION", 4)
        newer = open_store(tmp_path)
        save(newer, 5)
        newer.close()
    store = open_store(tmp_path)
    assert load(store, 5) is None and load(store, 1) == block_data(1)


def test_store_has_one_writer_and_several_readers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match=f"written by another process .process {os.getpid()}"):
        open_store(tmp_path)
    readers = [open_store(tmp_path, read_only=True) for _ in range(3)]
    save(store, 1)
    assert all(load(reader, 1) == block_data(1) for reader in readers)
    found = readers[0].find(block_name(store, 1))
    assert found is not None
    store.remove([found.key])
    assert not found.read_layer(0, memoryview(bytearray(LAYER_BYTES)))
    store.close()
    open_store(tmp_path).close()


def test_other_files_in_the_folder_are_not_changed(tmp_path: Path) -> None:
    names = ("thesis.doc", "a/b.kv", f"{'0' * 32}/note.txt", f"{'0' * 32}/ab/thesis.kv")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    store = open_store(tmp_path, FILE_BYTES, ttl=1e-9)
    save(store, 1)
    save(store, 2)
    assert store.bytes_used == FILE_BYTES
    assert all((tmp_path / name).read_text() == "mine" for name in names)


@pytest.mark.parametrize("level", ["namespace", "fan"])
def test_link_in_place_of_a_folder_is_not_followed(level: str, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    save(store, 1)
    [path] = (tmp_path / "store").glob("*/*/*.kv")
    folder = path.parent if level == "fan" else path.parent.parent
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    before = {path: path.read_bytes() for path in (tmp_path / "outside").rglob("*") if path.is_file()}
    store.remove([block_name(store, 1).key])
    store.retain(set())
    save(store, 1)
    if level == "namespace":
        with pytest.raises(StoreError, match="a symbolic link replaces a folder"):
            store.documents.put(padded_name("one"), b"text")
    store.close()
    store = open_store(tmp_path / "store")
    assert load(store, 1) is None
    store.check_integrity()
    assert {path: path.read_bytes() for path in (tmp_path / "outside").rglob("*") if path.is_file()} == before


def test_file_in_place_of_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot use the store"):
        open_store(tmp_path / "file")


def test_document_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power failure, either the old or the new document must be complete."""
    store, calls = open_store(tmp_path), []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "bytes")
        fsync(handle)

    def recording_replace(*paths: Any) -> None:
        calls.append("name")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    store.documents.put(padded_name("one"), b"history")
    assert calls == ["bytes", "name", "folder"]


def test_failed_system_calls_leave_no_partial_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    store = open_store(tmp_path)
    for name in ("pwrite", "fsync", "replace", "open"):
        save(store, 1)
        real = getattr(os, name)

        def refuse(*args: object, name: str = name, real: object = real, **options: object) -> object:
            if name == "open" and not args[1] & os.O_WRONLY:  # type: ignore[operator]
                return real(*args, **options)  # type: ignore[operator]
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            store._folder.last_error = ""
            assert not save(store, 2) and "No space" in store.last_error
            if name != "pwrite":
                with pytest.raises(StoreError):
                    store.documents.put(padded_name("d"), b"x")
        store.check_integrity()
        assert load(store, 2) is None
        assert load(store, 1) in (block_data(1), None), "a document may have evicted the block"
    store.documents.delete(padded_name("d"))
    assert save(store, 2)


@pytest.mark.slow
def test_store_is_consistent_after_kills_during_saving(tmp_path: Path) -> None:
    # `make stress` runs it 200 times.
    rng, saved, temporary_files = random.Random(1), 0, 0
    for start in range(0, KILLS * 1000, 1000):
        child = fork_saver(tmp_path, start)
        time.sleep(rng.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        temporary_files += len(list(tmp_path.rglob("*.tmp")))
        store = open_store(tmp_path, 40 * FILE_BYTES)
        store.check_integrity()
        assert not list(tmp_path.rglob("*.tmp"))
        for number in range(start, start + 100):
            blocks = load(store, number)
            assert blocks in (None, block_data(number))
            saved += blocks is not None
        store.close()
    assert saved > 0 and temporary_files > 0
