"""Create, fork and free the sequences of one model with one policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TypeVar

import torch

from ..config import EngineConfig
from ..core import BLOCK_SIZE, BlockTable
from ..errors import PoolFullError
from ..kv_cache.disk.requests import DiskUse
from ..kv_cache.pool import HostPool
from ..kv_cache.prefix_tree import EXACT
from ..model_runner.rollback_states import RollbackStates
from ..model_runner.sequence import Sequence, key_reader
from ..model_runner.trace import Trace
from ..models.loading import LoadedModel
from ..models.recurrent import StateSlots
from ..planning.device_plan import DevicePlan
from ..policies.base import Policy
from ..transfer.base import Transfer
from ..transfer.streams import device_guard
from .cache_manager import CacheManager, Reclaimable, describe_memory_use
from .checks import check_drafts, check_evictable, check_positions, check_token_ids
from .snapshot_keeper import SnapshotKeeper

T = TypeVar("T")

MISSED_MASS_EVERY = 16  # decode steps between two measurements; used by default on a CPU if all keys are in host memory


class SequenceManager:
    """Creates, forks and frees sequences. The caller must free every sequence.

    Between calls, a sequence's block table, resident KV and policy state all describe the same tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        pool: HostPool,
        transfer: Transfer,
        config: EngineConfig,
        plan: DevicePlan | None = None,
    ) -> None:
        self.model, self.policy, self.pool, self.transfer, self.config = model, policy, pool, transfer, config
        self.plan, self.adapter = plan, model.adapter
        self.reclaimables: list[Reclaimable] = []
        usual = MISSED_MASS_EVERY if self.adapter.device.type == "cpu" and pool.file is None else 0
        self._missed_mass_every = usual if config.missed_mass_every is None else config.missed_mass_every
        self.cache_manager = CacheManager(pool, policy, config)
        self._ids = itertools.count()
        self._open: dict[int, Sequence] = {}
        geometry = self.adapter.geometry
        self.states = StateSlots(geometry, self.adapter.dtype, self.adapter.device) if geometry.states else None
        self.rollbacks = None if self.states is None else RollbackStates(self.states, self.adapter)
        self.snapshots: SnapshotKeeper | None = None
        if self.states is not None and self.cache_manager.shares:
            self.snapshots = SnapshotKeeper(self.states, pool)
        if config.eviction is not None:
            check_evictable(policy)
        if config.exact is not None:
            check_drafts(policy, config)

    @property
    def approximates(self) -> bool:
        """Whether decoding gives other KV than prefilling, because attention is sparse or the KV cache is quantised."""
        return self.provenance_key != EXACT or not self.pool.format.exact

    @property
    def provenance_key(self) -> str:
        """KV provenance key of decoded tokens: `EXACT` in lossless mode, otherwise the policy's key."""
        return self.policy.provenance_key if self.config.exact is None else EXACT

    def new_sequence(self, tokens: Seq[int], capacity: int, *, reuse: int = 0, provenance: str = "") -> Sequence:
        """Return a sequence for `tokens` that has KV slots for `capacity` tokens.

        Args:
            reuse: Number of leading tokens to look up in the prefix cache. The last of these tokens is never reused.
            provenance: Part of the KV provenance key that contains the cache salt (see `salt_provenance`).

        Raises:
            InputError: A token id is not in the vocabulary.
            PoolFullError: There are too few free blocks.
        """
        check_token_ids(tokens, self.model)
        provenance = self.model.weights_provenance() + provenance
        diverged_at = self.cache_manager.first_uncached(tokens[:reuse], provenance)
        blocks = self.cache_manager.block_table(tokens[:reuse], capacity, len(tokens), provenance)
        known = blocks.length
        sequence = self._create(blocks, tokens, known=known, exact=known, shift=0, provenance=provenance)
        sequence.trace.diverged_at = diverged_at
        if self.snapshots is not None:
            self.snapshots.note_shared_tokens(sequence, reuse if diverged_at is None else diverged_at)
        return sequence

    @property
    def max_positions(self) -> int:
        """Context length of the model, or the option `max_model_len` if it is lower."""
        trained = self.adapter.geometry.max_positions
        return min(trained, self.config.max_model_len or trained)

    @property
    def position_limit(self) -> str:
        """Describe where `max_positions` comes from, for messages."""
        if self.config.max_model_len == self.max_positions:
            return f"max_model_len={self.max_positions}"
        return f"the context length of {self.model.name}, {self.max_positions:,} tokens"

    def check_fits(self, tokens: int) -> None:
        if self.plan is not None:
            self.plan.check([tokens])
        check_positions(tokens, self.model, self.config.max_model_len)
        if not self.cache_manager.evicts:
            self.pool.check_fits(tokens)

    def retry_after_reclaim(self, action: Callable[[], T]) -> T:
        """Call `action`. If it raises PoolFullError, reclaim memory, for example from idle sessions, and call it again.

        An `action` that raises must not have changed any state.
        """
        while True:
            try:
                return action()
            except PoolFullError as error:
                stores = tuple(self.reclaimables)
                if any(one.reclaim() for one in stores):
                    continue
                if uses := [use for store in stores for use in store.memory_in_use()]:
                    raise type(error)(f"{error}; {describe_memory_use(uses)}") from error
                raise

    def reserve(self, sequence: Sequence, tokens: int = 1) -> None:
        """Reserve slots for the next `tokens` tokens. Raises PoolFullError.

        With eviction, slots are reserved only in sliding layers. In other layers, the decode step chooses the slots.
        """
        if not self.cache_manager.evicts:
            self.pool.reserve(sequence.blocks, sequence.position + tokens)
        # With eviction, this raises PoolFullError if a fork is still using blocks that have left a sliding window.
        self.cache_manager.slide(sequence, self.transfer.storage, sequence.position + tokens)
        self._check_device()

    def _check_device(self) -> None:
        if self.plan is not None:
            self.plan.check([sequence.blocks.capacity for sequence in self._open.values()])

    @device_guard
    def expect(self, sequence: Sequence, tokens: int, *, forks: int = 0) -> None:
        """Prepare for `sequence` and `forks` future forks of it to grow to `tokens` tokens each.

        Host memory is allocated and pinned now, so that no decode step has to wait for it.
        """
        sequence.expected, sequence.forks = tokens, forks
        self._prepare()

    def _prepare(self) -> None:
        self.pool.prepare(BLOCK_SIZE * sum(sequence.blocks_ahead for sequence in self._open.values()))

    @device_guard
    @torch.inference_mode()
    def fork(self, sequence: Sequence, capacity: int, *, same_trace: bool = False) -> Sequence:
        """Return a sequence that shares the computed tokens of `sequence` and has KV slots for `capacity` tokens.

        Full blocks are shared, and a partly filled block is copied. Unless `same_trace` is True, the statistics of the
        fork start at zero, and shared tokens count as reused. Raises PoolFullError.
        """
        self.transfer.storage.settle(sequence.blocks)
        shared, position = self.pool.fork(sequence.blocks), sequence.position
        blocks = self.cache_manager.reserve_slots(shared, capacity, position, min(capacity, position + 1))
        sequence.forks = max(0, sequence.forks - 1)
        with self.cache_manager.released_on_error(blocks):
            keys = key_reader(self.pool, self.transfer.storage, blocks)
            fork = replace(
                sequence, id=next(self._ids), tokens=list(sequence.tokens), blocks=blocks, slots=sequence.slots.fork(),
                keys=keys, state=sequence.state.fork(keys),
                trace=sequence.trace.copy() if same_trace else sequence.trace.restart(reused=position),
                interrupted=False, forks=0, draft_start=None, drafter=None, shared_tokens=0, snapshots={},
                state_slot=-1, rollback=None,
            )  # fmt: skip
            self._register(fork, sequence)
        return fork

    def match(self, tokens: Seq[int], provenance: str = "", floor: int = 0, *, exact_only: bool = False) -> BlockTable:
        """Return a block table with the cached KV of a session's tokens. The last token is never included.

        Args:
            provenance: Part of the KV provenance key that covers the cache salt and truncations.
            floor: First token that sliding layers can see.
            exact_only: Return only blocks with exact KV.
        """
        if not self.cache_manager.shares:
            return BlockTable(floor=floor)
        keys = [EXACT + provenance, *([] if exact_only else [self.provenance_key + provenance])]
        return self.pool.match(tokens, *keys, floor=floor)

    def adopt(
        self,
        tokens: Seq[int],
        blocks: BlockTable,
        *,
        capacity: int,
        known: int,
        exact: int,
        shift: int = 0,
        provenance: str = "",
        snapshot: int | None = None,
    ) -> Sequence:
        """Return a sequence that owns `blocks`, such as the blocks of a stored session.

        `blocks` contains the KV of the first `blocks.length` tokens. The KV of all other `known` tokens is still
        missing: in each layer, the caller must load it before the next prefill runs that layer. On PoolFullError,
        `blocks` is released.

        Args:
            capacity: Number of tokens to reserve slots for.
            known: Number of leading tokens whose KV was computed before.
            exact, shift, provenance: See `Sequence`.
            snapshot: Slot with the recurrent state after the known tokens. None if a snapshot is cached with the
                blocks, or if the model has no recurrent state.
        """
        self.cache_manager.reserve_slots(blocks, capacity, known, max(known, min(capacity, len(tokens))))
        with self.cache_manager.released_on_error(blocks):
            self.pool.commit(blocks, known)
        return self._create(
            blocks, tokens, known=known, exact=exact, shift=shift, provenance=provenance, snapshot=snapshot
        )

    def continues(self, sequence: Sequence) -> bool:
        """Return whether an idle sequence can continue.

        Its KV must be readable, and its recurrent state must be on the device.
        """
        return self.pool.readable(sequence.blocks) and (self.states is None or sequence.state_slot >= 0)

    def suspend(self, sequence: Sequence) -> None:
        """Free a sequence's recurrent state on the device after a turn.

        KV after the last full block is discarded, because there is no snapshot for it.
        """
        assert self.states is not None
        self.transfer.storage.settle(sequence.blocks)
        self._publish(sequence)
        sequence.position = sequence.position // BLOCK_SIZE * BLOCK_SIZE
        sequence.exact = min(sequence.exact, sequence.position)
        self.pool.truncate(sequence.blocks, min(sequence.blocks.length, sequence.position))
        self._release_state(sequence)

    @device_guard
    def reload(self, sequence: Sequence) -> None:
        """Copy resident KV to the device again after the KV in the pool has changed."""
        self.transfer.storage.reload(sequence.blocks, self.policy.sinks, self.policy.recent)

    def reset_policy_state(self, sequence: Sequence) -> None:
        """Copy resident KV to the device again, and reset the policy state. The next prefill rebuilds this state."""
        self.reload(sequence)
        sequence.state, sequence.observed = self.policy.new_state(sequence.keys), 0
        sequence.unobserved = sequence.position
        sequence.interrupted = False

    @device_guard
    @torch.inference_mode()
    def _create(
        self,
        blocks: BlockTable,
        tokens: Seq[int],
        *,
        known: int,
        exact: int,
        shift: int,
        provenance: str,
        snapshot: int | None = None,
    ) -> Sequence:
        with self.cache_manager.released_on_error(blocks):
            keys = key_reader(self.pool, self.transfer.storage, blocks)
            used = None if self.pool.file is None else self.pool.file.use.since(DiskUse())
            layers, every = self.adapter.geometry.layers, self._missed_mass_every
            sequence = Sequence(
                id=next(self._ids), tokens=list(tokens), blocks=blocks, slots=self.cache_manager.slots(), keys=keys,
                state=self.policy.new_state(keys), trace=Trace(layers, every, reused_tokens=known, disk_before=used),
                position=known, exact=exact, unobserved=known, shift=shift, provenance=provenance,
            )  # fmt: skip
            self._register(sequence, None, snapshot)
        return sequence

    def _register(self, sequence: Sequence, origin: Sequence | None, snapshot: int | None = None) -> None:
        self._open[sequence.id] = sequence
        try:
            self._check_device()
            self._prepare()
            blocks = None if origin is None else origin.blocks  # a fork copies the storage of the original sequence
            self.transfer.storage.open(sequence.blocks, self.policy.sinks, self.policy.recent, blocks)
            if self.states is not None:
                sequence.state_slot = self.states.allocate(None if origin is None else origin.state_slot)
                sequence.state_slots = self.states
                if origin is None and sequence.position:
                    assert self.snapshots is not None
                    self.snapshots.restore(sequence, snapshot)
        except BaseException:
            del self._open[sequence.id]
            self.transfer.storage.close(sequence.blocks)
            if self.states is not None and sequence.state_slot >= 0:
                self.states.release(sequence.state_slot)
            raise

    @device_guard
    def free(self, sequence: Sequence) -> None:
        """Free a sequence. Its full blocks stay in the prefix tree.

        If this raises an error, call it again to free the remaining memory.
        """
        self.transfer.storage.close(sequence.blocks)
        try:
            self._publish(sequence)
        finally:
            self.pool.release(sequence.blocks)
        self._release_state(sequence)
        del self._open[sequence.id]

    def _release_state(self, sequence: Sequence) -> None:
        if self.snapshots is not None:
            self.snapshots.release(sequence)
        if self.rollbacks is not None:
            self.rollbacks.release(sequence)
        if self.states is not None and sequence.state_slot >= 0:
            self.states.release(sequence.state_slot)
            sequence.state_slot = -1

    def _publish(self, sequence: Sequence) -> None:
        """Add the full blocks of a sequence to the prefix tree. All KV of the sequence must already be in the pool."""
        if self.cache_manager.shares:
            # Blocks are exact only if the KV of the whole sequence is exact.
            provenance_key = EXACT if sequence.position == sequence.exact else self.provenance_key
            self.pool.publish(sequence.blocks, sequence.tokens, provenance_key + sequence.provenance)
            if self.snapshots is not None:
                self.snapshots.publish(sequence)

    @property
    def scoring_bytes(self) -> int:
        return sum(one.state.device_bytes for one in self._open.values())

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        self.transfer.check_integrity()
        for sequence in self._open.values():
            sequence.check_integrity()
        slots = [one.state_slot for one in self._open.values() if one.state_slot >= 0]
        if self.states is not None and self.rollbacks is not None:
            self.states.check_integrity()
            assert self.states.used == len(slots) == len(set(slots))
            self.rollbacks.check_integrity(self._open.values())
