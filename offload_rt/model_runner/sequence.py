"""A sequence on its way: its tokens, its hold on the pool, and what the policy remembers of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core import CHUNK, BlockTable
from ..kv_cache.pool import HostPool
from ..policies.base import KeyReader, PolicyState
from ..transfer.link import KVStorage
from .slot_table import SlotTable
from .trace import Trace


@dataclass(eq=False)
class Sequence:
    """tokens: prompt and what was generated. The first `position` of them have been computed in every layer; a decode
    step computes the next one. The rows of the first `exact` come from exact attention; those of the first `unlearned`
    from the prefix tree, and the policy's state learns their keys with the next prefill, but for those of the first
    `learned`, which it has from another sequence's. `slots` says where rows lie in `blocks`. The sequence owns block
    table, slots and state; all three fork with it.

    `shift` is how many tokens have been cut out of it: token t, if it is yet to be computed, has position t + shift.
    `provenance` names the cache salt and what was cut: it is part of the key of every chunk. `interrupted`: a step on
    it was interrupted, so that resident rows and policy state may be a token ahead in some layers (rows in the pool
    below `position` are right). `expected` is the number of tokens that it may grow to, as far as is known, and `forks`
    how many others will fork from it and may grow as long. `draft_start`: while drafts are decoded, the first token
    that may be taken back: what its windows show is kept. `drafter`: the same text in the pool of a draft model."""

    id: int
    tokens: list[int]
    blocks: BlockTable
    slots: SlotTable
    keys: KeyReader
    state: PolicyState
    trace: Trace
    position: int = 0
    exact: int = 0
    unlearned: int = 0
    learned: int = 0
    shift: int = 0
    provenance: str = ""
    interrupted: bool = False
    expected: int = 0
    forks: int = 0
    draft_start: int | None = None
    drafter: Sequence | None = None

    @property
    def chunks_ahead(self) -> int:
        """Chunks that it and its forks may take from the pool before they have `expected` tokens each."""
        chunks, shared = -(-self.expected // CHUNK), (len(self.tokens) - 1) // CHUNK
        return max(0, chunks - len(self.blocks.chunks)) + self.forks * max(0, chunks - shared)

    def check_integrity(self) -> None:
        """Asserts that tokens, block table and policy state agree."""
        assert self.blocks.length <= self.position <= len(self.tokens)
        assert self.blocks.length == min(self.position, self.blocks.capacity)
        self.state.check_integrity()


def key_reader(pool: HostPool, storage: KVStorage, blocks: BlockTable) -> KeyReader:
    """Returns what reads a block table's keys `[Hkv, n, d]` where they lie: a view if the chunks are one run, else a
    copy. Rows that `storage` is still writing back are waited for."""

    def read(layer: int, tokens: range) -> torch.Tensor:
        storage.settle(blocks)
        parts = pool.runs(blocks, layer, tokens)
        return parts[0].k if len(parts) == 1 else torch.cat([part.k for part in parts], dim=1)

    return read
