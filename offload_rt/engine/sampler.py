"""Sample the next token of a sequence, with transformers' logits processors."""

from __future__ import annotations

import copy
from collections.abc import Collection
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
from ..sampling_params import SamplingParams
from .constraints import apply_constraints, check_any_allowed, check_logits, constraints
from .structure import Structure

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: keeps seeds of completions apart from neighbouring seeds


class Sampler:
    """Sampler of one sequence.

    Random numbers come from its own CPU generator, so that a seed gives the same text on every device and in every
    batch. `seed=None` uses a random seed. Completion `sample` uses a seed derived from `seed` (0: `seed` itself).

    Args:
        ends: Tokens that end an answer.
        tokenizer: Needed for parameters given as text.
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
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((params.seed + sample * _SEED_STEP) % (1 << 63))
        self._constraints: LogitsProcessorList | None = None
        self._structure: Structure | None = None
        self._warpers = LogitsProcessorList() if self._greedy else _warpers(params)

    def copy(self) -> Sampler:
        """Return a copy that will choose the same tokens, with the same random numbers."""
        twin = copy.copy(self)
        twin._generator = torch.Generator()
        twin._generator.set_state(self._generator.get_state())
        twin._structure = None if self._structure is None else self._structure.copy()
        return twin

    def pick(self, logits: torch.Tensor, tokens: list[int], prompt: int | None = None) -> int:
        """Return the next token id from float32 logits `[V]` after `tokens`. The first `prompt` tokens are the prompt.

        Raises InputError if the constraints allow no token, and LogitsError for NaN logits.
        """
        check_logits(logits)
        scores = self._constrained(logits.unsqueeze(0), tokens, len(tokens) if prompt is None else prompt)
        token = int(scores.argmax()) if self._greedy else self._draw(scores)
        if self._structure is not None:
            self._structure.take(token)
        return token

    @property
    def complete(self) -> bool:
        """Whether the structured output is complete."""
        return self._structure is not None and self._structure.complete

    def _draw(self, scores: torch.Tensor) -> int:
        scores = self._warpers(_NO_HISTORY, cast(torch.FloatTensor, scores))
        weights = torch.softmax(scores[0], dim=-1).cpu()
        try:
            return int(torch.multinomial(weights, 1, generator=self._generator))
        except RuntimeError as error:  # NaN weights
            raise InputError(
                f"logits divided by temperature={self._params.temperature} are too large for float32: use a higher "
                "temperature, or a weaker logit_bias, repetition_penalty or logits processor"
            ) from error

    def _constrained(self, scores: torch.Tensor, tokens: list[int], prompt: int) -> torch.Tensor:
        """Return constrained logits `[1, V]`."""
        if self._constraints is None:
            self._begin(scores, prompt)
        assert self._constraints is not None
        if not self._constraints and self._structure is None:
            return scores
        history = torch.tensor([tokens], device=scores.device)
        found = apply_constraints(self._constraints, history, scores.clone())
        if self._structure is not None:
            found = found.masked_fill(~self._structure.allowed().to(found.device), -torch.inf)
        check_any_allowed(found)
        return found

    def _begin(self, scores: torch.Tensor, prompt: int) -> None:
        params = self._params
        self._constraints = constraints(params, prompt, self._ends, self._tokenizer, scores.device)
        if params.structured_outputs is not None:
            self._structure = Structure(params.structured_outputs, self._tokenizer, scores.shape[1], self._ends)


_NO_HISTORY = cast(torch.LongTensor, torch.empty((1, 0), dtype=torch.long))  # temperature and filters ignore it


def _warpers(params: SamplingParams) -> LogitsProcessorList:
    """Return temperature and filters in transformers' order."""
    found = LogitsProcessorList()
    if params.temperature != 1.0:
        found.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        found.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        found.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(MinPLogitsWarper(params.min_p))
    return found
