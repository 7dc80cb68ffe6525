"""One request from prompt to last token: its sampler, its text, and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from ..config import SamplingParams
from ..core import Request
from .metrics import Stats
from .runner import Runner
from .sampler import Sampler
from .sequence import Sequence
from .text import TextStream

FinishReason = Literal["length", "eos", "stop", "cancelled"]


@dataclass(frozen=True)
class Event:
    """One new token of a request. `text` is what can be shown now (it may be empty, or hold text of earlier tokens);
    `index` counts the request's new tokens from 0; `finish_reason` is set on the last event."""

    request: int
    text: str
    token_id: int
    index: int
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Completion:
    """What a prompt became. `text` ends before a stop string; `token_ids` are all new tokens, the last included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats


class Generation:
    """A request being served. It owns its sequence from `start` to `finish`; `stats` stay after that."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.request, self.params = request, params
        self.sequence: Sequence | None = None
        self.finish_reason: FinishReason | None = None
        self.new_tokens: list[int] = []
        self.text = ""
        self._final: Stats | None = None
        self._sampler = Sampler(params)
        self._stream = TextStream(tokenizer, params.stop)
        self._eos = frozenset() if params.ignore_eos else eos_token_ids

    def start(self, runner: Runner) -> None:
        """Takes room for the prompt and all new tokens. Raises PoolFullError, InputError, ModelError."""
        assert self.sequence is None
        capacity = len(self.request.prompt) + self.params.max_new_tokens
        self.sequence = runner.new_sequence(self.request.prompt, capacity)

    def accept(self, logits: torch.Tensor) -> Event:
        """Samples the next token from logits `[V]` and ends the generation if that was the last."""
        assert self.sequence is not None and self.finish_reason is None
        token = self._sampler.pick(logits, self.sequence.tokens)
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
        return Event(self.request.id, text, token, len(self.new_tokens) - 1, self.finish_reason)

    def finish(self, runner: Runner, reason: FinishReason) -> None:
        """Ends the generation, if it has not ended by itself, and gives back what it holds."""
        self.finish_reason = self.finish_reason or reason
        if self.sequence is not None:
            self._final = runner.stats(self.sequence)
            runner.free(self.sequence)
            self.sequence = None

    def stats(self, runner: Runner) -> Stats | None:
        """What it cost so far; None before it started."""
        return self._final if self.sequence is None else runner.stats(self.sequence)

    def completion(self) -> Completion:
        """The result of a generation that has started and finished."""
        assert self._final is not None and self.finish_reason is not None
        return Completion(self.text, self.new_tokens, self.finish_reason, self._final)
