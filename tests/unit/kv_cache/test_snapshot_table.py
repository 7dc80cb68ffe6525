"""Compare the table of recurrent-state snapshots with a plain model, and test which snapshots are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offload_rt.core import BLOCK_SIZE
from offload_rt.kv_cache.snapshot_table import SnapshotTable, needed_positions

BLOCKS = st.integers(0, 9)
PATHS = st.lists(BLOCKS, unique=True, max_size=6)


class SnapshotMachine(RuleBasedStateMachine):
    """Compares a table of four slots with a plain model.

    The model is a list of (block, slot) pairs in order of last use, and a set of pending slots.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = SnapshotTable(4)
        self.kept: list[tuple[int, int]] = []
        self.pending: set[int] = set()

    def _without(self, blocks: list[int]) -> list[tuple[int, int]]:
        return [one for one in self.kept if one[0] not in blocks]

    @rule()
    def take(self) -> None:
        used = len(self.kept) + len(self.pending)
        slot = self.table.take()
        if used == 4 and self.kept:
            assert slot == self.kept.pop(0)[1], "the least recently used snapshot is evicted"
        assert (slot is None) == (len(self.pending) == 4)
        if slot is not None:
            assert slot not in self.pending and slot not in {own for _, own in self.kept}
            self.pending.add(slot)

    @rule(block=BLOCKS)
    def keep(self, block: int) -> None:
        if self.pending:
            slot = min(self.pending)
            self.pending.remove(slot)
            self.table.keep(block, slot)
            if block not in dict(self.kept):
                self.kept.append((block, slot))

    @rule()
    def release(self) -> None:
        if self.pending:
            self.table.release(self.pending.pop())

    @rule(blocks=PATHS)
    def touch(self, blocks: list[int]) -> None:
        self.table.touch(blocks)
        known = dict(self.kept)
        self.kept = self._without(blocks) + [(block, known[block]) for block in blocks if block in known]

    @rule(blocks=PATHS)
    def forget(self, blocks: list[int]) -> None:
        self.table.forget(blocks)
        self.kept = self._without(blocks)

    @rule(blocks=PATHS)
    def find(self, blocks: list[int]) -> None:
        known = dict(self.kept)
        having = [i for i, block in enumerate(blocks, start=1) if block in known]
        assert self.table.positions(blocks) == [i * BLOCK_SIZE for i in having]
        assert self.table.usable(blocks) == max(having, default=0)
        assert [self.table.slot_of(block) for block in blocks] == [known.get(block) for block in blocks]

    @invariant()
    def matches_model(self) -> None:
        self.table.check_integrity({block for block, _ in self.kept})
        assert len(self.table) == len(self.kept) + len(self.pending)


SnapshotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSnapshotTable = SnapshotMachine.TestCase


def assert_covers(tokens: int, positions: list[int]) -> None:
    """Assert that, for every d, an edit d tokens before the end recomputes at most 2 d + 64 tokens."""
    for d in range(1, tokens + 1):
        nearest = max((position for position in positions if position <= tokens - d), default=0)
        assert tokens - nearest <= 2 * d + BLOCK_SIZE, (tokens, d, nearest)


def max_snapshots(tokens: int) -> float:
    return math.log2(max(2, tokens / BLOCK_SIZE)) + 2


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 66, 127, 128, 129, 1000, 1024, 4999, 20000])
def test_prompt_needs_few_snapshots(tokens: int) -> None:
    needed = needed_positions(tokens, range(BLOCK_SIZE, tokens + 1, BLOCK_SIZE))
    assert_covers(tokens, needed)
    assert len(needed) <= max_snapshots(tokens) and needed == sorted(needed, reverse=True)


def test_growing_text_keeps_few_snapshots() -> None:
    positions: list[int] = []
    for tokens in range(1, 1200):
        if tokens % BLOCK_SIZE == 0:
            positions = needed_positions(tokens, [*positions, tokens])
            assert len(positions) <= 2 * max_snapshots(tokens)
        assert_covers(tokens, positions)


def test_needed_positions_are_chosen_from_existing_ones() -> None:
    assert needed_positions(1000, [64, 128, 640]) == [640, 128]
    assert needed_positions(1000, []) == []
