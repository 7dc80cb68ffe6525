"""The next token of one sequence, through transformers' logits processors."""

from __future__ import annotations

import copy
from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..config import SamplingParams

_SEED_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: keeps the seeds of one request's completions away from those of neighbouring seeds."""


class Sampler:
    """Chooses tokens for one sequence. Its random numbers come from a CPU generator of its own, so the same seed
    gives the same text on every device and whatever else is in the batch. `seed=None` draws a fresh seed; completion
    `sample` of n has a seed of its own, made from `seed` and its number (0: `seed` itself)."""

    def __init__(self, params: SamplingParams, sample: int = 0) -> None:
        self._greedy = params.temperature == 0
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((params.seed + sample * _SEED_STEP) % (1 << 63))
        self._processors = LogitsProcessorList()
        if params.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
        if self._greedy:
            return
        if params.temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k != -1:
            self._processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            self._processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            self._processors.append(MinPLogitsWarper(params.min_p))

    def copy(self) -> Sampler:
        """Another that chooses what this one will: with random numbers of its own that are the same ones."""
        twin = copy.copy(self)
        twin._generator = torch.Generator()
        twin._generator.set_state(self._generator.get_state())
        return twin

    def pick(self, logits: torch.Tensor, tokens: list[int]) -> int:
        """A token id from float32 logits `[V]` that follow `tokens` (prompt and generated, for the repetition
        penalty)."""
        scores = logits.unsqueeze(0)
        if self._processors:
            history = torch.tensor([tokens], device=logits.device)
            scores = self._processors(cast(torch.LongTensor, history), cast(torch.FloatTensor, scores.clone()))
        if self._greedy:
            return int(scores.argmax())
        weights = torch.softmax(scores[0], dim=-1).cpu()
        return int(torch.multinomial(weights, 1, generator=self._generator))
