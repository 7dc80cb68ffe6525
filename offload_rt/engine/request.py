"""One request from prompt to last token: its sampler, its text, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from ..config import SamplingParams
from ..core import Request
from ..forward.prefill import Prefill
from ..forward.sequence import Sequence
from ..forward.trace import Trace
from .detokenizer import TextStream
from .runner import Runner
from .sampler import Sampler
from .stats import Stats

FinishReason = Literal["length", "eos", "stop", "cancelled"]


class StartAgainError(Exception):
    """A prefill cannot go on, and its request can start again at once: the engine drops it and puts it first in the
    queue."""


@dataclass(frozen=True)
class TokenOutput:
    """One new token of a request. `text` is what can be shown now (it may be empty, or hold text of earlier tokens);
    `index` counts the completion's new tokens from 0; `finish_reason` is set on the last event; `sample` says which of
    the request's n completions it belongs to. Of a beam search only the last events come, each with all its text."""

    request: int
    text: str
    token_id: int
    index: int
    finish_reason: FinishReason | None
    sample: int = 0


@dataclass(frozen=True)
class Completion:
    """What a prompt became. `text` ends before a stop string; `token_ids` are all new tokens, the last included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats


class Served(Protocol):
    """What the engine serves: a request that is waiting, prefilling, decoding with one sequence or several, or done.
    It owns its sequences from `start` to `drop` or `finish`; dropped, it can start again and loses no token."""

    request: Request
    finish_reason: FinishReason | None

    @property
    def sequences(self) -> list[Sequence]:
        """Those that the next decode step computes, after the prefill."""
        ...

    @property
    def width(self) -> int:
        """Most sequences at once."""
        ...

    @property
    def tokens(self) -> list[int] | None:
        """Prompt and new tokens, if one sequence with these is all there is to it; else None."""
        ...

    def start(self, runner: Runner) -> Prefill:
        """Takes room for what is known now, and begins its prefill. Raises PoolFullError, InputError, ModelError."""
        ...

    def resume(self, sequence: Sequence) -> None:
        """Goes on with the sequence that it had when it was dropped, restored; only where there are `tokens`."""
        ...

    def take_pending(self) -> list[Generation]:
        """Completions that begin as forks of this one when its prompt has been prefilled; each is returned once."""
        ...

    def reserve(self, runner: Runner) -> None:
        """Takes room for the next step. Raises PoolFullError."""
        ...

    def accept(self, runner: Runner, logits: torch.Tensor) -> list[TokenOutput]:
        """What follows from logits `[S, V]` of the sequences, in order; ends the generation if that was all."""
        ...

    def drop(self, runner: Runner) -> None:
        """Gives back what it holds, to start again later (preemption)."""
        ...

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """Ends it, if it has not ended by itself, and gives back what it holds."""
        ...

    def stats(self, runner: Runner) -> Stats | None:
        """What it cost so far; None before it started."""
        ...

    def completions(self) -> list[Completion]:
        """The results, in order, when all have finished."""
        ...

    @property
    def samples(self) -> list[Served]:
        """All that serves the same request, itself first."""
        ...


class Generation:
    """A completion being generated, one of its request's `params.n`. The first one owns the prompt's prefill, the
    others (`pending`) fork from it; each has its own random numbers and can be dropped and started again by itself."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
        sample: int = 0,
    ) -> None:
        self.request, self.params, self.sample = request, params, sample
        self.sequence: Sequence | None = None
        self.finish_reason: FinishReason | None = None
        self.new_tokens: list[int] = []
        self.text = ""
        others = range(1, params.n if sample == 0 else 0)
        self._others = [Generation(request, params, tokenizer, eos_token_ids, i) for i in others]
        self._pending = list(self._others)
        self._trace: Trace | None = None
        self._final: Stats | None = None
        self._sampler = Sampler(params, sample)
        self._stream = TextStream(tokenizer, params.stop)
        self._eos = frozenset() if params.ignore_eos else eos_token_ids

    @property
    def samples(self) -> list[Served]:
        """See `Served.samples`."""
        return [self, *self._others]

    @property
    def sequences(self) -> list[Sequence]:
        """See `Served.sequences`."""
        return [] if self.sequence is None else [self.sequence]

    @property
    def width(self) -> int:
        """Its own sequence and those that will fork from it."""
        return 1 + len(self._pending)

    @property
    def tokens(self) -> list[int]:
        """See `Served.tokens`."""
        return [*self.request.prompt, *self.new_tokens]

    def start(self, runner: Runner) -> Prefill:
        """See `Served.start`. Of one that was dropped, new tokens are prefilled too if that gives the same rows; else
        they are decoded again, as the first time."""
        assert self.sequence is None
        prompt = len(self.request.prompt)
        runner.check_fits(prompt + self.params.max_new_tokens)
        stop = prompt if runner.approximates else prompt + len(self.new_tokens)
        self.sequence = runner.retry_after_reclaim(
            lambda: runner.new_sequence(self.tokens, len(self.tokens) + 1, reuse=stop)
        )
        self.sequence.trace.prompt_tokens = prompt
        if self._trace is not None:
            self._trace.reused_tokens += self.sequence.trace.reused_tokens
            self.sequence.trace = self._trace
        return runner.begin_prefill(self.sequence, stop, want_logits=True)

    def resume(self, sequence: Sequence) -> None:
        """See `Served.resume`."""
        assert self.sequence is None and self._trace is not None
        self.sequence = sequence
        sequence.trace = self._trace

    def take_pending(self) -> list[Generation]:
        """See `Served.take_pending`."""
        pending, self._pending = self._pending, []
        return pending

    def fork_from(self, runner: Runner, first: Sequence) -> None:
        """Begins with what `first` has computed. Raises PoolFullError."""
        self.sequence = runner.retry_after_reclaim(lambda: runner.fork(first, len(first.tokens) + 1))

    def reserve(self, runner: Runner) -> None:
        """See `Served.reserve`."""
        sequence = self.sequence
        assert sequence is not None
        runner.retry_after_reclaim(lambda: runner.reserve(sequence))

    def accept(self, runner: Runner, logits: torch.Tensor) -> list[TokenOutput]:
        """Samples the next token from logits `[1, V]`, unless it is known already, and ends after the last."""
        assert self.sequence is not None and self.finish_reason is None
        if self.sequence.position < len(self.sequence.tokens):
            return []
        token = self._sampler.pick(logits[0], self.sequence.tokens)
        self.sequence.tokens.append(token)
        self.new_tokens.append(token)
        text = self._stream.push(token)
        if token in self._eos:
            self.finish_reason = "eos"
        elif self._stream.stopped:
            self.finish_reason = "stop"
        elif len(self.new_tokens) == self.params.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            text += self._stream.flush()
        self.text += text
        return [TokenOutput(self.request.id, text, token, len(self.new_tokens) - 1, self.finish_reason, self.sample)]

    def drop(self, runner: Runner) -> None:
        """See `Served.drop`."""
        if self.sequence is not None:
            self._trace = self.sequence.trace
            runner.free(self.sequence)
            self.sequence = None

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """See `Served.finish`."""
        self.finish_reason = self.finish_reason or reason
        if self.sequence is not None:
            self._final = runner.stats(self.sequence)
            self.drop(runner)

    def stats(self, runner: Runner) -> Stats | None:
        """See `Served.stats`."""
        return self._final if self.sequence is None else runner.stats(self.sequence)

    def completion(self) -> Completion:
        """The result of a generation that has started and finished."""
        assert self._final is not None and self.finish_reason is not None
        return Completion(self.text, self.new_tokens, self.finish_reason, self._final)

    def completions(self) -> list[Completion]:
        """See `Served.completions`."""
        return [self.completion(), *(other.completion() for other in self._others)]
