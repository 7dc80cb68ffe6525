"""Base class for the requests that the engine serves, and the request type that samples tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from ..core import Prompt
from ..model_runner.prefill import Prefill
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder, Trace
from ..outputs import (
    CompletionOutput,
    FinishReason,
    Logprobs,
    RequestMetrics,
    RequestOutput,
    Stats,
    StopReason,
    TokenOutput,
)
from ..sampling_params import SamplingParams
from .cache_manager import salt_provenance
from .detokenizer import TextStream
from .runner import Runner
from .sampler import PromptLogprobs, Sampler, logprobs_of
from .stats import sequence_stats


class StartAgainError(Exception):
    """A prefill cannot continue, but its request can start again immediately."""


class Request(ABC):
    """A prompt with its sampling parameters, from the time it is queued until it ends. Subclasses choose the tokens.

    A request owns sequences from `start` until `drop` or `finish`. After `drop`, it keeps its generated tokens and can
    start again.

    Attributes:
        sequences: Sequences that each decode step advances by one token.
        cached_tokens: Number of prompt tokens for which KV was already cached at the first start.
        recomputed_tokens: See `Stats`.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.prompt, self.params = prompt, params
        self.sequences: list[Sequence] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = self.recomputed_tokens = 0
        self.prompt_logprobs: list[Logprobs | None] | None = None
        self.metrics = RequestMetrics()
        self._start = self._stop = 0
        self._on_logits: Callable[[int, torch.Tensor], None] | None = None
        self._tokenizer = tokenizer
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._ends = self._eos.union(params.stop_token_ids)
        self._final: Stats | None = None

    @property
    def samples(self) -> list[Request]:
        """One request per completion of the prompt. The first one is this request."""
        return [self]

    @property
    @abstractmethod
    def width(self) -> int:
        """Maximum number of sequences that this request has at the same time."""

    @property
    def expected_tokens(self) -> int:
        """Maximum length of each sequence in tokens, including the prompt."""
        return len(self.prompt.token_ids) + self.params.max_tokens

    @property
    def tokens(self) -> list[int] | None:
        """Prompt and generated tokens, or None if the request cannot continue from them, as with beam search."""
        return None

    @abstractmethod
    def start(self, runner: Runner) -> Prefill:
        """Create the sequence and return its prefill. Raises PoolFullError, InputError or ModelError."""

    def next_prefill(self, runner: Runner) -> Prefill | None:
        """Return the next part of the prefill, or None after the last part. Raises PoolFullError."""
        return None if self.sequences[0].position == self._stop else self._begin_part(runner)

    def _begin_prefill(
        self, runner: Runner, stop: int, on_logits: Callable[[int, torch.Tensor], None] | None = None
    ) -> Prefill:
        self._start, self._stop, self._on_logits = self.sequences[0].position, stop, on_logits
        return self._begin_part(runner)

    def _begin_part(self, runner: Runner) -> Prefill:
        return runner.begin_prefill(self.sequences[0], self._stop, want_logits=True, on_logits=self._on_logits)

    def layers_prefilled(self, prefill: Prefill) -> int:
        """Return how many layers of the whole prefill are complete. `prefill` is the part that is running now."""
        position = prefill.sequence.position
        done = (position - self._start) * prefill.layers + (prefill.stop - position) * prefill.finished_layers
        return done // (self._stop - self._start)

    def _new_sequence(self, runner: Runner, tokens: Seq[int], reuse: int) -> Sequence:
        runner.check_fits(self.expected_tokens)
        provenance = salt_provenance(self.prompt.cache_salt)
        return runner.retry_after_reclaim(
            lambda: runner.new_sequence(tokens, len(tokens) + 1, reuse=reuse, provenance=provenance)
        )

    def resume(self, sequence: Sequence) -> None:
        """Continue with `sequence`, whose KV was restored from disk. Not called if `tokens` is None."""
        raise NotImplementedError

    def take_pending(self) -> list[SampledRequest]:
        """Return the completions that must be forked after the prefill. Later calls return an empty list."""
        return []

    def reserve(self, runner: Runner) -> None:
        for sequence in self.sequences:
            runner.retry_after_reclaim(partial(runner.reserve, sequence))

    @property
    def max_draft_tokens(self) -> int:
        return 0

    def draft_sampler(self) -> Sampler:
        raise NotImplementedError

    @abstractmethod
    def accept(self, runner: Runner, logits: torch.Tensor, best: Seq[int]) -> list[TokenOutput]:
        """Choose the next token of each sequence from float32 logits `[S, V]`, and return the outputs.

        Set `finish_reason` if this completes the request. `best` is the result of `best_tokens`.
        """

    def drop(self, runner: Runner) -> None:
        """Free the sequences, for example when the request is preempted. The request can start again."""
        while self.sequences:
            runner.free(self.sequences[-1])
            self.sequences.pop()

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """End the request and free its sequences. A finish reason that is already set is kept."""
        self.finish_reason = self.finish_reason or reason
        self._final = self.stats(runner)
        self.drop(runner)

    def persist(self) -> None:  # noqa: B027 - most requests have no results to write
        """Write the results to disk before clients learn that the request has ended. Raises StoreError.

        Called after `finish`, without holding the pool's lock. A second call has no effect.
        """

    def stats(self, runner: Runner) -> Stats | None:
        """Return the statistics of the first sequence so far, or None if the request has not started."""
        return sequence_stats(runner, self.sequences[0]) if self.sequences else self._final

    @abstractmethod
    def completions(self) -> list[CompletionOutput]: ...

    @property
    def h2d_bytes(self) -> int:
        """Size in bytes of the KV that was copied to the device. Valid after the end of the request."""
        return sum(one.stats.h2d_bytes for one in self.completions() if one.stats is not None)


