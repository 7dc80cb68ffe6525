"""Requests from prompt to last token: the protocol that the engine serves, and the request that samples."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from ..core import Prompt
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder, Trace
from ..outputs import CompletionOutput, FinishReason, Logprobs, RequestOutput, Stats, StopReason, TokenOutput
from ..sampling_params import SamplingParams
from .detokenizer import TextStream
from .logprobs import PromptLogprobs, logprobs_of
from .room import salt_provenance
from .runner import Runner
from .sampler import Sampler
from .times import Times


class StartAgainError(Exception):
    """A prefill cannot go on, but its request can start again at once. The engine drops the request and puts it first
    in the queue."""


class Request(Protocol):
    """What the engine serves. A request waits, prefills, decodes with one sequence or several, or is done. It owns its
    sequences from `start` to `drop` or `finish`; a dropped request can start again and loses no token."""

    prompt: Prompt
    finish_reason: FinishReason | None
    cached_tokens: int
    """Of its prompt, those whose rows were there when it started first."""
    prompt_logprobs: list[Logprobs | None] | None
    """Of its prompt's tokens, where they were asked for."""
    times: Times

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that the next decode step computes, after the prefill."""
        ...

    @property
    def width(self) -> int:
        """The most sequences that the request has at once."""
        ...

    @property
    def expected_tokens(self) -> int:
        """The most tokens that each of its sequences may come to, prompt included."""
        ...

    @property
    def tokens(self) -> list[int] | None:
        """Prompt and new tokens, where one sequence with these is the whole state of the request; else None."""
        ...

    def start(self, runner: Runner) -> Prefill:
        """Allocates what is known now, and begins the prefill. Raises PoolFullError, InputError, ModelError."""
        ...

    def resume(self, sequence: Sequence) -> None:
        """Goes on with `sequence`, which swap has brought back as it was when the request was dropped; only called
        where `tokens` is not None."""
        ...

    def take_pending(self) -> list[SampledRequest]:
        """The completions that begin as forks of this one when its prompt has been prefilled; each is returned once."""
        ...

    def reserve(self, runner: Runner) -> None:
        """Allocates what the next step needs. Raises PoolFullError."""
        ...

    @property
    def draft_room(self) -> int:
        """The most tokens that may be drafted beyond the next one; 0 where none can be."""
        ...

    def draft_sampler(self) -> Sampler:
        """What chooses drafts as the request will choose its next tokens, and changes nothing of it; only called where
        there is `draft_room`."""
        ...

    def accept(self, runner: Runner, logits: torch.Tensor) -> list[TokenOutput]:
        """Takes float32 logits `[S, V]` of its sequences, in order, and returns the new tokens; sets `finish_reason`
        after the last."""
        ...

    def drop(self, runner: Runner) -> None:
        """Frees what the request holds, so that it can start again later (preemption)."""
        ...

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """Frees what the request holds; `reason` is why it ends, if it has not ended by itself."""
        ...

    def persist(self) -> None:
        """Makes durable what has to be before anybody is told that the request has ended; called after `finish`, while
        other threads may use the pool. Raises StoreError; a second call does nothing."""
        ...

    def stats(self, runner: Runner) -> Stats | None:
        """What the request cost so far; None before it started."""
        ...

    def completions(self) -> list[CompletionOutput]:
        """The results so far, in order."""
        ...

    @property
    def samples(self) -> list[Request]:
        """Every request that answers the same prompt, this one first."""
        ...


def request_output(request: Request, ids: list[int], text: str | None = None, name: str | None = None) -> RequestOutput:
    """What has become of a request so far: of the prompt's token ids, which are not copied (outputs of every step share
    them), and its text, if it was one; `name` in place of its number."""
    finished = all(sample.finish_reason is not None for sample in request.samples)
    return RequestOutput(
        request_id=str(request.prompt.id) if name is None else name,
        prompt=text,
        prompt_token_ids=ids,
        prompt_logprobs=request.prompt_logprobs,
        outputs=request.completions(),
        finished=finished,
        num_cached_tokens=request.cached_tokens,
        metrics=request.times.metrics(finished=finished),
    )


class SampledRequest:
    """One of the `params.n` sampled completions of a prompt. The first one owns the prompt's prefill, the others
    (`pending`) fork from it; each has its own random numbers and can be dropped and started again by itself."""

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        sample: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        self.prompt, self.params, self.sample = prompt, params, sample
        self.sequence: Sequence | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: StopReason = None
        self.cached_tokens = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.new_tokens: list[int] = []
        self.logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self.text = ""
        self.times = Times()
        others = range(1, params.n if sample == 0 else 0)
        self._others = [SampledRequest(prompt, params, tokenizer, eos_token_ids, i) for i in others]
        for other in self._others:
            other.times = self.times
        self._pending = list(self._others)
        self._trace: Trace | None = None
        self._recorder = recorder
        self._final: Stats | None = None
        self._tokenizer = tokenizer
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._ends = self._eos.union(params.stop_token_ids)
        self._sampler = Sampler(params, sample, self._ends, tokenizer)
        self._stream = TextStream(
            tokenizer, params.stop, keep_stop=params.include_stop_str_in_output, prompt=prompt.token_ids
        )

    @property
    def samples(self) -> list[Request]:
        """This completion and, of the first one, all the others."""
        return [self, *self._others]

    @property
    def sequences(self) -> list[Sequence]:
        """The one sequence, while there is one."""
        return [] if self.sequence is None else [self.sequence]

    @property
    def width(self) -> int:
        """Its own sequence and those that will fork from it."""
        return 1 + len(self._pending)

    @property
    def expected_tokens(self) -> int:
        """Prompt and `max_tokens`."""
        return len(self.prompt.token_ids) + self.params.max_tokens

    @property
    def tokens(self) -> list[int]:
        """The prompt's token ids and the new ones."""
        return [*self.prompt.token_ids, *self.new_tokens]

    def start(self, runner: Runner) -> Prefill:
        """Makes the sequence and begins its prefill. After a drop the new tokens are prefilled too if that gives the
        same rows; else they are decoded again, as the first time. Raises PoolFullError, InputError, ModelError."""
        assert self.sequence is None
        prompt = len(self.prompt.token_ids)
        runner.check_fits(self.expected_tokens)
        stop = prompt if runner.approximates else prompt + len(self.new_tokens)
        seen = None if self.new_tokens else self._prompt_logprobs()
        reuse, provenance = stop if seen is None else 0, salt_provenance(self.prompt.cache_salt)
        self.sequence = runner.retry_after_reclaim(
            lambda: runner.new_sequence(self.tokens, len(self.tokens) + 1, reuse=reuse, provenance=provenance)
        )
        self.sequence.trace.prompt_tokens = prompt
        self._count_on(self.sequence)
        every_logits = None if seen is None else seen.see
        return runner.begin_prefill(self.sequence, stop, want_logits=True, every_logits=every_logits)

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """What takes those of the prompt from its prefill, where they are asked for."""
        if self.params.prompt_logprobs is None:
            return None
        seen = PromptLogprobs(self.prompt.token_ids, self.params.prompt_logprobs, self._tokenizer)
        self.prompt_logprobs = seen.found
        return seen

    def _count_on(self, sequence: Sequence) -> None:
        """Goes on with the counts of before, where there are any: what it computed itself it does not reuse, but what
        was taken back as not arrived may be there now."""
        if self._trace is None:
            sequence.trace.recorder = self._recorder
            self.cached_tokens = sequence.trace.reused_tokens
            return
        missing = max(0, self.cached_tokens - self._trace.reused_tokens)
        self._trace.reused_tokens += min(missing, sequence.trace.reused_tokens)
        sequence.trace = self._trace

    def resume(self, sequence: Sequence) -> None:
        """Takes the restored sequence, which goes on with the counts of before."""
        assert self.sequence is None and self._trace is not None
        self.sequence = sequence
        sequence.trace = self._trace

    def take_pending(self) -> list[SampledRequest]:
        """The completions that fork from this one; each is returned once."""
        pending, self._pending = self._pending, []
        return pending

    def fork_from(self, runner: Runner, first: Sequence) -> None:
        """Begins with what `first` has computed. Raises PoolFullError."""
        self.sequence = runner.retry_after_reclaim(lambda: runner.fork(first, len(first.tokens) + 1))

    def reserve(self, runner: Runner) -> None:
        """Allocates the slot of the next token. Raises PoolFullError."""
        sequence = self.sequence
        assert sequence is not None
        runner.retry_after_reclaim(lambda: runner.reserve(sequence))

    @property
    def draft_room(self) -> int:
        """Tokens that may still come after the next one; none while it computes again what it has chosen before, and
        where somebody else's processors, which may remember what they have seen, have a say."""
        assert self.sequence is not None
        known = self.sequence.position + 1 < len(self.sequence.tokens)
        return 0 if known or self.params.logits_processors else self.params.max_tokens - len(self.new_tokens) - 1

    def draft_sampler(self) -> Sampler:
        """A copy of its own."""
        return self._sampler.copy()

    def accept(self, runner: Runner, logits: torch.Tensor) -> list[TokenOutput]:
        """Samples the next token from logits `[1, V]`, unless it is known already, and ends after the last."""
        assert self.sequence is not None and self.finish_reason is None
        if self.sequence.position < len(self.sequence.tokens):
            return []
        token = self._sampler.pick(logits[0], self.sequence.tokens, len(self.prompt.token_ids))
        self.sequence.tokens.append(token)
        self.new_tokens.append(token)
        shown = token not in self._ends or self.params.include_stop_str_in_output
        text = self._stream.push(token, may_stop=len(self.new_tokens) > self.params.min_tokens) if shown else ""
        if token in self._ends:
            self.finish_reason, self.stop_reason = "stop", None if token in self._eos else token
        elif self._stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._stream.stopped
        elif self._sampler.complete:
            self.finish_reason = "stop"
        elif len(self.new_tokens) == self.params.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._stream.flush()
        self.text += text
        index, ended = len(self.new_tokens) - 1, (self.finish_reason, self.sample, self.stop_reason)
        return [TokenOutput(self.prompt.id, text, token, index, *ended, self._take_logprobs(logits, token))]

    def _take_logprobs(self, logits: torch.Tensor, token: int) -> Logprobs | None:
        """Those of the newest token, from what the model said, where they are asked for."""
        if self.logprobs is None or self.params.logprobs is None:
            return None
        [found] = logprobs_of(logits, [token], self.params.logprobs, self._tokenizer)
        self.logprobs.append(found)
        return found

    def drop(self, runner: Runner) -> None:
        """Frees the sequence and keeps its tokens and counts."""
        if self.sequence is not None:
            self._trace = self.sequence.trace
            runner.free(self.sequence)
            self.sequence = None

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """Frees the sequence, after its last statistics have been taken."""
        self.finish_reason = self.finish_reason or reason
        if self.sequence is not None:
            self._final = runner.stats(self.sequence)
            self.drop(runner)

    def persist(self) -> None:
        """Nothing of it is kept."""

    def stats(self, runner: Runner) -> Stats | None:
        """What the completion cost so far; None before it started."""
        return self._final if self.sequence is None else runner.stats(self.sequence)

    def completion(self) -> CompletionOutput:
        """The result so far; its statistics once it has started and finished."""
        pairs = zip(self.logprobs or (), self.new_tokens, strict=False)
        return CompletionOutput(
            index=self.sample,
            text=self.text,
            token_ids=list(self.new_tokens),
            logprobs=None if self.logprobs is None else list(self.logprobs),
            cumulative_logprob=None if self.logprobs is None else sum(one[token].logprob for one, token in pairs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            stats=self._final,
        )

    def completions(self) -> list[CompletionOutput]:
        """The results of this completion and the others, in order."""
        return [self.completion(), *(other.completion() for other in self._others)]
