"""What can be done with one model, one policy and one pool: prefill, decode, fork, free. No queue, no sampling."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import torch

from ..config import EngineConfig
from ..core import CHUNK, BlockTable
from ..kernels.team import engine_threads
from ..kv_cache.disk.disk_use import DiskUse
from ..kv_cache.pool import HostPool
from ..model_runner.batch import DecodeBatch
from ..model_runner.batched import StrategyCache
from ..model_runner.cuda_graphs import steps_for
from ..model_runner.prefill import Prefill
from ..model_runner.rebalance import rebalance
from ..model_runner.sequence import Sequence, key_reader
from ..model_runner.shared_prefix import NEVER_PAYS, PAYS_FROM_BYTES, SharedPrefixes
from ..model_runner.shared_rows import learn_from_others
from ..model_runner.trace import Trace
from ..models.registry import LoadedModel
from ..outputs import Stats
from ..planning.device_plan import DevicePlan, prefill_slices
from ..policies.base import Policy
from ..transfer.link import Link
from ..transfer.weights.host_weights import NOTHING_USED, HostWeights, WeightUse
from ..utils.allocator import give_back
from .checks import check_drafts, check_evictable, check_positions, check_token_ids
from .own_device import on_own_device
from .pool_order import PoolOrder
from .reclaim import retry_after_reclaim
from .room import EXACT, SHARED_BEHIND, Room
from .segments import segment_tokens
from .stats import Accounting
from .thread_choice import ThreadChoice

T = TypeVar("T")

MISSED_MASS_EVERY = 16
"""Steps between two measurements of the missed mass on a CPU, where all keys are at hand in memory."""


class Runner:
    """Owns the pool and the link of one model and runs sequences on them. Every sequence it makes must go through
    `free`; between calls each one's block table, resident rows and policy state agree."""

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        pool: HostPool,
        link: Link,
        config: EngineConfig,
        plan: DevicePlan | None = None,
        weights: HostWeights | None = None,
        draft: Runner | None = None,
        order: PoolOrder | None = None,
    ) -> None:
        """plan: what the device may hold, where there is a limit. weights: what brings those that are not on it.
        draft: runs the model that drafts for this one. order: of another runner of the pool."""
        self.model, self.policy, self.pool, self.link, self.config = model, policy, pool, link, config
        self.plan, self.weights, self.draft = plan, weights, draft
        self.order = order or PoolOrder()
        self.adapter = model.adapter
        best = prefill_slices(config, self.adapter.device)[0]
        self._slice_tokens = best if plan is None else plan.costs.slice
        usual = MISSED_MASS_EVERY if self.adapter.device.type == "cpu" and pool.file is None else 0
        self._missed_mass_every = usual if config.missed_mass_every is None else config.missed_mass_every
        self.room = Room(pool, policy, config)
        self._threads = ThreadChoice()
        self._ids = itertools.count()
        self._open: dict[int, Sequence] = {}
        self.strategies = StrategyCache()
        self.steps = steps_for(config, self.adapter.device, self.strategies, streams=weights is not None)
        self.reclaimables = self.order.reclaimables
        drafts = None if draft is None else (draft.model.weight_bytes, draft.pool)
        self._accounting = Accounting(model, policy, pool, link, config, weights, drafts)
        geometry = self.adapter.geometry
        # Where the pool rounds, a sequence's window is exact and what others share of it is not; and from a disk rows
        # come block by block: no segments.
        pays_from = PAYS_FROM_BYTES if pool.format.exact and pool.file is None else NEVER_PAYS
        self.prefixes = SharedPrefixes(geometry.kv_bytes(1, self.adapter.dtype) // geometry.layers, pays_from)
        if config.eviction is not None:
            check_evictable(policy)
        if config.exact is not None:
            check_drafts(policy, config)

    @property
    def approximates(self) -> bool:
        """Whether decoded tokens, under the policy and the pool's format, have other rows than a prefill gives them."""
        return self.lineage != EXACT or not self.pool.format.exact

    @property
    def lineage(self) -> str:
        """Of the rows of decoded tokens: the policy's, but those that full attention verifies are its own."""
        return self.policy.lineage if self.config.exact is None else EXACT

    def new_sequence(self, tokens: Seq[int], capacity: int, *, reuse: int = 0, provenance: str = "") -> Sequence:
        """A sequence with room for `capacity` tokens. Nothing of it is computed, but for the full chunks of its first
        `reuse` tokens (never the last of these) that the prefix tree has from an exact prefill under the same
        `provenance`.

        Raises InputError for token ids the model does not have, PoolFullError where the pool has no room. Whether the
        whole sequence can ever fit is `check_fits`' to say.
        """
        check_token_ids(tokens, self.model)
        provenance = self.model.weights_provenance() + provenance
        diverged_at = self.room.diverges(tokens[:reuse], provenance)
        blocks = self.room.block_table(tokens[:reuse], capacity, len(tokens), provenance)
        sequence = self._open_sequence(blocks, tokens, known=blocks.length, exact=blocks.length, provenance=provenance)
        sequence.trace.diverged_at = diverged_at
        return sequence

    def check_fits(self, tokens: int) -> None:
        """Raises ModelError where a sequence of `tokens` tokens is longer than the model's positions, PoolFullError
        where it would not fit an empty pool and nothing may be evicted."""
        check_positions(tokens, self.model)
        if self.plan is not None:
            self.plan.check([tokens])
        if not self.room.evicts:
            self.pool.check_fits(tokens)

    def retry_after_reclaim(self, action: Callable[[], T]) -> T:
        """Returns what `action` returns; where it finds no room, memory of `reclaimables` is reclaimed until it does.
        Raises PoolFullError (`engine.reclaim.retry_after_reclaim`)."""
        return retry_after_reclaim(action, self.reclaimables)

    def reserve(self, sequence: Sequence, tokens: int = 1) -> None:
        """Reserves the slots of the next tokens. Raises PoolFullError; with eviction, which overwrites where the pool
        is full, only where the device has no room, or where a fork still holds what a window has left."""
        if not self.room.evicts:
            self.pool.reserve(sequence.blocks, sequence.position + tokens)
        self.room.slide(sequence, self.link.storage, sequence.position + tokens)
        self._check_device()

    def _check_device(self) -> None:
        """Raises DeviceFullError where the open sequences could take more of the device than it may hold."""
        if self.plan is not None:
            self.plan.check([sequence.blocks.capacity for sequence in self._open.values()])

    @on_own_device
    def expect(self, sequence: Sequence, tokens: int, *, forks: int = 0) -> None:
        """Says that a sequence may grow to `tokens` tokens, and so may `forks` others that will fork from it. The pool
        makes memory ready for that now, as far as it has any, so that no decode step waits for memory to be pinned;
        nothing is reserved."""
        sequence.expected, sequence.forks = tokens, forks
        self._prepare()

    def _prepare(self) -> None:
        self.pool.prepare(CHUNK * sum(sequence.chunks_ahead for sequence in self._open.values()))

    def fork(self, sequence: Sequence, capacity: int, *, same_trace: bool = False) -> Sequence:
        """A sequence with the same computed tokens, sharing their chunks, with room for `capacity` tokens: only the
        filled slots of a partly filled last chunk are copied. What it cost so far is counted as reused, or with
        `same_trace` goes on with the original's counts. Raises PoolFullError."""
        self.link.storage.settle(sequence.blocks)
        shared, position = self.pool.fork(sequence.blocks), sequence.position
        blocks = self.room.reserved(shared, capacity, position, min(capacity, position + 1))
        sequence.forks = max(0, sequence.forks - 1)
        return self._open_sequence(
            blocks,
            sequence.tokens,
            known=sequence.position,
            exact=sequence.exact,
            shift=sequence.shift,
            provenance=sequence.provenance,
            origin=sequence,
            same_trace=same_trace,
        )

    def match(self, tokens: Seq[int], provenance: str = "", floor: int = 0) -> BlockTable:
        """What the prefix tree has of a session's tokens, computed exactly or under this policy; never all of them.
        floor: the first token that sliding layers may see."""
        if not self.room.shares:
            return BlockTable(floor=floor)
        return self.pool.match(tokens, EXACT + provenance, self.lineage + provenance, floor=floor)

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
    ) -> Sequence:
        """A sequence whose first `known` tokens were computed before: rows of `blocks.length` of them are in the block
        table, the others will be when the next prefill comes to their layer. It takes the block table, with room for
        `capacity` tokens; PoolFullError gives the block table back."""
        self.room.reserved(blocks, capacity, known, max(known, min(capacity, len(tokens))))
        with self.room.released_on_error(blocks):
            self.pool.commit(blocks, known)
        return self._open_sequence(blocks, tokens, known=known, exact=exact, shift=shift, provenance=provenance)

    @on_own_device
    def reload(self, sequence: Sequence) -> None:
        """Takes the resident rows from the pool again, after rows came into it from elsewhere."""
        self.link.storage.close(sequence.blocks)
        self.link.storage.open(sequence.blocks, self.policy.sinks, self.policy.recent)

    def relearn(self, sequence: Sequence) -> None:
        """Forgets what only this process knows of a sequence: resident rows and the policy's state come from the
        pool's rows again, the latter with the next prefill."""
        self.reload(sequence)
        sequence.state, sequence.learned = self.policy.new_state(sequence.keys), 0
        sequence.unlearned = sequence.position
        sequence.interrupted = False

    @on_own_device
    @torch.inference_mode()
    def _open_sequence(
        self,
        blocks: BlockTable,
        tokens: Seq[int],
        *,
        known: int,
        exact: int,
        shift: int = 0,
        provenance: str = "",
        origin: Sequence | None = None,
        same_trace: bool = False,
    ) -> Sequence:
        """Return the sequence that owns `blocks`, in which `known` tokens are computed; a fork of `origin` if given.
        The block table is released on an error."""
        with self.room.released_on_error(blocks):
            keys = key_reader(self.pool, self.link.storage, blocks)
            sequence = Sequence(
                id=next(self._ids),
                tokens=list(tokens),
                blocks=blocks,
                slots=self.room.slots() if origin is None else origin.slots.fork(),
                keys=keys,
                state=self.policy.new_state(keys) if origin is None else origin.state.fork(keys),
                trace=self._new_trace(known, origin, same_trace),
                position=known,
                exact=exact,
                unlearned=known if origin is None else origin.unlearned,
                learned=0 if origin is None else origin.learned,
                shift=shift,
                provenance=provenance,
                expected=0 if origin is None else origin.expected,
            )
            self._open[sequence.id] = sequence
            try:
                self._check_device()
                self._prepare()
                shared = None if origin is None else origin.blocks
                self.link.storage.open(blocks, self.policy.sinks, self.policy.recent, shared)
            except BaseException:
                del self._open[sequence.id]
                self.link.storage.close(blocks)
                raise
        return sequence

    def _new_trace(self, known: int, origin: Sequence | None, same_trace: bool) -> Trace:
        if origin is None:
            used = None if self.pool.file is None else self.pool.file.use.since(DiskUse())
            return Trace(self.adapter.geometry.layers, self._missed_mass_every, reused_tokens=known, disk_before=used)
        return origin.trace.copy() if same_trace else origin.trace.restart(reused=known)

    @on_own_device
    def free(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds; its full blocks stay in the prefix tree, idle. If this raises, a
        second call frees the rest."""
        if sequence.drafter is not None:
            assert self.draft is not None
            self.draft.free(sequence.drafter)
            sequence.drafter = None
        self.strategies.release()
        self.link.storage.close(sequence.blocks)
        try:
            self._publish(sequence)
        finally:
            self.pool.release(sequence.blocks)
        del self._open[sequence.id]

    def _publish(self, sequence: Sequence) -> None:
        """Enters full chunks in the prefix tree: exact ones once they are prefilled, what was decoded after them, under
        the policy's lineage, when the sequence ends. Everything appended must be in the pool."""
        if self.room.shares:
            lineage = EXACT if sequence.position == sequence.exact else self.lineage
            self.pool.publish(sequence.blocks, sequence.tokens, lineage + sequence.provenance)

    @on_own_device
    @torch.inference_mode()
    def begin_prefill(
        self,
        sequence: Sequence,
        stop: int,
        *,
        want_logits: bool,
        before_layer: Callable[[int], None] = lambda layer: None,
        after_layer: Callable[[int], None] = lambda layer: None,
        every_logits: Callable[[int, torch.Tensor], None] | None = None,
    ) -> Prefill:
        """The exact prefill of tokens [position, stop), to be advanced with `advance_prefill`; `before_layer(layer)`
        returns when the rows of a layer that were computed before are in the pool, `after_layer(layer)` is called when
        a layer is done, `every_logits` at the end with the logits of all tokens (`Prefill`)."""
        sequence.trace.prompt_tokens = sequence.trace.prompt_tokens or stop
        if sequence.unlearned and self.room.shares and not self.room.evicts:
            learn_from_others(sequence, self._open.values())
        self.room.slide(sequence, self.link.storage, stop, behind=SHARED_BEHIND if self.room.shares else 0)
        return Prefill(
            sequence,
            stop,
            self.adapter,
            self.link.storage,
            slice_tokens=self._slice_tokens,
            logits_of=int(want_logits),
            segment_tokens=segment_tokens(self.pool, self.policy, self.adapter, self._slice_tokens),
            before_layer=before_layer,
            after_layer=after_layer,
            every_logits=every_logits,
        )

    @on_own_device
    @torch.inference_mode()
    def advance_prefill(self, prefill: Prefill) -> None:
        """Runs one layer; commits the tokens after the last."""
        began, used = time.perf_counter(), self.weight_use
        with engine_threads(self.adapter.device):
            prefill.run_layer()
        sequence = prefill.sequence
        sequence.trace.prefill_weights += self.weight_use.since(used)
        if prefill.done:
            self.pool.commit(sequence.blocks, prefill.stop)
            sequence.exact = prefill.stop if sequence.exact == sequence.position else sequence.exact
            sequence.position, sequence.unlearned, sequence.learned = prefill.stop, 0, 0
            self.link.storage.settle(sequence.blocks)
            self._publish(sequence)
            self.room.slide(sequence, self.link.storage, prefill.stop)
            if self.pool.file is not None:  # where memory is what there is least of
                give_back()
        sequence.trace.prefill_seconds += time.perf_counter() - began
        if prefill.layer:
            prefill.after_layer(prefill.layer - 1)

    def prefill(
        self,
        sequence: Sequence,
        stop: int,
        *,
        want_logits: bool = False,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> torch.Tensor | None:
        """All of it in one call, `on_layer(layers done)` after each layer. Returns logits `[V]` if wanted."""
        prefill = self.begin_prefill(sequence, stop, want_logits=want_logits)
        while not prefill.done:
            self.advance_prefill(prefill)
            on_layer(prefill.layer)
        return None if prefill.logits is None else prefill.logits[0]

    @on_own_device
    @torch.inference_mode()
    def decode(self, batch: Seq[Sequence]) -> torch.Tensor:
        """One step of each sequence: computes and commits token `tokens[position]`. float32 logits `[B, V]`."""
        began, used = time.perf_counter(), self.weight_use
        rebalance(batch, self.pool, self.link.storage, self.policy)
        for sequence in batch:
            self.room.slide(sequence, self.link.storage, sequence.position + 1)
            sequence.slots.begin_step(sequence.blocks, sequence.position)
            sequence.interrupted = True
        sharing = self.prefixes.of([sequence.blocks for sequence in batch])
        ordered = [batch[i] for i in sharing.order]
        decoding = DecodeBatch(ordered, self.adapter, self.policy, self.link, sharing)
        with self._threads.step(self.adapter.device, len(batch)):
            logits = sharing.restore(self.steps.run(decoding))
        seconds = time.perf_counter() - began
        for sequence in batch:
            sequence.position += 1
            sequence.interrupted = False
            sequence.trace.decode_seconds += seconds
            self.pool.commit(sequence.blocks, sequence.slots.context)
        batch[0].trace.step_weights += self.weight_use.since(used)
        return logits

    @property
    def weight_use(self) -> WeightUse:
        """What has crossed the link of weights so far."""
        return NOTHING_USED if self.weights is None else self.weights.use

    def stats(self, sequence: Sequence) -> Stats:
        """What the sequence cost so far; to be taken before `free`."""
        scoring = sum(one.state.device_bytes for one in self._open.values())
        return self._accounting.stats(sequence, self._accounting.peak_device_bytes(scoring))

    def check_integrity(self) -> None:
        """Asserts that pool, sequences and states agree."""
        self.pool.check_integrity()
        self.link.check_integrity()
        if self.weights is not None:
            self.weights.check_integrity()
        for sequence in self._open.values():
            sequence.check_integrity()
        if self.draft is not None:
            self.draft.check_integrity()