def request_output(request: Request, ids: list[int], text: str | None = None, name: str | None = None) -> RequestOutput:
    """Return the output that a request has produced so far.

    Args:
        ids: Token ids of the prompt. All outputs of a request share this list.
        text: Text of the prompt. None if token ids were given.
        name: The request id. If None, the number of the request is used.
    """
    finished = all(sample.finish_reason is not None for sample in request.samples)
    return RequestOutput(
        request_id=str(request.prompt.id) if name is None else name,
        prompt=text,
        prompt_token_ids=ids,
        prompt_logprobs=request.prompt_logprobs,
        outputs=request.completions(),
        finished=finished,
        num_cached_tokens=request.cached_tokens,
        num_recomputed_tokens=request.recomputed_tokens,
        metrics=request.metrics if finished else replace(request.metrics, finished_time=None),
    )


class SampledRequest(Request):
    """One of the `params.n` sampled completions of a prompt.

    The first completion prefills the prompt, and the other completions fork its sequence. Each completion has its own
    random numbers and is preempted independently.
    """

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        sample: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(prompt, params, tokenizer, eos_token_ids)
        self.sample = sample
        self.stop_reason: StopReason = None
        self.new_tokens: list[int] = []
        self.logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self.text = ""
        others = range(1, params.n if sample == 0 else 0)
        self._others = [SampledRequest(prompt, params, tokenizer, eos_token_ids, i) for i in others]
        for other in self._others:
            other.metrics = self.metrics
        self._pending = list(self._others)
        self._trace: Trace | None = None
        self._recorder = recorder
        self._sampler = Sampler(params, sample, self._ends, tokenizer)
        self._stream = TextStream(
            tokenizer,
            params.stop,
            keep_stop=params.include_stop_str_in_output,
            special=not params.skip_special_tokens,
            prompt=prompt.token_ids,
        )

    @property
    def sequence(self) -> Sequence | None:
        return self.sequences[0] if self.sequences else None

    @sequence.setter
    def sequence(self, sequence: Sequence | None) -> None:
        self.sequences = [] if sequence is None else [sequence]

    @property
    def samples(self) -> list[Request]:
        return [self, *self._others]

    @property
    def width(self) -> int:
        return 1 + len(self._pending)  # pending completions will fork from this one

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt.token_ids, *self.new_tokens]

    def start(self, runner: Runner) -> Prefill:
        assert self.sequence is None
        prompt = len(self.prompt.token_ids)
        # After a preemption, prefill the generated tokens if this gives the same KV as decoding. Otherwise, decode them
        # again.
        stop = prompt if runner.approximates else prompt + len(self.new_tokens)
        collected = None if self.new_tokens else self._prompt_logprobs()
        self.sequence = sequence = self._new_sequence(runner, self.tokens, stop if collected is None else 0)
        sequence.trace.prompt_tokens = prompt
        self._continue_statistics(sequence)
        on_logits = None if collected is None else collected.add
        return self._begin_prefill(runner, stop, on_logits)

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        if self.params.prompt_logprobs is None:
            return None
        collected = PromptLogprobs(self.prompt.token_ids, self.params.prompt_logprobs, self._tokenizer)
        self.prompt_logprobs = collected.logprobs
        return collected

    def _continue_statistics(self, sequence: Sequence) -> None:
        if self._trace is None:
            sequence.trace.recorder = self._recorder
            self.cached_tokens = sequence.trace.reused_tokens
            self.recomputed_tokens = sequence.trace.recomputed_tokens
            return
        # KV that this request itself computed and cached before a preemption does not count as reused.
        missing = max(0, self.cached_tokens - self._trace.reused_tokens)
        self._trace.reused_tokens += min(missing, sequence.trace.reused_tokens)
        sequence.trace = self._trace

    def resume(self, sequence: Sequence) -> None:
        assert self.sequence is None and self._trace is not None
        self.sequence = sequence
        sequence.trace = self._trace

    def take_pending(self) -> list[SampledRequest]:
        pending, self._pending = self._pending, []
        return pending

    def fork_from(self, runner: Runner, first: Sequence) -> None:
        self.sequence = runner.retry_after_reclaim(lambda: runner.fork(first, len(first.tokens) + 1))

    @property
    def max_draft_tokens(self) -> int:
        assert self.sequence is not None
        is_replaying = self.sequence.position + 1 < len(self.sequence.tokens)  # decodes again after a preemption
        # A user's logits processors may keep state, so they must not see draft tokens that may be rejected.
        return 0 if is_replaying or self.params.logits_processors else self.params.max_tokens - len(self.new_tokens) - 1

    def draft_sampler(self) -> Sampler:
        return self._sampler.copy()

    def accept(self, runner: Runner, logits: torch.Tensor, best: Seq[int]) -> list[TokenOutput]:
        sequence, prompt = self.sequence, len(self.prompt.token_ids)
        assert sequence is not None and self.finish_reason is None
        if sequence.position < len(sequence.tokens):  # the next token was already sampled before a preemption
            return []
        token = self._sampler.pick(logits[0], sequence.tokens, prompt, shift=sequence.shift, best=best[0])
        sequence.tokens.append(token)
        self.new_tokens.append(token)
        shown = token not in self._ends or self.params.include_stop_str_in_output
        may_stop = len(self.new_tokens) > self.params.min_tokens
        text = self._stream.push(token, may_stop=may_stop) if shown else ""
        if token in self._ends:
            self.finish_reason, self.stop_reason = "stop", None if token in self._eos else token
        elif self._stream.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._stream.stopped
        elif self._sampler.complete:
            self.finish_reason = "stop"
        elif len(self.new_tokens) == self.params.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._stream.flush(may_stop=may_stop)
            if self.stop_reason is None and self._stream.stopped is not None:
                self.finish_reason, self.stop_reason = "stop", self._stream.stopped
        self.text += text
        index, ended = len(self.new_tokens) - 1, (self.finish_reason, self.sample, self.stop_reason)
        return [TokenOutput(self.prompt.id, text, token, index, *ended, self._take_logprobs(logits, token))]

    def _take_logprobs(self, logits: torch.Tensor, token: int) -> Logprobs | None:
        if self.logprobs is None or self.params.logprobs is None:
            return None
        [found] = logprobs_of(logits, [token], self.params.logprobs, self._tokenizer)
        self.logprobs.append(found)
        return found

    def drop(self, runner: Runner) -> None:
        if self.sequence is not None:
            self._trace = self.sequence.trace
        super().drop(runner)

    def completion(self) -> CompletionOutput:
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
        return [self.completion(), *(other.completion() for other in self._others)]
