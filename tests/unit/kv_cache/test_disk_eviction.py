"""Test limits of the block store on disk: pinned blocks, eviction order and time to live."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.disk_blocks import FILE_BYTES, LAYER_BYTES, block_data, block_name, load, open_store, padded_name, save

from offload_rt.errors import StoreError
from offload_rt.storage.documents import Document
from offload_rt.storage.options import LIVE_POLICIES
from offload_rt.storage.policies import EvictionOrder


def test_limit_includes_files_that_are_being_written(tmp_path: Path) -> None:
    store = open_store(tmp_path, 3 * FILE_BYTES)
    writers = [store.begin(block_name(store, n), LAYER_BYTES) for n in range(5)]
    assert [writer is not None for writer in writers] == [True] * 3 + [False] * 2
    assert store.bytes_used == 3 * FILE_BYTES
    for writer in writers[:3]:
        assert writer is not None
        writer.abort()
    assert store.bytes_used == 0
    store.check_integrity()


def test_pinned_blocks_and_documents_are_not_evicted(tmp_path: Path) -> None:
    store = open_store(tmp_path, 3 * FILE_BYTES + 100)
    store.documents.put(padded_name("session"), b"x" * 50)
    for number in range(3):
        save(store, number)
    store.pin([block_name(store, n).key for n in (0, 1, 2)])
    assert not save(store, 7)
    store.unpin([block_name(store, 1).key])
    assert save(store, 7)
    assert [load(store, n) is not None for n in (0, 1, 2, 7)] == [True, False, True, True]
    assert store.documents.get(padded_name("session")) == Document(b"x" * 50)
    with pytest.raises(StoreError, match="full"):
        store.documents.put(padded_name("huge"), bytes(5 * FILE_BYTES))


def test_documents_may_evict_pinned_blocks(tmp_path: Path) -> None:
    """The history must be saved even if the session's blocks fill the store."""
    store = open_store(tmp_path, 2 * FILE_BYTES)
    keys = [block_name(store, n).key for n in (0, 1)]
    store.pin(keys)
    assert save(store, 0) and save(store, 1) and not save(store, 2)
    store.documents.put(padded_name("history"), bytes(100))
    assert [load(store, n) is not None for n in (0, 1)] == [False, True]
    assert store.documents.get(padded_name("history")) == Document(bytes(100))
    store.check_integrity()


def test_sequence_is_evicted_from_its_end(tmp_path: Path) -> None:
    store = open_store(tmp_path, 4 * FILE_BYTES)
    keys, parent = [], store.root
    for number in range(4):
        save(store, number, parent)
        parent = block_name(store, number, parent).key
        keys.append(parent)
    store.touch(keys)
    save(store, 9)
    assert load(store, 3, keys[2]) is None and load(store, 2, keys[1]) == block_data(2)


def test_time_to_live_with_a_clock_that_moves_back(tmp_path: Path) -> None:
    now = 10**18
    store = open_store(tmp_path, ttl=60, clock=lambda: now)
    save(store, 1)
    now += 50 * 10**9
    save(store, 2)
    now -= 3600 * 10**9
    assert save(store, 3) and load(store, 1) and load(store, 2)
    store.close()
    store = open_store(tmp_path, ttl=60, clock=lambda: now)
    assert load(store, 1) and load(store, 2) and load(store, 3)
    store.check_integrity()
    now += 2 * 3600 * 10**9
    save(store, 4)
    assert [load(store, n) is not None for n in (1, 2, 3, 4)] == [False, False, False, True]


def test_time_to_live_of_fifo_starts_at_the_write(tmp_path: Path) -> None:
    now = 10**18
    stores = {
        policy: open_store(tmp_path / policy, policy=policy, ttl=60, clock=lambda: now) for policy in LIVE_POLICIES
    }
    for store in stores.values():
        save(store, 1)
    now += 50 * 10**9
    for store in stores.values():
        assert load(store, 1) and store.find(block_name(store, 1)) is not None
        store.touch([block_name(store, 1).key])
    now += 20 * 10**9
    for policy, store in stores.items():
        save(store, 2)
        assert (load(store, 1) is None) == (policy == "fifo"), policy


def test_eviction_window_evicts_items_in_reverse_order_of_need() -> None:
    order = EvictionOrder[str]("lookahead")
    for item in "xab":
        order.add(item)
    order.set_window("cab")
    order.add("c")
    assert list(order.ranked()) == ["x", "b", "a", "c"]
    order.remove("a")
    order.add("a")
    assert list(order.ranked()) == ["x", "b", "a", "c"]
    assert sorted(order.set_window("b")) == ["a", "c"]
    assert list(order.ranked())[-1] == "b"
