"""Compare the allocator for physical blocks with a plain list of reference counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.kv_cache.block_allocator import BlockAllocator

STEPS = st.lists(
    st.tuples(st.sampled_from(["best_fit", "worst_fit", "extend", "share", "drop", "slab"]), st.integers(0, 2**16)),
    max_size=80,
)


def count_runs(blocks: list[int], slab_blocks: int) -> int:
    return sum(i == 0 or block != blocks[i - 1] + 1 or block % slab_blocks == 0 for i, block in enumerate(blocks))


def free_run_lengths(refs: list[int], slab_blocks: int) -> list[int]:
    lengths = [0]
    for block, count in enumerate(refs):
        if block % slab_blocks == 0 or count:
            lengths.append(0)
        lengths[-1] += count == 0
    return [length for length in lengths if length]


@settings(max_examples=examples(150), deadline=None)
@given(steps=STEPS, slab_blocks=st.integers(1, 9))
def test_allocator_equals_a_list_of_reference_counts(steps: list[tuple[str, int]], slab_blocks: int) -> None:
    table = BlockAllocator(slab_blocks)
    refs: list[int] = []
    held: list[int] = []  # one entry per reference
    for action, number in steps:
        if action == "slab":
            assert table.add_slab() == len(refs) // slab_blocks
            refs += [0] * slab_blocks
        elif action in ("best_fit", "worst_fit"):
            count = number % (table.free + 1)
            lengths = sorted(free_run_lengths(refs, slab_blocks))
            allocated = getattr(table, action)(count)
            assert len(set(allocated)) == len(allocated) == count
            assert all(refs[block] == 0 for block in allocated)
            if action == "best_fit" and count:
                fitting = [length for length in lengths if length >= count]
                assert (count_runs(allocated, slab_blocks) == 1) == bool(fitting), (
                    "one run if a free run is long enough"
                )
                fewest_runs = 0
                while count > 0:
                    count -= lengths.pop()
                    fewest_runs += 1
                assert count_runs(allocated, slab_blocks) <= fewest_runs, "as few runs as possible"
            held += allocated
            for block in allocated:
                refs[block] = 1
        elif action == "extend" and held:
            last = held[number % len(held)]
            allocated = table.extend(last, 3)
            expected = []
            for block in range(last + 1, min(last + 4, (last // slab_blocks + 1) * slab_blocks)):
                if refs[block]:
                    break
                expected.append(block)
            assert allocated == expected
            held += allocated
            for block in allocated:
                refs[block] = 1
        elif action == "share" and held:
            block = held[number % len(held)]
            table.incref([block])
            held.append(block)
            refs[block] += 1
        elif action == "drop" and held:
            random.Random(number).shuffle(held)
            dropped = [held.pop() for _ in range(min(len(held), 1 + number % 5))]
            for block in dropped:
                refs[block] -= 1
            assert table.decref(dropped) == sorted({block for block in dropped if refs[block] == 0})
        table.check_integrity()
        assert [table.refs(block) for block in range(len(refs))] == refs
        assert table.free == refs.count(0) and table.used == len(refs) - refs.count(0)
        assert table.largest_run == max(free_run_lengths(refs, slab_blocks), default=0)


def test_best_fit_uses_the_shortest_run_that_fits() -> None:
    table = BlockAllocator(100)
    table.add_slab()
    table.best_fit(100)
    table.decref([*range(10, 30), *range(40, 46), *range(50, 58)])
    assert table.best_fit(6) == list(range(40, 46))
    assert table.best_fit(7) == list(range(50, 57))
    assert table.best_fit(2) == [10, 11]
    assert table.best_fit(1) == [57]


def test_worst_fit_leaves_space_for_sequences_to_grow() -> None:
    table = BlockAllocator(64)
    table.add_slab()
    assert table.worst_fit(1) == [0], "no run can grow into the start of a slab"
    assert table.worst_fit(1) == [32]
    assert table.worst_fit(1) == [1 + 31 // 2]
    assert table.worst_fit(40) == [*range(33, 64), *range(1, 10)], (
        "all free blocks are found if no space can be left free"
    )


class CountedReads(list[Any]):
    """List that counts the elements that were read by index or iteration."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[Any]:
        self.reads += len(self)
        return super().__iter__()


def test_operations_on_a_hundred_thousand_blocks_read_few_elements() -> None:
    """Each operation does a few binary searches in the lists of runs, and never scans them."""
    table = BlockAllocator(256)
    for _ in range(400):
        table.add_slab()
    table.best_fit(table.free)
    order = list(range(0, 102_400, 2))  # worst-case fragmentation
    random.Random(0).shuffle(order)
    for block in order[:-200]:
        table.decref([block])
    lists = [CountedReads(table._starts), CountedReads(table._by_size), CountedReads(table._refs)]
    table._starts, table._by_size, table._refs = lists
    for block in order[-200:]:
        table.decref([block])
    for _ in range(200):
        table.best_fit(1)
    search = len(table._starts).bit_length()  # elements that a binary search reads
    assert sum(each.reads for each in lists) <= 400 * 4 * search
