"""Room in the host pool for the sequences of one runner: where their rows go, and what they share of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

from ..config import EngineConfig
from ..core import BlockTable
from ..errors import PoolFullError
from ..kv_cache.pool import HostPool
from ..model_runner.sequence import Sequence
from ..model_runner.slot_table import AppendOnly, InPlaceEviction, SlotTable
from ..policies.base import Policy
from ..transfer.link import KVStorage

EXACT = "exact"
"""Lineage of rows that exact attention made, by prefill or under policy "full"."""


def salt_provenance(cache_salt: str) -> str:
    """Return the part of a KV provenance key that `cache_salt` adds; nothing for the empty salt, which all share.

    A digest, not the salt itself: a salt that looks like another suffix ("+cut-...") must not collide with it.
    """
    if not cache_salt:
        return ""
    # JSON clients can send half a surrogate pair, which strict UTF-8 refuses.
    data = cache_salt.encode("utf-8", "surrogatepass")
    return f"+salt-{hashlib.blake2b(data, digest_size=16).hexdigest()}"


SHARED_BEHIND = 512
"""Of a prompt that others may begin with, so many tokens more than its own windows show keep their rows of sliding
layers, if there is room: another prompt can part from it at most so far before its end."""


class Room:
    """What one policy and configuration may take of a pool. It changes block tables only through the pool, and holds
    none."""

    def __init__(self, pool: HostPool, policy: Policy, config: EngineConfig) -> None:
        self._pool, self._policy, self._config = pool, policy, config

    @property
    def shares(self) -> bool:
        """Whether prompts reuse each other's rows: never rounded ones, or a result would depend on what ran before."""
        return self._config.enable_prefix_caching and self._pool.format.exact

    @property
    def evicts(self) -> bool:
        """Whether sequences overwrite their own slots where the pool is full."""
        return self._config.eviction is not None

    def check(self, prompt: int, total: int) -> None:
        """Raises PoolFullError where an empty pool could not hold a sequence of `total` tokens; with eviction, which
        begins with the first new token, one of `prompt` tokens."""
        if not self.evicts:
            self._pool.check_fits(total)
            return
        try:
            self._pool.check_fits(prompt + 1)
        except PoolFullError as error:
            raise PoolFullError(
                f"a prompt of {prompt:,} tokens does not fit, and eviction begins with the first new token: {error}"
            ) from None

    def slots_for(self, computed: int, total: int) -> int:
        """Slots to reserve for a sequence of `total` tokens of which `computed` are there or are prefilled: all of
        them, or with eviction, which overwrites where the pool is full, one more than is computed."""
        return computed + 1 if self.evicts else total

    def slots(self) -> SlotTable:
        """The slots of a new sequence."""
        if self._config.eviction is None:
            return AppendOnly(self._pool)
        return InPlaceEviction(self._pool, self._config.eviction, self._policy.sinks, self._policy.recent)

    def diverges(self, tokens: Seq[int], provenance: str) -> int | None:
        """Return the first of a prompt's `tokens` that the prefix tree does not have under `provenance`. Return None if
        it has them all, or if prefixes are not shared."""
        if not self.shares or self._policy.wants_queries:
            return None
        known = self._pool.known_tokens(tokens, EXACT + provenance)
        return known if known < len(tokens) else None

    def block_table(self, known: Seq[int], capacity: int, stop: int, provenance: str) -> BlockTable:
        """Room for `capacity` tokens, of which `stop` are there or come with the next prefill, behind what the prefix
        tree has of `known` under `provenance`. Raises PoolFullError."""
        blocks = BlockTable()
        if self.shares and not self._policy.wants_queries:
            blocks = self._pool.match(known, EXACT + provenance)
        if not blocks.length:
            blocks = self._pool.new_block_table(capacity)
        return self.reserved(blocks, capacity, blocks.length, stop)

    def reserved(self, blocks: BlockTable, capacity: int, start: int, stop: int) -> BlockTable:
        """Return the block table with room for `capacity` tokens, and in sliding layers for the computation of tokens
        [start, stop). It is released if there is no room (PoolFullError)."""
        with self.released_on_error(blocks):
            self._pool.reserve(blocks, capacity)
            self._pool.slide(blocks, start, stop, whole=self.evicts)
        return blocks

    @contextmanager
    def released_on_error(self, blocks: BlockTable) -> Iterator[None]:
        """Release a block table that no sequence owns yet if the body raises."""
        try:
            yield
        except BaseException:
            self._pool.release(blocks)
            raise

    def slide(self, sequence: Sequence, storage: KVStorage, stop: int, *, behind: int = 0) -> None:
        """Takes the slots in sliding layers that tokens [position, stop) need, and gives back what has left the
        windows, drafts not counted. Raises PoolFullError. Rows that leave have been written, since that is waited for,
        and read: a decode step reads nothing of a sliding layer from the pool (its window is resident), and after a
        prefill the first token is sampled before anybody else gets chunks."""
        blocks = sequence.blocks
        position = sequence.position if sequence.draft_start is None else sequence.draft_start
        if behind or self._pool.slides(blocks, position, stop, whole=self.evicts):
            storage.settle(blocks)
            self._pool.slide(blocks, position, stop, whole=self.evicts, behind=behind)
