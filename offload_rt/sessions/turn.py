"""A session turn as an engine request."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

from ..core import Prompt
from ..engine.logits_processors import check_answerable
from ..engine.prompts import token_ids
from ..engine.runner import Runner
from ..errors import InputError, ModelError
from ..model_runner.trace import Recorder
from ..models.loading import LoadedModel
from ..outputs import FinishReason
from ..sampling_params import SamplingParams
from .chat_template import TurnTokens, turn_tokens
from .host_tier import HostTier
from .session_kv import SessionKV
from .stored_request import StoredRequest
from .truncate import close_gap, tokens_after, truncate_for

T = TypeVar("T")


def prompt_text(prompt: str | Seq[int]) -> str:
    return prompt if isinstance(prompt, str) else ""


def check_turn(params: SamplingParams, model: LoadedModel) -> None:
    if params.n > 1 or params.num_beams > 1:
        raise InputError("a session has one response per turn: n and num_beams must be 1")
    if params.prompt_logprobs is not None:
        raise InputError("prompt_logprobs would need a session's earlier turns again: use it without a session")
    check_answerable(params, model)


def tokens_of_turn(kv: SessionKV, prompt: str | Seq[int]) -> TurnTokens:
    """Return the tokens that `prompt` adds to a session. Raises InputError if the prompt is invalid."""
    model = kv.runner.model
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer: give token ids, or pass tokenizer=")
        return turn_tokens(model.tokenizer, kv.history, prompt, model.eos_token_ids)
    added, vocab = token_ids(prompt), kv.runner.adapter.geometry.vocab
    if not added or any(not 0 <= token < vocab for token in added):
        raise InputError(f"a turn needs at least one token id, each from 0 to {vocab - 1}")
    return TurnTokens(len(kv.history.tokens), 0, tuple(added))


def check_fits(kv: SessionKV, tokens: TurnTokens, params: SamplingParams) -> None:
    """Check that the session can compute a turn that adds these tokens and generates `max_tokens` tokens.

    Raises:
        InputError: A parameter is not supported in sessions, or earlier turns would be both replaced and truncated.
        ModelError: The conversation would exceed the model's positions.
        PoolFullError: The conversation does not fit in the pool.
    """
    check_turn(params, kv.runner.model)
    new = len(tokens.added) + params.max_tokens
    _check_overflow(kv, new - tokens.dropped)
    left = tokens_after(kv, new - tokens.dropped)
    if tokens.dropped > 1 and left < tokens.tokens_before:
        raise InputError(
            f"the chat template rewrites earlier turns of session {kv.history.name!r}, which would outgrow the model's "
            "positions and cannot be truncated and rewritten at once: use another template, or a new session"
        )
    kv.runner.check_fits(left + new)


def _check_overflow(kv: SessionKV, new: int) -> None:
    most, tokens = kv.runner.max_positions, len(kv.history.tokens)
    if kv.context.options.overflow == "error" and tokens + new > most:
        raise ModelError(
            f"session {kv.history.name!r} has {tokens:,} tokens, {new:,} more (the turn and max_tokens) are needed, "
            f"and the limit is {kv.runner.position_limit}: call truncate, lower max_tokens, or open the store with "
            "overflow='truncate'"
        )


class Turn(StoredRequest):
    """One turn of a session, as an engine request.

    If the conversation would exceed the model's positions, its oldest tokens are truncated when the turn starts. When
    the turn ends, it is added to the history, and the session keeps its KV.

    If a turn is preempted or finds a damaged block, it restores the session and starts again later. If it is cancelled
    during the prefill, the session is unchanged. If it is cancelled later, the response so far is kept.
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

    def _prepare(self, runner: Runner) -> None:
        kv = self.kv
        self._fit(runner)
        if kv.history.computed > len(self._kept):
            kv.drop()
            kv.history.forget_from(len(self._kept))

    def _fit(self, runner: Runner) -> None:
        """If the turn would exceed the model's positions, truncate the conversation or rotate the sinks' keys."""
        kv, history = self.kv, self.kv.history
        before = history.truncation_id
        self._truncate()
        runner.check_fits(self.expected_tokens)
        close_gap(kv, self._host, self.expected_tokens)
        if history.truncation_id != before:
            # Truncation changes the names of the blocks. Store the blocks under their new names, so that this turn
            # finds them if it starts again.
            kv.enqueue(kv.all_names())

    def _truncate(self) -> None:
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
        warnings.warn(
            f"session {history.name!r} would outgrow {self.kv.runner.position_limit}: its oldest {gone:,} tokens, "
            "except the first ones, were removed (overflow='error' raises an error instead)",
            stacklevel=2,
        )

    def _after_reclaim(self, action: Callable[[], T]) -> T:
        return self._host.retry_after_reclaim(action)

    def _diverged_at(self, tokens: Seq[int], position: int) -> int | None:
        return position

    def _shared_tokens(self, tokens: Seq[int], diverged_at: int | None) -> int:
        return len(self._kept)

    def _after_drop(self, *, untouched: bool) -> None:
        if not untouched:
            self.kv.history.tokens = list(self._before)
            self.kv.drop()
        self._undo_prepare()

    def _undo_prepare(self) -> None:
        kv = self.kv
        self._forget(self._before)
        if kv.sequence is not None:
            kv.runner.pool.truncate(kv.sequence.blocks, kv.sequence.blocks.length)
        self._host.park(kv)

    def _forget(self, tokens: list[int]) -> None:
        kv = self.kv
        kv.history.tokens = list(tokens)
        if kv.sequence is None:
            return
        if kv.sequence.position > len(tokens):
            kv.drop()
        else:
            kv.sequence.tokens = list(tokens)

    def _store_kv(self, runner: Runner) -> None:
        kv, history, sequence = self.kv, self.kv.history, self.sequence
        interrupted, progressed = self._prefilling, sequence is not None and sequence.position > self._start
        complete = sequence is not None and not interrupted
        self.sequence = None
        if complete:
            assert sequence is not None
            history.tokens, history.computed = list(sequence.tokens), sequence.position
            history.decoded = history.decoded_with(len(self.prompt.token_ids), sequence.position)
            kv.end_turn()
        else:
            self._undo(interrupted, progressed)
        kv.last_stats = self._final
        try:
            if complete or self.new_tokens:
                # A turn removes at most the token that ended the last response, unless it rewrites the conversation.
                history.add_turn(len(self._kept), self._text, self.text, rewritten=self._tokens.dropped > 1)
                kv.enqueue_all()
        finally:
            self._host.park(kv)

    def _undo(self, interrupted: bool, progressed: bool) -> None:
        """Restore the session after an incomplete prefill. Tokens that were generated before a preemption are kept.

        Args:
            interrupted: Whether the prefill had begun.
            progressed: Whether at least one prefill segment was complete. The store keeps the KV of complete segments.
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
            kv.reset_policy_state()


class WholeTurn(Turn):
    """An atomic turn: if it is cancelled, the session is unchanged.

    If the process is killed, the session on disk is in the state either before or after the turn.
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
        # Write the KV before the history that refers to it.
        self.kv.context.saver.flush()
        super().persist()
