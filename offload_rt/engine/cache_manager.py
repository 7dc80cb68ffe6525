"""Allocate KV cache blocks for the sequences of one runner, share cached prefixes, and reclaim unused memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ..config import EngineConfig
from ..core import BLOCK_SIZE, BlockTable
from ..errors import PoolFullError
from ..kv_cache.pool import HostPool
from ..kv_cache.prefix_tree import EXACT
from ..model_runner.sequence import Sequence
from ..model_runner.slot_table import InPlaceEviction, SlotTable
from ..policies.base import Policy
from ..transfer.base import KVStorage
from ..utils.units import format_size


def salt_provenance(cache_salt: str) -> str:
    """Return the part of a KV provenance key that separates requests by cache salt; "" without a salt.

    It contains a digest, because the salt itself could look like another part of the key ("+cut-...").
    """
    if not cache_salt:
        return ""
    # JSON clients can send half a surrogate pair, which strict UTF-8 cannot encode.
    data = cache_salt.encode("utf-8", "surrogatepass")
    return f"+salt-{hashlib.blake2b(data, digest_size=16).hexdigest()}"


KEPT_BEFORE_WINDOW = 512
"""Number of tokens before the sliding window whose KV is also kept after a prefill, if blocks are free.

Another prompt that differs in at most this many tokens at the end can then reuse the prefix.
"""


class CacheManager:
    """Allocates blocks for the sequences of one policy and configuration. Each sequence owns its block table."""

    def __init__(self, pool: HostPool, policy: Policy, config: EngineConfig) -> None:
        self._pool, self._policy, self._config = pool, policy, config

    @property
    def shares(self) -> bool:
        """Whether sequences with a common prefix share its KV.

        Quantised KV is not shared, because the result of a request would then depend on earlier requests. KV of hybrid
        models is not shared if the pool keeps no snapshots of recurrent state.
        """
        shared = self._config.enable_prefix_caching and self._pool.format.exact
        return shared and self._pool.reuses_prefixes

    @property
    def evicts(self) -> bool:
        """Whether a sequence overwrites KV of its own tokens if the pool is full (token eviction)."""
        return self._config.eviction is not None

    def check(self, prompt: int, total: int) -> None:
        """Raise PoolFullError if a sequence of `total` tokens does not fit even in an empty pool.

        With eviction, only its `prompt` tokens and one more must fit.
        """
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
        """Return the number of slots for a sequence: `total`, or with eviction one more than `computed` tokens."""
        return computed + 1 if self.evicts else total

    def slots(self) -> SlotTable:
        if self._config.eviction is None:
            return SlotTable(self._pool)
        return InPlaceEviction(self._pool, self._config.eviction, self._policy.sinks, self._policy.recent)

    def first_uncached(self, tokens: Seq[int], provenance: str) -> int | None:
        """Return the index of the first token whose exact KV is not cached, or None if there is none.

        The result is also None if prefixes are not shared. `provenance` is the end of the KV provenance key
        (`salt_provenance`).
        """
        if not self.shares or self._policy.wants_queries:
            return None
        known = self._pool.known_tokens(tokens, EXACT + provenance)
        return known if known < len(tokens) else None

    def block_table(self, known: Seq[int], capacity: int, stop: int, provenance: str) -> BlockTable:
        """Return a new block table with slots for `capacity` tokens, beginning with the cached blocks of `known`.

        Sliding layers get slots for a first part of the prefill up to `stop` (`reserve_slots`). `provenance` is the end
        of the KV provenance key (`salt_provenance`). Raises PoolFullError.
        """
        blocks = BlockTable()
        if self.shares and not self._policy.wants_queries:
            blocks = self._pool.match(known, EXACT + provenance)
        if not blocks.length:
            blocks = self._pool.new_block_table(capacity)
        return self.reserve_slots(blocks, capacity, blocks.length, stop)

    def reserve_slots(self, blocks: BlockTable, capacity: int, start: int, stop: int) -> BlockTable:
        """Reserve slots in `blocks` for `capacity` tokens, and return `blocks`. On PoolFullError, release all of them.

        Sliding layers get slots for the shortest first part of a prefill of the tokens [start, stop). `begin_prefill`
        reserves more if there is room.
        """
        with self.released_on_error(blocks):
            self._pool.reserve(blocks, capacity)
            *_, end = self._pool.groups.prefill_ends(start, stop, blocks.floor)
            self._pool.sliding.slide(blocks, start, end, next_window=self.evicts)
        return blocks

    @contextmanager
    def released_on_error(self, blocks: BlockTable) -> Iterator[None]:
        """Release `blocks`, which no sequence owns yet, if the body of the `with` statement raises."""
        try:
            yield
        except BaseException:
            self._pool.release(blocks)
            raise

    def slide(self, sequence: Sequence, storage: KVStorage, stop: int, *, before_window: int = 0) -> None:
        """Move the windows of sliding layers to the tokens [position, stop) of a sequence.

        Slots are reserved for the new tokens, and blocks that have left the windows are freed. Draft tokens do not move
        the windows, because they may be rejected. Tokens after the last full block do not move them either if a later
        turn will continue after this block (`Sequence.keeps_decoded`). Raises PoolFullError.

        Args:
            stop: End of the tokens to compute next.
            before_window: Maximum number of new tokens before the last window that get slots too, if blocks are free.
        """
        # Freed blocks are not in use: `settle` waits for their write-back, decode steps read windows on the device,
        # and the first token after a prefill is sampled before another sequence gets blocks.
        blocks = sequence.blocks
        position = sequence.position if sequence.draft_start is None else sequence.draft_start
        if sequence.keeps_decoded:
            position = position // BLOCK_SIZE * BLOCK_SIZE
        if before_window or self._pool.sliding.slides(blocks, position, stop, next_window=self.evicts):
            storage.settle(blocks)
            self._pool.sliding.slide(blocks, position, stop, next_window=self.evicts, before_window=before_window)

    def rebalance(self, batch: Seq[Sequence], storage: KVStorage) -> None:
        """If the pool is full, move blocks from the longest sequence of `batch` to sequences that need one.

        Used only with eviction. A sequence that gets no block overwrites its own tokens.
        """
        for sequence in batch if self.evicts else ():
            if not sequence.slots.grows or sequence.position < sequence.blocks.capacity:
                continue
            if not self._pool.can_grow:
                longest = max(batch, key=lambda other: len(other.blocks.ids))
                if len(longest.blocks.ids) > len(sequence.blocks.ids) + 1:
                    self._shrink(longest, storage)
            if self._pool.can_grow:
                self._pool.reserve(sequence.blocks, sequence.position + 1)

    def _shrink(self, sequence: Sequence, storage: KVStorage) -> None:
        """Evict the least important tokens of a sequence and free its last block, if possible."""
        blocks, policy = sequence.blocks, self._policy
        moves = sequence.slots.shrink(blocks)
        if moves is None:
            return
        for layer, pairs in enumerate(moves):
            for slot, target in pairs:
                storage.move(blocks, layer, slot, target)
                if layer not in policy.dense_layers:
                    sequence.state.on_moved(layer, slot, target)
        storage.close(blocks)  # resident KV entries have moved to other slots
        self._pool.shrink(blocks, blocks.capacity - BLOCK_SIZE)
        storage.open(blocks, policy.sinks, policy.recent)


MAX_LISTED = 8  # maximum number of users listed in an error message


@dataclass(frozen=True)
class MemoryUse:
    """Host memory of one session or request that cannot be reclaimed now. Used in error messages.

    Attributes:
        bytes: Size in bytes. A shared block is counted for each of its users.
    """

    name: str
    bytes: int
    reason: str


class Reclaimable(Protocol):
    """An object that keeps memory between requests and can free it on demand, such as a session store."""

    def reclaim(self) -> bool:
        """Free some memory without losing data. Return False if there is none."""
        ...

    def memory_in_use(self) -> list[MemoryUse]:
        """Return which sessions or requests use memory that cannot be freed now."""
        ...


def describe_memory_use(uses: list[MemoryUse]) -> str:
    """Return the end of an error message that lists the largest `uses`."""
    uses = sorted(uses, key=lambda own: -own.bytes)
    total = sum(one.bytes for one in uses)
    named = ", ".join(f"{one.name!r} {format_size(one.bytes)} ({one.reason})" for one in uses[:MAX_LISTED])
    others = f" and {len(uses) - MAX_LISTED} more" if len(uses) > MAX_LISTED else ""
    return f"sessions use {format_size(total)} of it: {named}{others}; close some, or finish their turns first"
