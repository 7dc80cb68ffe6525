"""Allocate KV cache blocks for the sequences of one runner, share cached prefixes, and reclaim unused memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..config import EngineConfig
from ..core import BlockTable
from ..errors import PoolFullError
from ..kv_cache.pool import HostPool
from ..kv_cache.prefix_tree import EXACT
from ..model_runner.sequence import Sequence
from ..model_runner.slot_table import AppendOnly, InPlaceEviction, SlotTable
from ..policies.base import Policy
from ..transfer.base import KVStorage
from ..utils.units import format_size

T = TypeVar("T")


def salt_provenance(cache_salt: str) -> str:
    """Return the part of a KV provenance key for `cache_salt`: "" for the empty salt, which all requests share.

    It contains a digest, so that a salt that looks like another part of the key ("+cut-...") cannot collide with it.
    """
    if not cache_salt:
        return ""
    # JSON clients can send half a surrogate pair, which strict UTF-8 cannot encode.
    data = cache_salt.encode("utf-8", "surrogatepass")
    return f"+salt-{hashlib.blake2b(data, digest_size=16).hexdigest()}"


SHARED_BEHIND = 512
"""A prompt also keeps KV of sliding layers for this many tokens before the windows, if there is room.

Another prompt can then reuse the prefix if it differs only in the last tokens, at most this many.
"""


class CacheManager:
    """Allocation of blocks for one policy and configuration. It holds no block tables itself."""

    def __init__(self, pool: HostPool, policy: Policy, config: EngineConfig) -> None:
        self._pool, self._policy, self._config = pool, policy, config

    @property
    def shares(self) -> bool:
        """Whether prefixes are shared.

        Quantised KV is not shared, because results would depend on earlier requests. KV of hybrid models is not shared
        if the pool keeps no snapshots of recurrent state.
        """
        shared = self._config.enable_prefix_caching and self._pool.format.exact
        return shared and self._pool.keeps_states

    @property
    def evicts(self) -> bool:
        """Whether sequences overwrite their own tokens if the pool is full."""
        return self._config.eviction is not None

    def check(self, prompt: int, total: int) -> None:
        """Raise PoolFullError if an empty pool cannot hold `total` tokens (with eviction: `prompt + 1` tokens)."""
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
        """Return the number of slots to reserve: `total`, or `computed + 1` with eviction."""
        return computed + 1 if self.evicts else total

    def slots(self) -> SlotTable:
        if self._config.eviction is None:
            return AppendOnly(self._pool)
        return InPlaceEviction(self._pool, self._config.eviction, self._policy.sinks, self._policy.recent)

    def diverges(self, tokens: Seq[int], provenance: str) -> int | None:
        """Return the index of the first token that is not cached under `provenance`.

        Return None if all are cached, or if prefixes are not shared.
        """
        if not self.shares or self._policy.wants_queries:
            return None
        known = self._pool.known_tokens(tokens, EXACT + provenance)
        return known if known < len(tokens) else None

    def block_table(self, known: Seq[int], capacity: int, stop: int, provenance: str) -> BlockTable:
        """Return a block table for `capacity` tokens that begins with cached blocks of `known`. Raise PoolFullError.

        Sliding layers get slots for the tokens before `stop`.
        """
        blocks = BlockTable()
        if self.shares and not self._policy.wants_queries:
            blocks = self._pool.match(known, EXACT + provenance)
        if not blocks.length:
            blocks = self._pool.new_block_table(capacity)
        return self.reserved(blocks, capacity, blocks.length, stop)

    def reserved(self, blocks: BlockTable, capacity: int, start: int, stop: int) -> BlockTable:
        """Reserve slots for `capacity` tokens, and in sliding layers for the tokens [start, stop). Return `blocks`.

        The block table is released if PoolFullError is raised.
        """
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
        """Allocate slots in sliding layers for tokens [position, stop), and free blocks that have left the windows.

        Raises PoolFullError. Draft tokens do not move the windows.
        """
        # Freed blocks are not in use: `settle` waits for their write-back, decode steps read windows on the device,
        # and the first token after a prefill is sampled before another sequence gets blocks.
        blocks = sequence.blocks
        position = sequence.position if sequence.draft_start is None else sequence.draft_start
        if behind or self._pool.slides(blocks, position, stop, whole=self.evicts):
            storage.settle(blocks)
            self._pool.slide(blocks, position, stop, whole=self.evicts, behind=behind)


NAMED = 8  # holdings listed in an error message


@dataclass(frozen=True)
class Holding:
    """Host memory that cannot be reclaimed, and why, for error messages. Shared blocks count for each holder."""

    name: str
    bytes: int
    reason: str


class Reclaimable(Protocol):
    """An object that holds memory between requests."""

    def reclaim(self) -> bool:
        """Free some memory without losing data. Return False if none can be freed."""
        ...

    def holdings(self) -> list[Holding]:
        """Return the memory that cannot be freed now."""
        ...


def retry_after_reclaim(action: Callable[[], T], reclaimables: Iterable[Reclaimable]) -> T:
    """Call `action` and return its result. While it raises PoolFullError, reclaim memory and try again.

    `action` must not change any state if it raises. If no more memory can be reclaimed, raise PoolFullError, whose
    message names the holders of memory.
    """
    while True:
        try:
            return action()
        except PoolFullError as error:
            stores = tuple(reclaimables)
            if any(one.reclaim() for one in stores):
                continue
            holdings = sorted((own for one in stores for own in one.holdings()), key=lambda own: -own.bytes)
            if not holdings:
                raise
            raise type(error)(f"{error}; {_described(holdings)}") from error


def _described(holdings: list[Holding]) -> str:
    total = sum(one.bytes for one in holdings)
    named = ", ".join(f"{one.name!r} {format_size(one.bytes)} ({one.reason})" for one in holdings[:NAMED])
    others = f" and {len(holdings) - NAMED} more" if len(holdings) > NAMED else ""
    return f"sessions hold {format_size(total)} of it: {named}{others}; close some, or finish their turns first"
