"""Test a custom `StorageTier`: sessions give the same answers on this minimal in-memory tier as on disk."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from support.sessions import answer as take_turn
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError, SamplingParams
from offload_rt.kv_cache.prefix_tree import block_key, root_key
from offload_rt.sessions.history import document_name
from offload_rt.sessions.store import SessionStore
from offload_rt.sessions.turn_queue import TurnQueue
from offload_rt.storage.block_store import Document, NamedBlock, StorageTier, Summarise, Summary, read_through

GREEDY = SamplingParams(max_tokens=20, temperature=0)
TURNS = [tiny_prompt(150, seed=1), tiny_prompt(30, seed=2), tiny_prompt(75, seed=3)]

# -------------------------------------------------------------------------------------------------- the in-memory tier


@dataclass(frozen=True)
class MemoryBlock:
    """A data in memory: its key, its tokens and the bytes of each layer."""

    key: bytes
    tokens: bytes
    layers_read: dict[int, bytes]

    @property
    def count(self) -> int:
        return len(self.tokens) // 8

    @property
    def layer_bytes(self) -> int:
        return len(self.layers_read[0])

    def read_layer(self, layer: int, into: memoryview) -> bool:
        into[:] = self.layers_read[layer]
        return True


@dataclass
class MemoryWriter:
    store: MemoryTier
    block: MemoryBlock

    def write(self, layer: int, data: memoryview) -> None:
        self.block.layers_read[layer] = bytes(data)

    def commit(self) -> bool:
        self.store.blocks[self.block.key] = self.block
        return True

    def abort(self) -> None:
        self.block.layers_read.clear()


@dataclass
class MemoryTier:
    """Storage tier in dictionaries, which can be passed to another tier. It never evicts."""

    namespace: str
    layers: int
    blocks: dict[bytes, MemoryBlock] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    claims: set[bytes] = field(default_factory=set)
    last_error: str = ""
    closed: bool = False

    @property
    def root(self) -> bytes:
        return root_key(self.namespace)

    @property
    def bytes_used(self) -> int:
        return sum(len(data) for block in list(self.blocks.values()) for data in block.layers_read.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self.blocks

    def find(self, parent: bytes, provenance_key: str, tokens: bytes) -> MemoryBlock | None:
        block = self.blocks.get(block_key(parent, provenance_key, tokens))
        return block if block is not None and block.tokens == tokens else None

    def begin(
        self,
        parent: bytes,
        provenance_key: str,
        tokens: bytes,
        layer_bytes: int,
        cost: int = 0,
        *,
        claim: bool = False,
    ) -> MemoryWriter | None:
        key = block_key(parent, provenance_key, tokens)
        if claim:
            self.claims.add(key)
        return None if key in self.blocks else MemoryWriter(self, MemoryBlock(key, tokens, {}))

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.blocks.pop(key, None)
            self.claims.discard(key)

    def claim(self, keys: Iterable[bytes]) -> None:
        self.claims.update(key for key in keys if key in self.blocks)

    def retain(self, keys: Container[bytes], space: str | None = None, *, claimed: bool = True) -> int:
        self.claims = self.claims if claimed else set()
        gone = [key for key in self.blocks if key not in keys and key not in self.claims]
        self.remove(gone)
        return len(gone)

    def touch(self, keys: Iterable[bytes]) -> None: ...

    def expect(self, keys: Sequence[bytes]) -> None: ...

    def pin(self, keys: Iterable[bytes]) -> None: ...

    def unpin(self, keys: Iterable[bytes]) -> None: ...

    def put(self, name: str, data: bytes) -> None:
        self.texts[name] = data

    def get(self, name: str) -> Document | None:
        return Document(self.texts[name]) if name in self.texts else None

    def documents(self) -> dict[str, Document | None]:
        return {f"{self.root.hex()}/{name}": self.get(name) for name in self.texts}

    def summaries(self, space: str, summarise: Summarise) -> dict[str, Summary | None]:
        return {name: summarise(data) for name, data in self.texts.items()}

    def delete(self, name: str, summarise: Summarise | None = None) -> bool:
        return self.texts.pop(name.split("/")[-1], None) is not None

    def close(self) -> None:
        self.closed = True


# --------------------------------------------------------------------------------------------------------------- tests


def make_llm() -> LLM:
    return LLM(tiny_model("llama", dtype=torch.float32), dtype="float32", host_memory="16MiB", policy="full")


answer = partial(take_turn, params=GREEDY)


@pytest.fixture
def kept() -> Iterator[dict[str, MemoryTier]]:
    tiers: dict[str, MemoryTier] = {}
    yield tiers
    assert all(tier.closed for tier in tiers.values())


def open_store(llm: LLM, kept: dict[str, MemoryTier]) -> SessionStore:
    """Open a session store whose tier has the content of the previous tier of its namespace."""

    def open_tier(namespace: str, layers: int) -> StorageTier:
        before = kept.get(namespace)
        blocks, texts = (before.blocks, before.texts) if before is not None else ({}, {})
        kept[namespace] = MemoryTier(namespace, layers, blocks, texts)
        return kept[namespace]

    return SessionStore(llm.runner, open_tier)


def test_a_session_on_a_tier_from_outside_answers_as_on_disk(kept: dict[str, MemoryTier], tmp_path: Path) -> None:
    llm = make_llm()
    on_disk = llm.session("s", tmp_path)
    expected = [answer(on_disk, turn) for turn in TURNS]
    on_disk.truncate(keep_last=60)
    expected.append(answer(on_disk, TURNS[0]))
    on_disk.close()
    found = []
    for turn in TURNS:  # a new LLM for every turn simulates a new process
        session = open_store(make_llm(), kept).open("s")
        found.append(answer(session, turn))
        assert session.loaded_tokens == 0 if turn is TURNS[0] else session.loaded_tokens > 100
        assert session.host.stats.computed_tokens == 0, "all rows came from the tier"
        session.close()
    session = open_store(make_llm(), kept).open("s")
    session.truncate(keep_last=60)
    session.close()
    session = open_store(make_llm(), kept).open("s")
    found.append(answer(session, TURNS[0]))
    session.close()
    assert found == expected


def test_a_queue_forks_and_discards_on_a_tier_from_outside(kept: dict[str, MemoryTier]) -> None:
    store = open_store(make_llm(), kept)
    queue = TurnQueue(store, 2)
    one, two = queue.add("one", TURNS[0], GREEDY), queue.add("two", TURNS[0], GREEDY)
    list(queue.run())
    assert one.token_ids == two.token_ids != []
    twin = store.session("one").fork("twin")
    with pytest.raises(InputError, match="twin"):
        store.session("two").fork("twin")
    twin.discard()
    assert sorted(store.context.storage.documents()) == [
        f"{store.context.storage.root.hex()}/{n}" for n in sorted(map(document_name, ("one", "two")))
    ]
    queue.close()


def test_reading_a_block_through_says_whether_it_is_there(kept: dict[str, MemoryTier]) -> None:
    store = open_store(make_llm(), kept)
    session = store.open("s")
    answer(session, TURNS[0])
    session.save()
    name = session.kv.names(64)[0]
    assert read_through(store.context.storage, name)
    assert not read_through(
        store.context.storage, NamedBlock(0, name.parent, "another provenance", name.tokens, name.key)
    )
    session.close()
