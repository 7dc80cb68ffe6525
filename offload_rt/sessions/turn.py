"""A session turn as an engine request: load the history and save new KV layer by layer, overlapped with the prefill."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from ..core import Prompt
from ..engine.logits_processors import check_answerable
from ..engine.runner import Runner
from ..errors import InputError
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder
from ..models.loading import LoadedModel
from ..outputs import FinishReason
from ..sampling_params import SamplingParams
from ..storage.loader import DamagedBlockError
from .chat_template import TurnTokens
from .host_tier import HostTier
from .session_kv import SessionKV
from .stored_request import StoredRequest
from .truncate import close_gap, truncate_for

T = TypeVar("T")


def said(prompt: str | Seq[int]) -> str:
    """Return the text of a prompt, or an empty string for token ids."""
    return prompt if isinstance(prompt, str) else ""


def check_turn(params: SamplingParams, model: LoadedModel) -> None:
    """Raise InputError if a parameter is not supported in sessions."""
    if params.n > 1 or params.num_beams > 1:
        raise InputError("a session has one response per turn: n and num_beams must be 1")
    if params.prompt_logprobs is not None:
        raise InputError("prompt_logprobs would need a session's earlier turns again: use it without a session")
    check_answerable(params, model)


class Turn(StoredRequest):
    """One turn of a session, as an engine request.

    The session's KV is the prefix of the request. When the turn ends, its tokens are added to the history and its KV
    stays with the session. If the turn is dropped (preemption or a damaged block), the session is restored to its state
    before the turn, and the turn restarts from host memory and disk. If the conversation would exceed the model's
    positions, the oldest tokens are truncated when the turn starts.

    An interrupted prefill leaves the session unchanged. An interrupted response is kept up to its last token.
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
        self._before, self._tokens = list(kv.history.tokens), tokens
        super().__init__(kv, host, Prompt(number, (*self._kept, *tokens.added)), params, recorder)
        self._text = text
        self._computed = kv.history.computed

    @property
    def _computed_before(self) -> int:
        return self._computed

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
        return self._begin_prefill(runner, len(taken), in_memory=arrived, diverged_at=sequence.position)

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
            "tokens, except the first ones, were removed (overflow='error' raises an error instead)",
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

    def _after_reclaim(self, action: Callable[[], T]) -> T:
        return self._host.retry_after_reclaim(action)

    def _save_decoded(self, stop: int) -> None:
        assert self.sequence is not None
        self.kv.enqueue_decoded(self.sequence.tokens, len(self.prompt.token_ids), stop)

    def drop(self, runner: Runner) -> None:
        """Release the turn's memory and restore the session.

        The session's KV stays in memory only if the prefill has not changed it and no block is damaged.
        """
        if self.sequence is None:
            return
        self._trace = self.sequence.trace
        damaged = self.kv.loader is not None and self.kv.loader.damaged
        self._count_arrived(self._trace)
        untouched = self._untouched and not damaged
        self._give_up_prefill()
        if not untouched:
            self.kv.history.tokens = list(self._before)
            self.kv.drop()
        self._set_back()
        self.sequence = None

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
        interrupted, progressed = self._prefilling, sequence is not None and sequence.position > self._start
        taken_in = sequence is not None and not interrupted
        self.sequence = None
        if taken_in:
            assert sequence is not None
            history.tokens, history.computed = list(sequence.tokens), sequence.position
            history.decoded = history.decoded_with(len(self.prompt.token_ids), sequence.position)
            if sequence.interrupted:
                kv.relearn()
        else:
            self._undo(interrupted, progressed)
        kv.last_stats = self._final
        try:
            if taken_in or self.new_tokens:
                # A turn drops at most the token that ended the response before, unless it rewrites the conversation.
                history.add_turn(len(self._kept), self._text, self.text, rewritten=self._tokens.dropped > 1)
                kv.hand_over()
        finally:
            self._host.park(kv)

    def persist(self) -> None:
        """Write the history. Raise StoreError if it cannot be written; the session stays usable."""
        self.kv.write_history()

    def _undo(self, interrupted: bool, progressed: bool) -> None:
        """Restore the session after an incomplete prefill, but keep tokens generated before a preemption.

        Args:
            interrupted: The prefill had begun.
            progressed: Some of its segments were complete. The prefix tree and the store keep them.
        """
        kv = self.kv
        self._give_up_prefill()
        kept = self.tokens if self.new_tokens else self._before
        if interrupted and (kv.loader is not None or progressed):
            kv.history.tokens = list(kept)
            kv.drop()
            return
        self._forget(kept)
        if kv.sequence is not None and interrupted:
            kv.relearn()


class WholeTurn(Turn):
    """A turn that counts only if it is complete: if it is cancelled, the session stays as before the turn.

    The KV is written to disk before the history that refers to it. If the process is killed, the disk holds the session
    with all its KV as before or as after this turn. Later turns therefore compute the same values as without the kill.
    """

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        if self.finish_reason is not None:
            super().finish(runner, reason)
            return
        self.finish_reason = reason
        self._final = self.stats(runner)
        self.kv.last_stats = self._final
        self.drop(runner)

    def persist(self) -> None:
        self.kv.context.saver.flush()
        super().persist()
