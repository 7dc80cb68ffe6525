"""Compare the blocks that have slots on the device with a simple model of the block tables."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.sampling import examples

from offload_rt.core import BLOCK_SIZE
from offload_rt.transfer.device_blocks import DeviceBlocks

LAYERS = (0, 2)


def test_blocks_keep_their_slots_and_new_blocks_get_free_slots() -> None:
    blocks = DeviceBlocks(3, LAYERS)
    assert blocks.update(7, [10, 11], 0)
    assert blocks.update(8, [20, 21], 0)
    assert blocks.complete_slots(7) == [0, 1] and blocks.complete_slots(8) == [2, -1]
    blocks.close(7)
    blocks.freed([10, 11])
    assert not blocks.update(8, [20, 21], 2 * BLOCK_SIZE)
    assert blocks.complete_slots(8) == [2, -1], "slots that become free later are for new blocks"
    assert blocks.update(8, [20, 21, 22], 2 * BLOCK_SIZE)
    assert blocks.complete_slots(8) == [2, -1, 0]
    blocks.check_integrity()


def test_block_with_kv_is_readable_per_layer_after_loading() -> None:
    blocks = DeviceBlocks(4, LAYERS)
    blocks.update(1, [5, 6], BLOCK_SIZE + 1)
    assert blocks.incomplete(1) and blocks.complete_slots(1) == [-1, -1]
    assert [blocks.slot(block) for block in (5, 6)] == [0, 1], "writes go to incomplete copies, too"
    before = blocks.version(1)
    blocks.loaded(5, 0)
    assert blocks.readable_slot(5, 0) == 0 and blocks.readable_slot(5, 2) == -1 and blocks.missing_slot(5, 2) == 0
    assert blocks.complete_slots(1) == [-1, -1]
    blocks.loaded(5, 2)
    assert blocks.complete_slots(1) == [0, -1] and blocks.version(1) != before


def test_freed_block_loses_its_device_copy() -> None:
    blocks = DeviceBlocks(4, LAYERS)
    blocks.update(1, [5, 6], 0)
    before = blocks.version(1)
    blocks.freed([6])
    assert blocks.slot(6) == -1 and blocks.version(1) != before
    blocks.update(2, [6], 1)  # before the first sequence reports that it has dropped the block
    blocks.update(1, [5], BLOCK_SIZE)
    assert blocks.slot(6) == 1 and blocks.incomplete(2) and not blocks.incomplete(1)
    blocks.check_integrity()


def test_unused_copies_are_evicted_from_the_end_of_the_least_recently_used_sequence() -> None:
    blocks = DeviceBlocks(4, LAYERS)
    for sequence, ids in ((1, [10, 11]), (2, [20, 21])):
        blocks.update(sequence, ids, 0)
    blocks.close(2)
    blocks.close(1)
    assert blocks.update(3, [30], 0)
    assert [blocks.slot(block) for block in (10, 11, 20, 21)] == [0, 1, 2, -1]
    assert blocks.update(4, [21, 20, 31], BLOCK_SIZE), "21 and 31 get slots, 20 keeps its own"
    assert [blocks.slot(block) for block in (10, 11, 20)] == [-1, -1, 2]
    assert blocks.incomplete(4) and blocks.missing_slot(20, 0) == -1 != blocks.missing_slot(21, 0)
    blocks.close(4)
    assert blocks.slot(21) == -1, "an incomplete copy is not kept"
    blocks.check_integrity()


class DeviceBlocksMachine(RuleBasedStateMachine):
    """State machine with sequences whose block tables share, release and regain blocks of a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = DeviceBlocks(5, LAYERS)
        self.tables: dict[int, list[int]] = {}  # in the pool
        self.known: dict[int, list[int]] = {}  # in the last `update`, without blocks freed after it
        self.cached: list[list[int]] = []  # tables of closed sequences whose blocks the pool has kept
        self.copies: dict[int, set[int]] = {}  # missing layers of each copy
        self.unused: list[int] = []  # blocks with copies that no sequence uses, in the order of their eviction
        self.versions: dict[int, tuple[int, list[int]]] = {}  # sequence and slots by version
        self.up_to_date: set[int] = set()  # sequences whose table the device knows
        self.keys = iter(range(1, 1 << 20))

    def free_blocks(self) -> list[int]:
        return [block for block in range(12) if all(block not in ids for ids in [*self.tables.values(), *self.cached])]

    def release(self, dropped: list[int]) -> None:
        gone = [block for block in dropped if block in self.free_blocks()]
        self.blocks.freed(gone)
        for block in gone:
            self.copies.pop(block, None)
            self.unused = [each for each in self.unused if each != block]
            for ids in self.known.values():
                if block in ids:
                    ids.remove(block)

    def retire(self, dropped: list[int]) -> None:
        used = {block for ids in self.known.values() for block in ids}
        for block in dropped:
            if block in self.copies and block not in used:
                if self.copies[block]:
                    del self.copies[block]
                else:
                    self.unused.append(block)

    def update_device(self, key: int, length: int) -> None:
        ids = self.tables[key]
        before = self.known.get(key, [])
        self.known[key] = [block for block in before if block in ids]
        self.retire([block for block in reversed(before) if block not in ids])
        self.unused = [block for block in self.unused if block not in ids]
        for index, block in enumerate(ids):
            if block not in self.known[key]:
                new = index * BLOCK_SIZE >= length and all(block not in own for own in self.known.values())
                if block not in self.copies and len(self.copies) == 5 and self.unused:
                    del self.copies[self.unused.pop(0)]
                if block not in self.copies and len(self.copies) < 5:
                    self.copies[block] = set() if new else set(LAYERS)
                self.known[key].append(block)
        self.known[key] = list(ids)
        self.blocks.update(key, list(ids), length)
        self.up_to_date.add(key)

    @rule(count=st.integers(0, 4), stored=st.integers(0, 2))
    def open(self, count: int, stored: int) -> None:
        """Open a sequence, of which `stored` blocks have KV in the pool."""
        key = next(self.keys)
        self.tables[key] = self.free_blocks()[:count]
        self.update_device(key, min(count, stored) * BLOCK_SIZE)

    @precondition(lambda self: self.tables or self.cached)
    @rule(data=st.data(), is_open=st.booleans())
    def share(self, data: Any, is_open: bool) -> None:
        """Open a sequence that begins with blocks of an open sequence or of the prefix cache."""
        open_tables = list(self.tables.values())
        origin = data.draw(st.sampled_from((open_tables or self.cached) if is_open else (self.cached or open_tables)))
        shared = data.draw(st.sampled_from(range(len(origin), -1, -1)))
        key = next(self.keys)
        self.tables[key] = origin[:shared] + self.free_blocks()[: data.draw(st.integers(0, 2))]
        self.update_device(key, shared * BLOCK_SIZE)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def evict_from_prefix_cache(self, data: Any) -> None:
        self.release(self.cached.pop(data.draw(st.integers(0, len(self.cached) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), notify=st.booleans(), grow=st.integers(0, 3))
    def truncate_and_extend(self, data: Any, notify: bool, grow: int) -> None:
        """Truncate a sequence and extend it. If `notify` is false, the device is updated only later."""
        key = data.draw(st.sampled_from(sorted(self.tables)))
        kept = data.draw(st.integers(0, len(self.tables[key])))
        dropped = self.tables[key][kept:]
        del self.tables[key][kept:]
        self.release(dropped)
        self.tables[key] += self.free_blocks()[:grow]
        self.up_to_date.discard(key)
        if notify:
            self.update_device(key, data.draw(st.integers(0, len(self.tables[key]) * BLOCK_SIZE)))

    @precondition(lambda self: any(self.copies.values()))
    @rule(data=st.data(), everything=st.booleans())
    def load(self, data: Any, everything: bool) -> None:
        missing = [(block, layer) for block, layers in self.copies.items() for layer in sorted(layers)]
        for block, layer in missing if everything else [data.draw(st.sampled_from(missing))]:
            self.copies[block].remove(layer)
            self.blocks.loaded(block, layer)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), cache=st.sampled_from((True, True, False)), load=st.booleans())
    def close(self, data: Any, cache: bool, load: bool) -> None:
        if load and any(self.copies.values()):
            self.load(data, everything=True)
        key = data.draw(st.sampled_from(sorted(self.tables)))
        self.blocks.close(key)
        self.up_to_date.discard(key)
        self.retire(self.known.pop(key)[::-1])
        ids = self.tables.pop(key)
        if cache:
            self.cached.append(ids)
        else:
            self.release(ids)

    @invariant()
    def agrees(self) -> None:
        self.blocks.check_integrity()
        slots = {block: self.blocks.slot(block) for block in range(12)}
        assert {block for block, slot in slots.items() if slot >= 0} == self.copies.keys()
        for key in self.up_to_date:
            complete = self.blocks.complete_slots(key)
            assert self.versions.setdefault(self.blocks.version(key), (key, complete)) == (key, complete)
        for block, missing in self.copies.items():
            for layer in LAYERS:
                lacks = layer in missing
                assert self.blocks.readable_slot(block, layer) == (-1 if lacks else slots[block])
                assert self.blocks.missing_slot(block, layer) == (slots[block] if lacks else -1)


def test_slots_follow_the_block_tables() -> None:
    run_state_machine_as_test(
        DeviceBlocksMachine, settings=settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
    )
