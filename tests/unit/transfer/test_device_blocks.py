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


class DeviceBlocksMachine(RuleBasedStateMachine):
    """State machine with sequences whose block tables share, release and regain blocks of a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = DeviceBlocks(5, LAYERS)
        self.tables: dict[int, list[int]] = {}  # in the pool
        self.known: dict[int, list[int]] = {}  # in the last `update`, without blocks freed after it
        self.copies: dict[int, set[int]] = {}  # missing layers of each copy
        self.versions: dict[int, tuple[int, list[int]]] = {}  # sequence and slots by version
        self.up_to_date: set[int] = set()  # sequences whose table the device knows
        self.keys = iter(range(1, 1 << 20))

    def free_blocks(self) -> list[int]:
        return [block for block in range(12) if all(block not in ids for ids in self.tables.values())]

    def release(self, dropped: list[int]) -> None:
        gone = [block for block in dropped if block in self.free_blocks()]
        self.blocks.freed(gone)
        for block in gone:
            self.copies.pop(block, None)
            for ids in self.known.values():
                if block in ids:
                    ids.remove(block)
        self.drop_unused_copies()

    def drop_unused_copies(self) -> None:
        used = {block for ids in self.known.values() for block in ids}
        self.copies = {block: missing for block, missing in self.copies.items() if block in used}

    def update_device(self, key: int, length: int) -> None:
        ids = self.tables[key]
        self.known[key] = [block for block in self.known.get(key, []) if block in ids]
        self.drop_unused_copies()
        for index, block in enumerate(ids):
            if block not in self.known[key]:
                new = index * BLOCK_SIZE >= length and all(block not in own for own in self.known.values())
                if block not in self.copies and len(self.copies) < 5:
                    self.copies[block] = set() if new else set(LAYERS)
                self.known[key].append(block)
        self.blocks.update(key, list(ids), length)
        self.up_to_date.add(key)

    @rule(data=st.data(), count=st.integers(0, 4))
    def open(self, data: Any, count: int) -> None:
        key = next(self.keys)
        self.tables[key] = self.free_blocks()[:count]
        self.update_device(key, data.draw(st.integers(0, count * BLOCK_SIZE)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        origin = data.draw(st.sampled_from(sorted(self.tables)))
        shared = data.draw(st.integers(0, len(self.tables[origin])))
        key = next(self.keys)
        self.tables[key] = self.tables[origin][:shared]
        self.update_device(key, shared * BLOCK_SIZE)

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
    @rule(data=st.data())
    def load(self, data: Any) -> None:
        block = data.draw(st.sampled_from(sorted(block for block, missing in self.copies.items() if missing)))
        layer = data.draw(st.sampled_from(sorted(self.copies[block])))
        self.copies[block].remove(layer)
        self.blocks.loaded(block, layer)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.tables)))
        self.blocks.close(key)
        self.known.pop(key)
        self.up_to_date.discard(key)
        self.drop_unused_copies()
        self.release(self.tables.pop(key))

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
        DeviceBlocksMachine, settings=settings(max_examples=examples(60), stateful_step_count=25, deadline=None)
    )
