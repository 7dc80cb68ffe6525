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
    """Return the cache salt's part of a KV provenance key, or "" if there is no salt."""
    if not cache_salt:
        return ""
    # Use a digest, because the salt itself could look like another part of the key ("+cut-..."). JSON clients can send
    # half of a surrogate pair, which strict UTF-8 cannot encode.
    data = cache_salt.encode("utf-8", "surrogatepass")
    return f"+salt-{hashlib.blake2b(data, digest_size=16).hexdigest()}"


KEPT_BEFORE_WINDOW = 512
"""After a prefill, the KV of this many tokens before the sliding window is also kept, if blocks are free.

A later prompt can then reuse the prefix even if it differs in up to this many tokens at the end.
"""


class CacheManager:
    """Allocates blocks for sequences that use one policy and configuration. Each sequence owns its block table."""

    def __init__(self, pool: HostPool, policy: Policy, config: EngineConfig) -> None:
        self._pool, self._policy, self._config = pool, policy, config

    @property
    def shares(self) -> bool:
        """Whether sequences with a common prefix share the KV of that prefix."""
        # Quantised KV is not shared, because a prompt would then attend to it, and results would depend on earlier
        # requests by more than rounding.
        shared = self._config.enable_prefix_caching and self._pool.format.exact
        return shared and self._pool.reuses_prefixes  # hybrid models need snapshots of recurrent state

    @property
    def evicts(self) -> bool:
        return self._config.eviction is not None

    def check(self, prompt: int, total: int) -> None:
        """Raise PoolFullError if a sequence of `total` tokens can never fit in the pool.

        With eviction, it is enough if the `prompt` tokens and one new token fit.
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
        """Return the number of slots to reserve for a sequence of `total` tokens.

        With eviction, slots for the `computed` tokens and one new token are enough.
        """
        return computed + 1 if self.evicts else total

    def slots(self) -> SlotTable:
        if self._config.eviction is None:
            return SlotTable(self._pool)
        return InPlaceEviction(self._pool, self._config.eviction, self._policy.sinks, self._policy.recent)

    def first_uncached(self, tokens: Seq[int], provenance: str) -> int | None:
        """Return the index of the first token whose exact KV is not cached.

        Return None if all tokens are cached or if prefixes are not shared. `provenance` is the part of the KV
        provenance key that covers the weights and the cache salt.
        """
        if not self.shares or self._policy.wants_queries:
            return None
        known = self._pool.known_tokens(tokens, EXACT + provenance)
        return known if known < len(tokens) else None

    def block_table(self, known: Seq[int], capacity: int, stop: int, provenance: str) -> BlockTable:
        """Return a block table that contains the cached blocks of `known` and has slots for `capacity` tokens.

        For `stop` and errors, see `reserve_slots`. For `provenance`, see `first_uncached`.
        """
        blocks = BlockTable()
        if self.shares and not self._policy.wants_queries:
            blocks = self._pool.match(known, EXACT + provenance)
        if not blocks.length:
            blocks = self._pool.new_block_table(capacity)
        return self.reserve_slots(blocks, capacity, blocks.length, stop)

    def reserve_slots(self, blocks: BlockTable, capacity: int, start: int, stop: int) -> BlockTable:
        """Reserve slots for `capacity` tokens in `blocks`, and return `blocks`.

        A prefill of the tokens [start, stop) may run in several parts. In sliding layers, slots are reserved only for
        the first part, and that part is as short as possible.

        Raises:
            PoolFullError: There are too few free blocks. `blocks` has been released.
        """
        with self.released_on_error(blocks):
            self._pool.reserve(blocks, capacity)
            *_, end = self._pool.groups.prefill_ends(start, stop, blocks.floor)
            self._pool.sliding.slide(blocks, start, end, next_window=self.evicts)
        return blocks

    @contextmanager
    def released_on_error(self, blocks: BlockTable) -> Iterator[None]:
        """Context manager that releases `blocks` if an error occurs before a sequence owns them."""
        try:
            yield
        except BaseException:
            self._pool.release(blocks)
            raise

    def slide(self, sequence: Sequence, storage: KVStorage, stop: int, *, before_window: int = 0) -> None:
        """Move the windows of sliding layers so that they cover the tokens [position, stop) of a sequence.

        Slots are reserved for the new tokens, and blocks outside the windows are freed. If blocks are free, up to
        `before_window` new tokens before the last window also get slots. Raises PoolFullError.
        """
        # Freed blocks are no longer read: `settle` waits for their write-back, decode steps read windows on the device,
        # and the first token after a prefill is sampled before another sequence gets blocks.
        blocks = sequence.blocks
        # Draft tokens do not move the windows, because they may be rejected.
        position = sequence.position if sequence.draft_start is None else sequence.draft_start
        if sequence.keeps_decoded:  # a later turn continues after the last full block
            position = position // BLOCK_SIZE * BLOCK_SIZE
        if before_window or self._pool.sliding.slides(blocks, position, stop, next_window=self.evicts):
            storage.settle(blocks)
            self._pool.sliding.slide(blocks, position, stop, next_window=self.evicts, before_window=before_window)

    def rebalance(self, batch: Seq[Sequence], storage: KVStorage) -> None:
        """If the pool is full, move blocks from the longest sequence to sequences whose last block is full.

        Used only with eviction. A sequence that gets no block overwrites the KV of some of its tokens.
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
        blocks, policy = sequence.blocks, self._policy
        moves = sequence.slots.shrink(blocks)  # this evicts the least important tokens
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


MAX_LISTED = 8  # maximum number of users to list in an error message


@dataclass(frozen=True)
class MemoryUse:
    """Host memory of a session or request that cannot be reclaimed now. Used in error messages.

    A block that several sequences share is counted once for each of them.
    """

    name: str
    bytes: int
    reason: str


class Reclaimable(Protocol):
    """An object, such as a session store, that keeps memory between requests and can free it on demand."""

    def reclaim(self) -> bool:
        """Free some memory without losing data. Return False if there is none."""
        ...

    def memory_in_use(self) -> list[MemoryUse]: ...


def describe_memory_use(uses: list[MemoryUse]) -> str:
    uses = sorted(uses, key=lambda own: -own.bytes)
    total = sum(one.bytes for one in uses)
    named = ", ".join(f"{one.name!r} {format_size(one.bytes)} ({one.reason})" for one in uses[:MAX_LISTED])
    others = f" and {len(uses) - MAX_LISTED} more" if len(uses) > MAX_LISTED else ""
    return f"sessions use {format_size(total)} of it: {named}{others}; close some, or finish their turns first"
