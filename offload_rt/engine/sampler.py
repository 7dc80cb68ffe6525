"""Sample the next token of a sequence with transformers' logits processors, and compute log-probabilities."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import InputError
from ..outputs import Logprob, Logprobs
from ..sampling_params import SamplingParams
from .detokenizer import token_text
from .guided_decoding import GuidedDecoder
from .logits_processors import apply_processors, check_any_allowed, check_logits, logits_processors

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, so that seeds of completions do not equal neighbouring seeds
_MASK = (1 << 64) - 1


INVALID = -1

Answer = tuple[torch.Tensor, list[int]]
"""Float32 logits `[S, V]` of the sequences of a request, and the most likely token of each row (see `best_tokens`)."""


def best_tokens(logits: torch.Tensor) -> list[int]:
    """Return the most likely token for each row of logits `[B, V]`, or `INVALID` for rows that are not finite."""
    highest = logits.max(dim=-1)
    # Copy both together: float32 represents all token ids below 2^24.
    values, ids = torch.stack((highest.values, highest.indices.to(logits.dtype))).tolist()
    return [int(token) if math.isfinite(value) else INVALID for value, token in zip(values, ids, strict=True)]


class Sampler:
    """Chooses the next tokens of one sequence.

    Random numbers depend only on the seed and the token's position in the text. The same seed therefore gives the same
    text on every device, in every batch and after a preemption. With `seed=None`, a random seed is chosen. Completion 0
    uses `seed`, and all other completions use seeds derived from it.

    Args:
        tokenizer: Tokenizer of the model. Needed for parameters that are given as text, such as `bad_words`.
    """

    def __init__(
        self,
        params: SamplingParams,
        sample: int = 0,
        ends: Collection[int] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._params, self._ends, self._tokenizer = params, ends, tokenizer
        self._greedy = params.temperature == 0
        self._generator = torch.Generator()
        seed = self._generator.seed() if params.seed is None else params.seed
        self._seed = (seed + sample * _SEED_STEP) & _MASK
        self._processors: LogitsProcessorList | None = None
        self._guided: GuidedDecoder | None = None
        self._warpers = LogitsProcessorList() if self._greedy else _warpers(params)

    def copy(self) -> Sampler:
        twin = copy.copy(self)
        twin._guided = None if self._guided is None else self._guided.copy()
        return twin

    def pick(
        self,
        logits: torch.Tensor,
        tokens: list[int],
        prompt: int | None = None,
        *,
        shift: int = 0,
        best: int | None = None,
    ) -> int:
        """Return the next token id.

        Args:
            tokens: Prompt and generated tokens.
            prompt: Number of prompt tokens. None means that all `tokens` belong to the prompt.
            shift: Number of tokens that were truncated from the start of the text.
            best: Most likely token if `best_tokens` was called for the whole batch, otherwise None.

        Raises:
            InputError: The constraints allow no token.
            LogitsError: The logits contain NaN.
        """
        row = logits.unsqueeze(0)
        best = best_tokens(row)[0] if best is None else best
        if best == INVALID:
            check_logits(logits)
        scores = self._constrained(row, tokens, len(tokens) if prompt is None else prompt)
        if self._greedy:
            token = best if scores is row else int(scores.argmax())
        else:
            token = self._draw(scores, shift + len(tokens))
        if self._guided is not None:
            self._guided.advance(token)
        return token

    @property
    def complete(self) -> bool:
        """Whether the structured output is complete."""
        return self._guided is not None and self._guided.complete

    def _draw(self, scores: torch.Tensor, position: int) -> int:
        scores = self._warpers(_NO_HISTORY, cast(torch.FloatTensor, scores))
        weights = torch.softmax(scores[0], dim=-1).cpu()
        self._generator.manual_seed(_seed_at(self._seed, position))
        try:
            return int(torch.multinomial(weights, 1, generator=self._generator))
        except RuntimeError as error:  # the weights contain NaN
            raise InputError(
                f"logits divided by temperature={self._params.temperature} are too large for float32: use a higher "
                "temperature, or a weaker logit_bias, repetition_penalty or logits processor"
            ) from error

    def _constrained(self, scores: torch.Tensor, tokens: list[int], prompt: int) -> torch.Tensor:
        if self._processors is None:
            self._begin(scores, prompt)
        assert self._processors is not None
        if not self._processors and self._guided is None:
            return scores
        history = torch.tensor([tokens], device=scores.device)
        found = apply_processors(self._processors, history, scores.clone())
        if self._guided is not None:
            found = found.masked_fill(~self._guided.allowed().to(found.device), -torch.inf)
        check_any_allowed(found)
        return found

    def _begin(self, scores: torch.Tensor, prompt: int) -> None:
        params = self._params
        self._processors = logits_processors(params, prompt, self._ends, self._tokenizer, scores.device)
        if params.structured_outputs is not None:
            self._guided = GuidedDecoder(params.structured_outputs, self._tokenizer, scores.shape[1], self._ends)


def _seed_at(seed: int, position: int) -> int:
    # torch's CPU generator uses only the lower 32 bits of a seed. Mix the bits, so that these differ for neighbouring
    # seeds.
    return _splitmix64(_splitmix64(seed) + position)


def _splitmix64(value: int) -> int:
    value = (value + _SEED_STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_NO_HISTORY = cast(torch.LongTensor, torch.empty((1, 0), dtype=torch.long))  # warpers ignore earlier tokens


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    # in transformers' order
    found = LogitsProcessorList()
    if params.temperature != 1.0:
        found.append(TemperatureLogitsWarper(float(params.temperature)))  # transformers refuses an integer
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    return found


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], count: int, tokenizer: PreTrainedTokenizerBase | None
) -> list[Logprobs]:
    """Return the log-probabilities at each of n positions, given logits `[n, V]`.

    Each result contains the chosen token (from `tokens` `[n]`) and the `count` most likely tokens, where -1 means all.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = torch.tensor(tokens, device=logprobs.device)[:, None]
    own = logprobs.gather(1, chosen)
    ranks = (logprobs > own).sum(dim=-1) + 1
    values, ids = logprobs.topk(logprobs.shape[1] if count < 0 else min(count, logprobs.shape[1]), dim=-1)
    every = zip(tokens, own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [_logprobs(token, own, rank, best, tops, tokenizer) for token, own, rank, best, tops in every]


def _logprobs(
    token: int,
    logprob: float,
    rank: int,
    best: list[int],
    values: list[float],
    tokenizer: PreTrainedTokenizerBase | None,
) -> Logprobs:
    found = {token: Logprob(logprob, rank, token_text(tokenizer, token))}
    for i, (one, value) in enumerate(zip(best, values, strict=True)):
        if one != token:
            found[one] = Logprob(value, i + 1, token_text(tokenizer, one))
    return found


class PromptLogprobs:
    """Collects the log-probabilities of a prompt's tokens during prefill. The first token has no log-probability."""

    def __init__(self, tokens: Sequence[int], count: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokens, self._count, self._tokenizer = tokens, count, tokenizer
        self.logprobs: list[Logprobs | None] = [None]

    def add(self, first: int, logits: torch.Tensor) -> None:
        """Add the logits `[n, V]` of the positions [first, first + n). Calls must be in the order of positions."""
        assert first == len(self.logprobs) - 1
        check_logits(logits)
        following = self._tokens[first + 1 : first + 1 + len(logits)]
        self.logprobs += logprobs_of(logits[: len(following)], following, self._count, self._tokenizer)
