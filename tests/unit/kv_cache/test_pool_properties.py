"""Test the host pool against a plain model of all written values, with random sequences of operations."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from offload_rt.core import CHUNK, BlockTable, ModelGeometry
from offload_rt.errors import PoolFullError
from offload_rt.kv_cache.pool import HostPool

LAYERS, HEADS, WIDTH = 2, 2, 2
GEOMETRY = ModelGeometry(
    layers=LAYERS,
    hidden=4,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=WIDTH,
    vocab=10,
    scales=(1.0,) * LAYERS,
    windows=(None,) * LAYERS,
    max_positions=1 << 20,
    absolute_positions=False,
    default_alpha=5.0,
)
LIMIT = 17 * GEOMETRY.kv_bytes(CHUNK, torch.float32)
COUNTS = st.sampled_from([1, 7, 57, 63, 64, 65, 130, 200])
LETTERS = st.integers(0, 1)
PROVENANCE_KEYS = st.sampled_from(["exact", "sparse"])


@dataclass(eq=False)
class Model:
    """Expected contents of a sequence: its tokens, and a number per token from which K and V were made."""

    blocks: BlockTable
    tokens: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)


def made_from(values: list[int], layer: int) -> torch.Tensor:
    """Return distinct K and V `[Hkv, 2, n, d]` of one layer."""
    inner = torch.arange(HEADS * 2 * WIDTH, dtype=torch.float32).view(HEADS, 2, 1, WIDTH) + 8 * layer
    return torch.tensor(values, dtype=torch.float32).view(-1, 1) * 16 + inner


class PoolMachine(RuleBasedStateMachine):
    sequences: Bundle[Model] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(GEOMETRY, torch.float32, LIMIT, slab_tokens=6 * CHUNK)
        assert self.pool.chunk_count == 15  # 3 slabs of 5 blocks; two of the 17 are left over
        self.live: list[Model] = []
        self.written = 0
        self.published: defaultdict[tuple[tuple[int, ...], int], set[tuple[int, ...]]] = defaultdict(set)

    def held(self) -> set[int]:
        return {chunk for model in self.live for chunk in model.blocks.chunks}

    def add(self, model: Model) -> Model:
        self.live.append(model)
        return model

    def fresh_values(self, count: int) -> list[int]:
        self.written += count
        return list(range(self.written - count, self.written))

    def read(self, model: Model, layer: int) -> torch.Tensor:
        parts = self.pool.runs(model.blocks, layer, range(model.blocks.length))
        return torch.cat([torch.stack([part.k, part.v], 1) for part in parts], 2)

    def extend(self, model: Model, count: int, letter: int) -> bool:
        """Append tokens to a sequence. Return False if the pool is full, and check that it is."""
        blocks, stop = model.blocks, model.blocks.length + count
        before = BlockTable(list(blocks.chunks), blocks.length)
        others = {chunk for other in self.live if other is not model for chunk in other.blocks.chunks}
        tail = blocks.chunks[blocks.length // CHUNK :]
        copied = sum(chunk in others or chunk in self.pool._tree for chunk in tail)
        needed = copied + max(0, -(-stop // CHUNK) - len(blocks.chunks))
        room = self.pool.chunk_count - len(self.held() | set(blocks.chunks))
        try:
            self.pool.reserve(blocks, stop)
        except PoolFullError:
            assert needed > room
            assert blocks == before
            return False
        assert needed <= room
        values = self.fresh_values(count)
        split = count // 3  # in two parts, like chunked prefill
        for layer in range(LAYERS):
            rows = made_from(values, layer)
            for first, last in ((0, split), (split, count)):
                part = rows[:, :, first:last]
                self.pool.write(blocks, layer, before.length + first, part[:, 0], part[:, 1])
        self.pool.commit(blocks, stop)
        model.tokens += [letter] * count
        model.values += values
        return True

    @rule(target=sequences, count=COUNTS, letter=LETTERS)
    def start(self, count: int, letter: int) -> Model:
        try:
            model = self.add(Model(self.pool.new_block_table(count)))
        except PoolFullError:
            assert -(-count // CHUNK) > self.pool.chunk_count - len(self.held())
            return multiple()
        assert self.extend(model, count, letter)
        return model

    @rule(model=sequences, count=COUNTS, letter=LETTERS)
    def append(self, model: Model, count: int, letter: int) -> None:
        self.extend(model, count, letter)

    @rule(target=sequences, model=sequences)
    def fork(self, model: Model) -> Model:
        used = self.pool.bytes_used
        twin = self.add(Model(self.pool.fork(model.blocks), list(model.tokens), list(model.values)))
        assert self.pool.bytes_used == used
        return twin

    @rule(model=sequences, share=st.floats(0, 1))
    def truncate(self, model: Model, share: float) -> None:
        length = int(model.blocks.length * share)
        self.pool.truncate(model.blocks, length)
        del model.tokens[length:], model.values[length:]
        assert model.blocks.capacity - length < CHUNK

    @rule(model=consumes(sequences))
    def end(self, model: Model) -> None:
        self.pool.release(model.blocks)
        self.live.remove(model)

    @rule(model=sequences, provenance_key=PROVENANCE_KEYS)
    def publish(self, model: Model, provenance_key: str) -> None:
        before = list(model.blocks.chunks)
        changed = self.pool.publish(model.blocks, model.tokens, provenance_key)
        assert changed == [i for i, chunk in enumerate(model.blocks.chunks) if chunk != before[i]]
        for i, chunk in enumerate(model.blocks.chunks):
            where = slice(i * CHUNK, (i + 1) * CHUNK)
            key = (tuple(model.tokens[: where.stop]), i)
            if i in changed:
                now = self.pool.runs(model.blocks, 0, range(where.start, where.stop))[0].k[0, :, 0] / 16
                model.values[where] = [int(value) for value in now]
                assert tuple(model.values[where]) in self.published[key]
            elif chunk in self.pool._tree:
                self.published[key].add(tuple(model.values[where]))

    @rule(
        target=sequences, letters=st.lists(LETTERS, min_size=1, max_size=4), rest=st.integers(0, 70), both=st.booleans()
    )
    def match(self, letters: list[int], rest: int, both: bool) -> Model:
        tokens = [letter for letter in letters for _ in range(CHUNK)] + [2] * rest
        blocks = self.pool.match(tokens, *(("exact", "sparse") if both else ("exact",)))
        assert blocks.length < len(tokens) and blocks.length % CHUNK == 0
        model = self.add(Model(blocks, tokens[: blocks.length]))
        rows = self.read(model, 0)[0, 0, :, 0] / 16 if blocks.length else torch.empty(0)
        model.values = [int(value) for value in rows]
        for i in range(len(blocks.chunks)):
            stop = (i + 1) * CHUNK
            assert tuple(model.values[i * CHUNK : stop]) in self.published[tuple(tokens[:stop]), i]
        return model

    @rule(model=sequences, share=st.floats(0, 1, exclude_max=True))
    def overwrite(self, model: Model, share: float) -> None:
        """Overwrite a slot of a full block, as eviction does."""
        if model.blocks.length < CHUNK:
            return
        token = int(model.blocks.length // CHUNK * CHUNK * share)
        chunk = model.blocks.chunks[token // CHUNK]
        shared = any(chunk in other.blocks.chunks for other in self.live if other is not model)
        assert self.pool.claim(model.blocks, token // CHUNK) is not shared
        if shared:
            return
        (model.values[token],) = self.fresh_values(1)
        for layer in range(LAYERS):
            row = made_from([model.values[token]], layer)
            self.pool.write(model.blocks, layer, token, row[:, 0], row[:, 1])

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        self.pool.check_integrity()
        held = self.held()
        assert self.pool.bytes_used == (len(held) + self.pool.idle_chunks) * self.pool.chunk_bytes <= LIMIT
        for model in self.live:
            assert model.blocks.length == len(model.values) == len(model.tokens)
            for layer in range(LAYERS):
                if model.values:
                    assert torch.equal(self.read(model, layer), made_from(model.values, layer))

    def teardown(self) -> None:
        for model in self.live:
            self.pool.release(model.blocks)
        self.pool.check_integrity()
        assert self.pool.bytes_used == self.pool.idle_chunks * self.pool.chunk_bytes
        # Nothing leaked: the tree frees all its blocks.
        everything = self.pool.new_block_table(self.pool.chunk_count * CHUNK)
        assert self.pool.idle_chunks == 0 == self.pool.free_chunks
        assert everything.capacity == self.pool.chunk_count * CHUNK


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = PoolMachine.TestCase
