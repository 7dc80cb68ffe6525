"""Requests whose KV is loaded from a session store and saved there, layer by layer during the prefill."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import torch

from ..core import BLOCK_SIZE, Prompt
from ..engine.request import SampledRequest, StartAgainError
from ..engine.runner import Runner
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder, Trace
from ..outputs import FinishReason, TokenOutput
from ..sampling_params import SamplingParams
from ..storage.loader import DamagedBlockError
from ..storage.saver import SaveHandle
from .host_tier import HostTier
from .session_kv import SessionKV

T = TypeVar("T")


class StoredRequest(SampledRequest):
    """Base class for requests whose KV is loaded from a session store and saved there.

    The prompt is prefilled in segments (see `SessionContext.segment_stop`). If the request ends early, the KV of
    complete segments is kept. Subclasses update the session's history in the abstract methods.
    """

    def __init__(
        self, kv: SessionKV, host: HostTier, prompt: Prompt, params: SamplingParams, recorder: Recorder | None
    ) -> None:
        model = kv.runner.model
        super().__init__(prompt, params, model.tokenizer, model.eos_token_ids, recorder=recorder)
        self.kv, self._host = kv, host
        self._prefill: Prefill | None = None
        self._saving: SaveHandle | None = None
        self._seconds = 0.0
        self._known = 0, 0

    @abstractmethod
    def _after_reclaim(self, action: Callable[[], T]) -> T: ...

    @abstractmethod
    def _prepare(self, runner: Runner) -> None:
        """Check that the request fits, and truncate the session's history if necessary. Called before every start."""

    @abstractmethod
    def _undo_prepare(self) -> None: ...

    @abstractmethod
    def _diverged_at(self, tokens: Seq[int], position: int) -> int | None:
        """Return the index of the first token after `position` from which no cached prefix continues, or None.

        `position` is the number of tokens whose KV is cached.
        """

    def _shared_tokens(self, tokens: Seq[int], diverged_at: int | None) -> int:
        return len(tokens) if diverged_at is None else diverged_at

    @abstractmethod
    def _after_drop(self, *, untouched: bool) -> None:
        """Free the memory of a dropped request. If `untouched`, no layer was computed and the KV is unchanged."""

    @abstractmethod
    def _store_kv(self, runner: Runner) -> None:
        """Queue the KV of an ended request for writing, and mark the session as idle."""

    def start(self, runner: Runner) -> Prefill:
        """Start loading the cached prefix and begin the prefill.

        Raises:
            PoolFullError: The sequence does not fit in the pool.
            InputError, ModelError: The request exceeds the model's positions, or the model's weights were changed.
        """
        assert self.sequence is None
        kv = self.kv
        runner.model.check_weights_unchanged()
        self._host.unpark(kv)
        in_memory = kv.sequence is not None and (kv.loader is None or kv.loader.finished)
        try:
            self._prepare(runner)
            # If prefill gives the same KV as decoding, tokens that were generated before a drop are prefilled.
            # Otherwise, they are decoded again.
            tokens = self.prompt.token_ids if runner.approximates else self.tokens
            kv.history.tokens = list(tokens)
            self.sequence = sequence = self._ready(runner, len(self.tokens) + 1)
        except BaseException:
            self._undo_prepare()
            raise
        sequence.tokens, sequence.trace.prompt_tokens = self.tokens, len(self.prompt.token_ids)
        position = sequence.position
        self._known = position, 0 if in_memory else min(position, kv.loaded_tokens)
        diverged_at = self._diverged_at(tokens, position)
        if runner.snapshots is not None:
            runner.snapshots.note_shared_tokens(sequence, self._shared_tokens(tokens, diverged_at))
        self._continue_statistics(sequence)
        sequence.trace.diverged_at = diverged_at
        self._seconds = sequence.trace.prefill_seconds
        return self._begin_prefill(runner, len(tokens))

    def _ready(self, runner: Runner, capacity: int) -> Sequence:
        kv = self.kv
        while True:
            sequence = self._after_reclaim(lambda: kv.ready(capacity))
            if not kv.context.private:
                return sequence
            try:
                kv.load_all()
            except DamagedBlockError:
                kv.drop()
            else:
                # Rebuild the policy state from the rounded KV of the pool, so that a restart gives the same state.
                runner.reset_policy_state(sequence)
                return sequence

    def drop(self, runner: Runner) -> None:
        """Free the sequence. The request can start again later. Full blocks stay in the prefix tree and the store."""
        if self.sequence is None:
            return
        self._trace = self.sequence.trace
        damaged = self.kv.loader is not None and self.kv.loader.damaged
        self._count_arrived(self._trace)
        untouched = self._untouched and not damaged
        self._give_up_prefill()
        self._after_drop(untouched=untouched)
        self.sequence = None

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """End the request and queue its blocks for writing. The caller must then call `persist`."""
        self.finish_reason = self.finish_reason or reason
        if self.sequence is not None:
            self._count_arrived(self.sequence.trace)
            self._final = self.stats(runner)
        self._store_kv(runner)

    def persist(self) -> None:
        """Write the history, or update the time of last use of a prompt's blocks.

        After a StoreError, the KV stays usable.
        """
        self.kv.persist()

    def _begin_part(self, runner: Runner) -> Prefill:
        kv, sequence = self.kv, self.sequence
        assert sequence is not None
        stop = self._segment_stop(sequence.position)
        self._prefill = prefill = runner.begin_prefill(
            sequence,
            stop,
            want_logits=stop == self._stop,
            before_layer=self._wait,
            after_layer=self._layer_done,
            reclaim=self._after_reclaim,
        )
        fresh = kv.unsaved(kv.blocks.full_names(prefill.stop // BLOCK_SIZE * BLOCK_SIZE))
        self._saving = kv.context.saver.begin(sequence.blocks, fresh, for_prompt=kv.for_prompt)
        return prefill

    def _segment_stop(self, start: int) -> int:
        return self.kv.context.segment_stop(start, self._stop)

    @property
    def _prefilling(self) -> bool:
        return self._prefill is not None or (self.sequence is not None and self.sequence.position < self._stop)

    @property
    def _untouched(self) -> bool:
        begun = self.sequence is not None and self.sequence.position > self._start
        return self._prefill is not None and self._prefill.untouched and not begun

    def _wait(self, layer: int) -> None:
        try:
            self.kv.wait(layer)
        except DamagedBlockError as damage:
            raise StartAgainError from damage

    def _layer_done(self, layer: int) -> None:
        """Queue the KV of a computed layer for writing. After the last layer of a segment, close the loader."""
        kv, context = self.kv, self.kv.context
        if self._saving is not None:
            context.saver.layer_done(self._saving, layer)
        if layer < kv.runner.adapter.geometry.layers - 1:
            return
        assert self.sequence is not None and self._prefill is not None
        kv.mark_enqueued(pending.block for pending in (self._saving.pending if self._saving is not None else ()))
        kv.cancel_replaced()
        if kv.loader is not None:
            stalled = kv.end_loading()
            kv.runner.reload(self.sequence)
            self._host.stats.stall_seconds += stalled
            self._seconds += stalled
        self._measure(self._prefill)
        self._saving = self._prefill = None
        position = self.sequence.position
        if position == self._stop:
            self._host.stats.count(self._computed_before, *self._known)

    def _measure(self, prefill: Prefill) -> None:
        position = prefill.sequence.position
        done = position - self._start
        if position < prefill.stop:
            done += (prefill.stop - position) * prefill.finished_layers // prefill.layers
        if done > 0:
            self.kv.context.compute_rate = (prefill.sequence.trace.prefill_seconds - self._seconds) / done

    @property
    def _computed_before(self) -> int:
        return 0

    def reserve(self, runner: Runner) -> None:
        """Reserve a slot for the next token, evicting idle KV if necessary. Raises PoolFullError."""
        sequence = self.sequence
        assert sequence is not None
        self._after_reclaim(lambda: runner.reserve(sequence))
        self.kv.cancel_replaced()

    def accept(self, runner: Runner, logits: torch.Tensor, best: Seq[int]) -> list[TokenOutput]:
        assert self.sequence is not None
        position, prompt = self.sequence.position, len(self.prompt.token_ids)
        if position % BLOCK_SIZE == 0 and position > prompt:
            self.kv.enqueue_decoded(self.sequence.tokens, prompt, position)
        return super().accept(runner, logits, best)

    def _count_arrived(self, trace: Trace) -> None:
        if self.kv.loader is not None:
            trace.reused_tokens -= self._known[0]

    def _give_up_prefill(self) -> None:
        if self._prefill is not None:
            self._measure(self._prefill)
        if self._saving is not None:
            self.kv.context.saver.abort(self._saving)
        self._saving = self._prefill = None
