"""A session turn as an engine request: load the history and save new KV layer by layer, overlapped with the prefill."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Seq

import torch

from ..core import BLOCK_SIZE, Prompt
from ..engine.logits_processors import check_answerable
from ..engine.request import SampledRequest, StartAgainError
from ..engine.runner import Runner
from ..errors import InputError
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder, Trace
from ..models.loading import LoadedModel
from ..outputs import FinishReason, TokenOutput
from ..sampling_params import SamplingParams
from ..storage.loader import DamagedBlockError
from ..storage.saver import Saving
from .chat_template import TurnTokens
from .host_tier import HostTier
from .session_kv import SessionKV
from .truncate import close_gap, truncate_for


def said(prompt: str | Seq[int]) -> str:
    """Return the text of a prompt, or an empty string for token ids."""
    return prompt if isinstance(prompt, str) else ""


def check_turn(params: SamplingParams, model: LoadedModel) -> None:
    """Raise InputError if a parameter is not supported in sessions."""
    if params.n > 1 or params.num_beams > 1:
        raise InputError("a session has one answer to a turn: n and num_beams must be 1")
    if params.prompt_logprobs is not None:
        raise InputError("a session's earlier turns are not computed again: leave prompt_logprobs or the session out")
    check_answerable(params, model)


class Turn(SampledRequest):
    """One turn of a session, as an engine request.

    The session's KV is the prefix of the request. When the turn ends, its tokens are added to the history and its KV
    stays with the session. If the turn is dropped (preemption or a damaged block), the session is restored to its state
    before the turn, and the turn restarts from host memory and disk. If the conversation would exceed the model's
    positions, the oldest tokens are truncated when the turn starts.

    An interrupted prefill leaves the session unchanged. An interrupted answer is kept up to its last token.
    """

    def __init__(
        self,
        kv: SessionKV,
        host: HostTier,
        number: int,
        text: str,
        tokens: TurnTokens,
        params: SamplingParams,
        recorder: Recorder | None = None,
    ) -> None:
        """Create a turn.

        Args:
            kv: KV cache of the session.
            host: Host tier of the session's store.
            number: Request id.
            text: Text of the user message, recorded in the history.
            tokens: Tokens to add to the session and to drop from its end.
            params: Sampling parameters.
            recorder: Trace recorder of the request, if any.
        """
        model = kv.runner.model
        self._before, self._tokens = list(kv.history.tokens), tokens
        prompt = Prompt(number, (*self._kept, *tokens.added))
        super().__init__(prompt, params, model.tokenizer, model.eos_token_ids, recorder=recorder)
        self.kv, self._host = kv, host
        self._text = text
        self._computed = kv.history.computed
        self._prefill: Prefill | None = None
        self._saving: Saving | None = None
        self._seconds = 0.0
        self._known = 0, 0

    @property
    def _kept(self) -> list[int]:
        return self._before[: len(self._before) - self._tokens.dropped]

    def start(self, runner: Runner) -> Prefill:
        """Start loading the session's KV and begin the prefill.

        Raises:
            PoolFullError: The sequence does not fit in the pool.
            ModelError: The conversation exceeds the model's positions, or the model's weights were changed.
        """
        kv = self.kv
        runner.model.check_weights_unchanged()
        self._host.take(kv)
        arrived = kv.sequence is not None and (kv.loader is None or kv.loader.finished)
        try:
            self._fit(runner)
            if kv.history.computed > len(self._kept):
                kv.drop()
                kv.history.forget_from(len(self._kept))
            # A restarted turn already has new tokens. Prefill them only if this gives the same KV as decoding.
            # Otherwise decode them again.
            taken = self.prompt.token_ids if runner.approximates else tuple(self.tokens)
            kv.history.tokens = list(taken)
            self.sequence = sequence = self._ready(runner, len(self.tokens) + 1)
        except BaseException:
            self._set_back()
            raise
        sequence.tokens = self.tokens
        self._known = sequence.position, 0 if arrived else min(sequence.position, kv.loaded_tokens)
        self._count_on(sequence)
        sequence.trace.diverged_at = sequence.position
        self._seconds = sequence.trace.prefill_seconds
        self._saving = kv.context.saver.begin(
            sequence.blocks, kv.fresh(kv.stored(len(taken) // BLOCK_SIZE * BLOCK_SIZE))
        )
        # The prefill allocates slots in sliding layers, which may require evicting idle sessions.
        self._prefill = self._host.retry_after_reclaim(
            lambda: runner.begin_prefill(
                sequence, len(taken), want_logits=True, before_layer=self._wait, after_layer=self._layer_done
            )
        )
        return self._prefill

    def _fit(self, runner: Runner) -> None:
        """Truncate the conversation if needed, so that it fits the model's positions including this turn."""
        kv, history = self.kv, self.kv.history
        before = history.truncation_id
        self._truncate()
        runner.check_fits(self.expected_tokens)
        close_gap(kv, self._host, self.expected_tokens)
        if history.truncation_id != before:
            # Truncation changes the block names. Store the blocks again so that a restarted turn finds them.
            kv.enqueue(kv.all_names())

    def _truncate(self) -> None:
        """Remove the oldest tokens, with a warning, if this turn would exceed the model's positions."""
        history = self.kv.history
        new = len(self._tokens.added) + self.params.max_tokens - self._tokens.dropped
        try:
            gone = truncate_for(self.kv, self._host, new)
        finally:
            self._before = list(history.tokens)
        if not gone:
            return
        self._computed = history.computed
        self.prompt = Prompt(self.prompt.id, (*self._kept, *self._tokens.added))
        most = self.kv.runner.adapter.geometry.max_positions
        warnings.warn(
            f"session {history.name!r} would outgrow the {most:,} positions of {history.model}: its oldest {gone:,} "
            "tokens but the first were forgotten (overflow='error' refuses instead)",
            stacklevel=2,
        )

    def _ready(self, runner: Runner, capacity: int) -> Sequence:
        kv = self.kv
        while True:
            sequence = self._host.retry_after_reclaim(lambda: kv.ready(capacity))
            try:
                if kv.context.private:
                    kv.load_all()
                    # Always relearn from the rounded KV of the pool, so that a restart gives the same state.
                    runner.relearn(sequence)
            except DamagedBlockError:
                kv.drop()
            else:
                sequence.trace.prompt_tokens = len(self.prompt.token_ids)
                return sequence

    def _wait(self, layer: int) -> None:
        try:
            self.kv.wait(layer)
        except DamagedBlockError as damage:
            raise StartAgainError from damage

    def _layer_done(self, layer: int) -> None:
        """Pass a computed layer to the saver. After the last layer, end loading and record statistics."""
        kv, host, context = self.kv, self._host, self.kv.context
        if self._saving is not None:
            context.saver.layer_done(self._saving, layer)
        if layer < kv.runner.adapter.geometry.layers - 1:
            return
        assert self.sequence is not None and self._prefill is not None
        kv.mark_enqueued(entry.block for entry in (self._saving.entries if self._saving is not None else ()))
        kv.recheck()
        host.stats.count(self._computed, *self._known)
        seconds = self.sequence.trace.prefill_seconds - self._seconds
        if kv.loader is not None:
            stalled = kv.end_loading()
            kv.runner.reload(self.sequence)
            host.stats.stall_seconds += stalled
            seconds -= stalled
        context.compute_rate = seconds / self._prefill.tokens
        self._saving = self._prefill = None

    def reserve(self, runner: Runner) -> None:
        """Allocate the slot of the next token, and evict parked sessions if needed.

        Raises:
            PoolFullError: No parked session is left to evict.
        """
        sequence = self.sequence
        assert sequence is not None
        self._host.retry_after_reclaim(lambda: runner.reserve(sequence))
        self.kv.recheck()

    def accept(self, runner: Runner, logits: torch.Tensor) -> list[TokenOutput]:
        """Sample the next token, and enqueue a block that decoding has filled for writing."""
        assert self.sequence is not None
        position, prompt = self.sequence.position, len(self.prompt.token_ids)
        if position % BLOCK_SIZE == 0 and position > prompt:
            self.kv.enqueue_decoded(self.sequence.tokens, prompt, position)
        return super().accept(runner, logits)

    def drop(self, runner: Runner) -> None:
        """Release the turn's memory and restore the session.

        The session's KV is released too, unless the prefill has not changed it and no block is damaged.
        """
        if self.sequence is None:
            return
        self._trace = self.sequence.trace
        damaged = self.kv.loader is not None and self.kv.loader.damaged
        self._count_arrived(self._trace)
        untouched = self._prefill is not None and self._prefill.untouched and not damaged
        self._give_up_prefill()
        if not untouched:
            self.kv.history.tokens = list(self._before)
            self.kv.drop()
        self._set_back()
        self.sequence = None

    def _count_arrived(self, trace: Trace) -> None:
        if self.kv.loader is not None:
            trace.reused_tokens -= self._known[0]

    def _set_back(self) -> None:
        """Restore the session to its state before the turn, and park it."""
        kv = self.kv
        self._forget(self._before)
        if kv.sequence is not None:
            kv.runner.pool.truncate(kv.sequence.blocks, kv.sequence.blocks.length)
        self._host.park(kv)

    def _forget(self, tokens: list[int]) -> None:
        """Reset the session to `tokens`, and drop its sequence if that extends beyond them."""
        kv = self.kv
        kv.history.tokens = list(tokens)
        if kv.sequence is None:
            return
        if kv.sequence.position > len(tokens):
            kv.drop()
        else:
            kv.sequence.tokens = list(tokens)

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """Add the turn to the history and enqueue its blocks for writing. `persist` writes the history."""
        self.finish_reason = self.finish_reason or reason
        kv, history = self.kv, self.kv.history
        sequence = self.sequence
        if sequence is not None:
            self._count_arrived(sequence.trace)
            self._final = self.stats(runner)
        self.sequence = None
        taken_in = sequence is not None and self._prefill is None
        if taken_in:
            assert sequence is not None
            history.tokens, history.computed = list(sequence.tokens), sequence.position
            history.decoded = history.decoded_with(len(self.prompt.token_ids), sequence.position)
            if sequence.interrupted:
                kv.relearn()
        else:
            self._undo()
        kv.last_stats = self._final
        try:
            if taken_in or self.new_tokens:
                history.turns += [("user", self._text), ("assistant", self.text)]
                kv.hand_over()
        finally:
            self._host.park(kv)

    def persist(self) -> None:
        """Write the history. Raise StoreError if it cannot be written; the session stays usable."""
        self.kv.write_history()

    def _undo(self) -> None:
        """Restore the session after an incomplete prefill, but keep tokens generated before a preemption."""
        kv = self.kv
        interrupted = self._prefill is not None
        self._give_up_prefill()
        kept = self.tokens if self.new_tokens else self._before
        if kv.loader is not None and interrupted:
            kv.history.tokens = list(kept)
            kv.drop()
            return
        self._forget(kept)
        if kv.sequence is not None and interrupted:
            kv.relearn()

    def _give_up_prefill(self) -> None:
        if self._saving is not None:
            self.kv.context.saver.abort(self._saving)
        self._saving = self._prefill = None
