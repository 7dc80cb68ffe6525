"""Log-probabilities of sampled or given tokens, and of the most probable ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ..outputs import Logprob, Logprobs
from .constraints import check_logits
from .detokenizer import token_text


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], count: int, tokenizer: PreTrainedTokenizerBase | None
) -> list[Logprobs]:
    """Return, for each of `tokens` with logits `[n, V]`, its log-probability and the `count` largest (-1: all)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    there = torch.tensor(tokens, device=logprobs.device)[:, None]
    mine = logprobs.gather(1, there)
    ranks = (logprobs > mine).sum(dim=-1) + 1
    values, ids = logprobs.topk(logprobs.shape[1] if count < 0 else min(count, logprobs.shape[1]), dim=-1)
    every = zip(tokens, mine[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True)
    return [_place(token, own, rank, best, tops, tokenizer) for token, own, rank, best, tops in every]


def _place(
    token: int,
    logprob: float,
    rank: int,
    best: list[int],
    values: list[float],
    tokenizer: PreTrainedTokenizerBase | None,
) -> Logprobs:
    found = {token: Logprob(logprob, rank, token_text(tokenizer, token))}
    for place, (one, value) in enumerate(zip(best, values, strict=True)):
        if one != token:
            found[one] = Logprob(value, place + 1, token_text(tokenizer, one))
    return found


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, collected during prefill. The first token has none."""

    def __init__(self, tokens: Sequence[int], count: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokens, self._count, self._tokenizer = tokens, count, tokenizer
        self.found: list[Logprobs | None] = [None]

    def see(self, first: int, logits: torch.Tensor) -> None:
        """Add logits `[n, V]` of the positions from `first` on, which follow those seen before."""
        assert first == len(self.found) - 1
        check_logits(logits)
        behind = self._tokens[first + 1 : first + 1 + len(logits)]
        self.found += logprobs_of(logits[: len(behind)], behind, self._count, self._tokenizer)
