"""Run prefill and decode steps for one model with one policy.

The runner only computes logits. The engine (`engine.py`) queues requests and samples tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import torch

from ..config import EngineConfig
from ..errors import EngineError, PoolFullError
from ..kernels.team import engine_threads
from ..kv_cache.pool import HostPool
from ..model_runner.batch import MIN_SAVED_BYTES, NEVER_SHARE, DecodeBatch, SharedPrefixes
from ..model_runner.batched import EagerSteps
from ..model_runner.cuda_graphs import steps_for
from ..model_runner.prefill import Prefill, segment_tokens
from ..model_runner.sequence import Sequence
from ..models.loading import LoadedModel
from ..planning.device_plan import DevicePlan, prefill_slices
from ..policies.base import Policy
from ..transfer.base import Transfer
from ..transfer.streams import device_guard, on_device
from ..transfer.weights.host_weights import NOTHING_USED, HostWeights, WeightUse
from ..utils.allocator import give_back
from .cache_manager import KEPT_BEFORE_WINDOW
from .pool_order import PoolOrder
from .sequence_manager import SequenceManager
from .thread_choice import ThreadChoice


class Runner(SequenceManager):
    """Runs prefill and decode steps for sequences. Owns the weights and the CUDA graphs.

    Args:
        plan: Limits on device memory, if any.
        weights: Weights in host memory that are streamed to the device, if any.
        draft: Runner for the draft model, if there is one.
        order: Order of requests, shared by all runners that use `pool`. If None, a new one is created.
    """

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        pool: HostPool,
        transfer: Transfer,
        config: EngineConfig,
        plan: DevicePlan | None = None,
        weights: HostWeights | None = None,
        draft: Runner | None = None,
        order: PoolOrder | None = None,
    ) -> None:
        super().__init__(model, policy, pool, transfer, config, plan)
        self.weights, self.draft = weights, draft
        self.order = order or PoolOrder()
        self.reclaimables = self.order.reclaimables
        best = prefill_slices(config, self.adapter.device)[0]
        self.slice_tokens = best if plan is None else plan.costs.slice_tokens
        self.thread_choice = ThreadChoice()
        self.eager = EagerSteps()
        self.steps = steps_for(
            config, self.adapter.device, self.eager, lambda: model.found_weight_changes, streams=weights is not None
        )
        # Shared prefixes are not attended to jointly if KV is quantised, because each sequence has an unquantised
        # window, or if KV is on disk, because it is read block by block.
        min_saved = MIN_SAVED_BYTES if pool.format.exact and pool.file is None else NEVER_SHARE
        geometry = self.adapter.geometry
        self.prefixes = SharedPrefixes(geometry.full_rows.bytes(self.adapter.dtype), min_saved)

    @device_guard
    def free(self, sequence: Sequence) -> None:
        if sequence.drafter is not None:
            assert self.draft is not None
            self.draft.free(sequence.drafter)
            sequence.drafter = None
        self.eager.release()
        super().free(sequence)

    def begin_prefill(
        self,
        sequence: Sequence,
        stop: int,
        *,
        want_logits: bool,
        before_layer: Callable[[int], None] = lambda layer: None,
        after_layer: Callable[[int], None] = lambda layer: None,
        on_logits: Callable[[int, torch.Tensor], None] | None = None,
        reclaim: Callable[[Callable[[], int]], int] | None = None,
    ) -> Prefill:
        """Return a prefill for the tokens [position, stop) of a sequence. `advance_prefill` runs it layer by layer.

        If memory is short, the prefill ends before `stop` (see `Prefill.stop`), and the caller must begin another
        prefill for the remaining tokens. Raises PoolFullError.

        Args:
            want_logits: Compute the logits of the last token.
            before_layer, after_layer, on_logits: See `Prefill`.
            reclaim: Calls the function that it is given, and reclaims memory if the pool is full. None means
                `retry_after_reclaim`.
        """
        end = self._reserve_window_slots(sequence, stop, reclaim or self.retry_after_reclaim)
        sequence.trace.prompt_tokens = sequence.trace.prompt_tokens or stop
        with on_device(self.adapter.device), torch.inference_mode():
            if sequence.unobserved and self.cache_manager.shares and not self.cache_manager.evicts:
                sequence.share_state(self._open.values())
            return Prefill(
                sequence,
                end,
                self.adapter,
                self.transfer.storage,
                slice_tokens=self.slice_tokens,
                logits_to_keep=int(want_logits and end == stop),
                segment_tokens=segment_tokens(self.pool, self.policy, self.adapter, self.slice_tokens),
                before_layer=before_layer,
                after_layer=after_layer,
                on_logits=on_logits,
                capture=None if self.snapshots is None else self.snapshots.capture(sequence, end),
            )

    def _reserve_window_slots(self, sequence: Sequence, stop: int, reclaim: Callable[[Callable[[], int]], int]) -> int:
        """Reserve slots in sliding layers for the tokens [position, stop), or for fewer tokens if memory is short.

        Return the position up to which tokens have slots. Raises PoolFullError if not even the shortest part fits.
        """
        before_window = KEPT_BEFORE_WINDOW if self.cache_manager.shares else 0
        slide = partial(self.cache_manager.slide, sequence, self.transfer.storage, before_window=before_window)
        start, size = sequence.position, self.slice_tokens
        ends = list(self.pool.groups.prefill_ends(start, stop, sequence.blocks.floor, slice_tokens=size))

        def slide_to_first_fit(ends: Seq[int]) -> int:
            for end in ends[:-1]:
                with contextlib.suppress(PoolFullError):
                    slide(end)
                    return end
            slide(ends[-1])
            return ends[-1]

        # Reclaim memory before dividing a prefill into parts that are shorter than a chunk, which would be slow.
        with contextlib.suppress(PoolFullError):
            return reclaim(lambda: slide_to_first_fit([end for end in ends if end == stop or end - start >= size]))
        return reclaim(lambda: slide_to_first_fit(ends))

    @device_guard
    @torch.inference_mode()
    def advance_prefill(self, prefill: Prefill) -> None:
        """Run the next layer of a prefill.

        After the last layer, commit the tokens and add full blocks to the prefix tree.
        """
        began, used = time.perf_counter(), self.weight_use
        with engine_threads(self.adapter.device):
            prefill.run_layer()
        sequence = prefill.sequence
        sequence.trace.prefill_weights += self.weight_use.since(used)
        if prefill.done:
            self.pool.commit(sequence.blocks, prefill.stop)
            sequence.exact = prefill.stop if sequence.exact == sequence.position else sequence.exact
            sequence.position, sequence.unobserved, sequence.observed = prefill.stop, 0, 0
            sequence.check_state()
            self.transfer.storage.settle(sequence.blocks)
            self._publish(sequence)
            self.cache_manager.slide(sequence, self.transfer.storage, prefill.stop)
            if self.pool.file is not None:  # with `disk`, host memory is scarce
                give_back()
        sequence.trace.prefill_seconds += time.perf_counter() - began
        if prefill.finished_layers:
            prefill.after_layer(prefill.finished_layers - 1)

    def prefill(
        self,
        sequence: Sequence,
        stop: int,
        *,
        want_logits: bool = False,
        on_logits: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Prefill the tokens [position, stop) in one call. For `on_logits`, see `Prefill`.

        If `want_logits` is True, return the logits `[V]` of the last token.
        """
        while True:
            prefill = self.begin_prefill(sequence, stop, want_logits=want_logits, on_logits=on_logits)
            while not prefill.done:
                self.advance_prefill(prefill)
            if prefill.stop == stop:
                return None if prefill.logits is None else prefill.logits[0]

    @device_guard
    @torch.inference_mode()
    def decode(self, batch: Seq[Sequence]) -> torch.Tensor:
        """Compute the token `tokens[position]` of each sequence, and advance `position`.

        Return float32 logits `[B, V]`.
        """
        began, used = time.perf_counter(), self.weight_use
        self.cache_manager.rebalance(batch, self.transfer.storage)
        for sequence in batch:
            self.check_state_known(sequence)
            self.cache_manager.slide(sequence, self.transfer.storage, sequence.position + 1)
            sequence.slots.begin_step(sequence.blocks, sequence.position)
            sequence.interrupted = True
        sharing = self.prefixes.find([sequence.blocks for sequence in batch])
        ordered = [batch[i] for i in sharing.order]
        decoding = DecodeBatch(ordered, self.adapter, self.policy, self.transfer, sharing)
        with self.thread_choice.step(self.adapter.device, len(batch)):
            logits = sharing.restore(self.steps.run(decoding))
        seconds = time.perf_counter() - began
        for sequence in batch:
            sequence.position += 1
            sequence.interrupted = False
            sequence.check_state()
            sequence.trace.decode_seconds += seconds
            self.pool.commit(sequence.blocks, sequence.slots.context)
            if self.snapshots is not None and (sequence.keeps_decoded or not self.approximates):
                self.snapshots.after_step(sequence)
        batch[0].trace.step_weights += self.weight_use.since(used)
        return logits

    def check_state_known(self, sequence: Sequence) -> None:
        if self.states is not None and sequence.interrupted:
            raise EngineError("an interrupted step left recurrent state incomplete: send the request again")

    @property
    def weight_use(self) -> WeightUse:
        return NOTHING_USED if self.weights is None else self.weights.use

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.weights is not None:
            self.weights.check_integrity()
        if self.draft is not None:
            self.draft.check_integrity()
