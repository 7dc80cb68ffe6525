"""Compare the host pool, with and without sliding-window layers, with a plain model of all written values."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)  # fmt: skip
from support.sampling import examples

from offload_rt.core import BLOCK_SIZE, BlockTable, ModelGeometry, RowShape
from offload_rt.errors import PoolFullError
from offload_rt.kv_cache.block_allocator import BlockAllocator
from offload_rt.kv_cache.layer_groups import LayerGroups
from offload_rt.kv_cache.pool import HostPool
from offload_rt.kv_cache.window_blocks import WindowBlocks

HEADS, WIDTH = 2, 2
COUNTS = st.sampled_from([1, 7, 57, 63, 64, 65, 130, 200])
LETTERS = st.integers(0, 1)
PRIME = 100_003
PROVENANCE_KEYS = st.sampled_from(["exact", "sparse"])


def geometry(
    windows: tuple[int | None, ...], window_rows: RowShape | None = None, value_dim: int | None = None
) -> ModelGeometry:
    return ModelGeometry(
        layers=len(windows),
        hidden=4,
        heads=6,
        kv_heads=HEADS,
        head_dim=WIDTH,
        vocab=10,
        scales=(1.0,) * len(windows),
        windows=windows,
        max_positions=1 << 20,
        absolute_positions=False,
        default_alpha=5.0,
        window_rows=window_rows,
        value_dim=value_dim,
    )


@dataclass(eq=False)
class SequenceModel:
    """The expected tokens of a sequence, and one number per token from which its K and V are computed.

    As in real KV, the number depends on the token and on all earlier tokens.
    """

    blocks: BlockTable
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        for token in tokens:
            self.values.append(((self.values or [1])[-1] * 31 + token + 1) % PRIME)


def kv_from(values: list[int], layer: int, rows: RowShape) -> torch.Tensor:
    """Return K and V `[Hkv, planes, n, d]` for one layer, all distinct."""
    shape = rows.kv_heads, rows.planes, 1, rows.head_dim
    inner = torch.arange(rows.bytes(torch.int8), dtype=torch.float32).view(shape)
    inner = inner + 8 * layer
    return torch.tensor(values, dtype=torch.float32).view(-1, 1) * 32 + inner


class PoolMachine(RuleBasedStateMachine):
    sequences: Bundle[SequenceModel] = Bundle("sequences")
    windows: tuple[int | None, ...] = (None, None)
    window_rows: RowShape | None = None
    value_dim: int | None = None
    blocks = 17  # 3 slabs of 5 blocks; two are left over

    def __init__(self) -> None:
        super().__init__()
        self.shape = shape = geometry(self.windows, self.window_rows, self.value_dim)
        groups = LayerGroups.from_geometry(shape)
        limit = self.blocks * groups.layers * BLOCK_SIZE * shape.full_rows.bytes(torch.float32)
        self.pool = HostPool(shape, torch.float32, limit, slab_tokens=6 * BLOCK_SIZE)
        self.groups = self.pool.groups
        self.live: list[SequenceModel] = []
        self.written = 0

    def used_blocks(self) -> set[int]:
        used_blocks = {block for model in self.live for window in model.blocks.windows.values() for block in window}
        return used_blocks | {block for model in self.live if self.groups.full for block in model.blocks.ids}

    def missing_blocks(self, model: SequenceModel, stop: int) -> int:
        """Return how many blocks are missing to store `stop` tokens. Not valid for models with sliding layers."""
        blocks = model.blocks
        others = {block for other in self.live if other is not model for block in other.blocks.ids}
        tail = blocks.ids[blocks.length // BLOCK_SIZE :]
        copied = sum(block in others or block in self.pool.cached for block in tail)
        needed = copied + max(0, -(-stop // BLOCK_SIZE) - len(blocks.ids))
        return needed - (self.pool.block_count - len(self.used_blocks() | set(blocks.ids)))

    def visible_tokens(self, layer: int, length: int) -> range:
        return range(self.groups.first_seen(length) if self.groups.group[layer] else 0, length)

    def read(self, model: SequenceModel, layer: int, tokens: range) -> torch.Tensor:
        parts = self.pool.runs(model.blocks, layer, tokens)
        assert all((part.v is part.k) == (self.shape.planes == 1) for part in parts)
        return torch.cat([torch.stack([part.k, part.v][: self.shape.planes], 1) for part in parts], 2)

    def write(self, model: SequenceModel, layer: int, start: int, values: list[int]) -> None:
        k, *v = kv_from(values, layer, self.shape.rows(layer)).unbind(1)
        # If keys contain the values, V is not stored.
        self.pool.write(model.blocks, layer, start, k, v[0] if v else torch.full_like(k, -1))

    def compute(self, model: SequenceModel, count: int, letter: int, before_window: int) -> bool:
        """Prefill or decode `count` tokens. If the pool is full, check that it is unchanged and return False."""
        blocks, start = model.blocks, model.blocks.length
        stop = start + count
        windows, ids, missing_blocks = dict(blocks.windows), list(blocks.ids), self.missing_blocks(model, stop)
        try:
            self.pool.reserve(blocks, stop)
        except PoolFullError:
            assert (blocks.ids, blocks.windows) == (ids, windows)
            assert self.groups.sliding or missing_blocks > 0
            return False
        assert self.groups.sliding or missing_blocks <= 0
        try:
            self.pool.sliding.slide(blocks, start, stop, before_window=before_window)
        except PoolFullError:
            assert blocks.windows == windows
            self.pool.truncate(blocks, start)
            return False
        assert not self.pool.sliding.slides(blocks, start, stop) or before_window
        model.extend([letter] * count)
        for layer in range(len(self.windows)):
            kept = self.pool.stored_range(blocks, layer, range(start, stop))
            for tokens in (range(kept.start, kept.start + len(kept) // 3), range(kept.start + len(kept) // 3, stop)):
                # in two parts, like chunked prefill
                self.write(model, layer, tokens.start, model.values[tokens.start : tokens.stop])
        self.pool.commit(blocks, stop)
        return True

    @rule(target=sequences, count=COUNTS, letter=LETTERS, before_window=st.sampled_from([0, 64, 200]))
    def start(self, count: int, letter: int, before_window: int) -> SequenceModel:
        model = SequenceModel(BlockTable())
        if not self.compute(model, count, letter, before_window):
            return multiple()  # type: ignore[return-value]
        self.live.append(model)
        return model

    @rule(model=sequences, count=COUNTS, letter=LETTERS, before_window=st.sampled_from([0, 64, 200]))
    def prefill(self, model: SequenceModel, count: int, letter: int, before_window: int) -> None:
        if self.compute(model, count, letter, before_window):
            self.publish(model)
            self.pool.sliding.slide(model.blocks, model.blocks.length, model.blocks.length)
            assert len(model.blocks.windows) <= self.groups.window_blocks

    @rule(model=sequences, steps=st.sampled_from([1, 30, 64]), letter=LETTERS)
    def decode(self, model: SequenceModel, steps: int, letter: int) -> None:
        for _ in range(steps):
            if not self.compute(model, 1, letter, 0):
                break
            assert len(model.blocks.windows) <= self.groups.window_blocks

    @rule(target=sequences, model=sequences)
    def fork(self, model: SequenceModel) -> SequenceModel:
        used = self.pool.bytes_used
        twin = SequenceModel(self.pool.fork(model.blocks), list(model.tokens), list(model.values))
        self.live.append(twin)
        assert self.pool.bytes_used == used
        return twin

    @rule(model=consumes(sequences))
    def end(self, model: SequenceModel) -> None:
        self.pool.release(model.blocks)
        assert not model.blocks.windows and not model.blocks.ids
        self.live.remove(model)

    @precondition(lambda self: not self.groups.sliding)
    @rule(model=sequences, share=st.floats(0, 1))
    def truncate(self, model: SequenceModel, share: float) -> None:
        if max(model.values, default=0) >= PRIME:
            return  # sequences that overwrite slots are never truncated
        length = int(model.blocks.length * share)
        self.pool.truncate(model.blocks, length)
        del model.tokens[length:], model.values[length:]
        assert model.blocks.capacity - length < BLOCK_SIZE

    @precondition(lambda self: not self.groups.sliding)
    @rule(model=sequences, share=st.floats(0, 1, exclude_max=True))
    def overwrite(self, model: SequenceModel, share: float) -> None:
        """Overwrite a slot in a full block, as eviction does."""
        if model.blocks.length < BLOCK_SIZE:
            return
        token = int(model.blocks.length // BLOCK_SIZE * BLOCK_SIZE * share)
        block = model.blocks.ids[token // BLOCK_SIZE]
        shared = any(block in other.blocks.ids for other in self.live if other is not model)
        assert self.pool.make_exclusive(model.blocks, token // BLOCK_SIZE) is not shared
        if shared:
            return
        self.written += 1
        model.values[token] = PRIME + self.written
        for layer in range(len(self.windows)):
            self.write(model, layer, token, [model.values[token]])

    @rule(model=sequences, provenance_key=PROVENANCE_KEYS)
    def publish(self, model: SequenceModel, provenance_key: str = "exact") -> None:
        before = list(model.blocks.ids)
        changed = self.pool.publish(model.blocks, model.tokens, provenance_key)
        assert changed == [i for i, block in enumerate(model.blocks.ids) if block != before[i]]

    @rule(
        target=sequences, letters=st.lists(LETTERS, min_size=1, max_size=4), rest=st.integers(0, 70), both=st.booleans()
    )
    def match(self, letters: list[int], rest: int, both: bool) -> SequenceModel:
        tokens = [letter for letter in letters for _ in range(BLOCK_SIZE)] + [2] * rest
        blocks = self.pool.match(tokens, *(("exact", "sparse") if both else ("exact",)))
        assert blocks.length < len(tokens) and blocks.length % BLOCK_SIZE == 0
        model = SequenceModel(blocks)
        model.extend(tokens[: blocks.length])
        self.live.append(model)
        return model

    @invariant()
    def matches_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.bytes_used == (len(self.used_blocks()) + self.pool.idle_blocks) * self.pool.block_bytes
        assert self.pool.bytes_used <= self.pool.limit_bytes
        for model in self.live:
            assert model.blocks.length == len(model.values) == len(model.tokens)
            for layer in range(len(self.windows)):
                tokens = self.visible_tokens(layer, model.blocks.length)
                if tokens:
                    expected = kv_from(model.values[tokens.start :], layer, self.shape.rows(layer))
                    assert torch.equal(self.read(model, layer, tokens), expected)

    def teardown(self) -> None:
        for model in self.live:
            self.pool.release(model.blocks)
        self.pool.check_integrity()
        assert self.pool.bytes_used == self.pool.idle_blocks * self.pool.block_bytes
        if self.groups.full:
            self.pool.new_block_table(self.pool.block_count * BLOCK_SIZE)  # no leaks: all blocks can be freed
            assert self.pool.idle_blocks == 0 == self.pool.free_blocks


class SlidingMachine(PoolMachine):
    windows = (None, 100, 70)
    blocks = 24


class AllSlideMachine(PoolMachine):
    windows = (100, 70)
    blocks = 10


class NarrowWindowMachine(PoolMachine):
    """Sliding layers have more heads of half the width, so each layer takes two storage layers (Gemma 4)."""

    windows = (None, 100, 70, None)
    window_rows = RowShape(6, 1)
    blocks = 24


class ManyHeadsMachine(PoolMachine):
    """Sliding layers have more heads of the same width, so a storage layer has unused memory (MiMo-V2)."""

    windows = (70, None, 100)
    window_rows = RowShape(3, 2)
    blocks = 24


class LatentMachine(PoolMachine):
    """Keys contain the values, so only keys are stored (latent attention)."""

    value_dim = 1


OTHER_MACHINES = (SlidingMachine, AllSlideMachine, NarrowWindowMachine, ManyHeadsMachine, LatentMachine)
for machine, count, steps in ((PoolMachine, 24, 40), *((each, 12, 25) for each in OTHER_MACHINES)):
    machine.TestCase.settings = settings(
        max_examples=examples(count, stress=25 * count),
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
TestPool = PoolMachine.TestCase
TestSliding = SlidingMachine.TestCase
TestAllSlide = AllSlideMachine.TestCase
TestNarrowWindow = NarrowWindowMachine.TestCase
TestManyHeads = ManyHeadsMachine.TestCase
TestLatent = LatentMachine.TestCase


def test_partly_filled_window_block_is_not_cached() -> None:
    # The prefill fills 57 of the 64 slots of a block, and continues at token 200.
    machine = AllSlideMachine()
    model = SequenceModel(BlockTable())
    assert machine.compute(model, 57, 0, 0) and machine.compute(model, 200, 0, 0)
    assert sorted(model.blocks.windows) == [0, 2, 3, 4]
    machine.pool.publish(model.blocks, model.tokens, "exact")
    assert machine.pool.match(model.tokens[:100], "exact").length == 0
    assert machine.pool.match(model.tokens, "exact").length == 4 * BLOCK_SIZE


class OneWindowMachine(PoolMachine):
    windows = (65,)  # a step can leave one block and enter the next one
    blocks = 2


def test_sequence_replaces_window_blocks_that_only_the_cache_shares() -> None:
    machine = OneWindowMachine()
    model = SequenceModel(BlockTable())
    assert machine.compute(model, 64, 0, 0) and machine.compute(model, 64, 0, 0)
    assert sorted(model.blocks.windows) == [0, 1]
    machine.pool.publish(model.blocks, model.tokens, "exact")
    twin = machine.pool.fork(model.blocks)
    assert not machine.compute(model, 1, 0, 0), "the fork still uses block 0"
    machine.pool.release(twin)
    assert machine.compute(model, 1, 0, 0) and sorted(model.blocks.windows) == [1, 2]
    machine.pool.check_integrity()


@pytest.mark.parametrize("missing", range(6))
@pytest.mark.parametrize("window", [1, 64, 65, 129])
def test_prefix_is_usable_while_its_windows_are_complete(missing: int, window: int) -> None:
    groups, table = LayerGroups(1, (0, 1), (0, 0), 1, window), BlockAllocator(100)
    table.add_slab()
    windows, blocks = WindowBlocks(table, groups), list(range(50, 56))
    for i, block in enumerate(blocks):
        if i != missing:
            windows.keep(block, tuple(table.best_fit(1)))
    expected = [n for n in range(7) if missing not in range(groups.first_seen(n * BLOCK_SIZE) // BLOCK_SIZE, n)]
    assert windows.usable(blocks, 0) == max(expected)
    assert windows.usable(blocks, (missing + 1) * BLOCK_SIZE) == 6, "tokens before the floor are never visible"
