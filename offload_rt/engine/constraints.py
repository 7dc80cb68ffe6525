"""What is changed in logits before temperature and filters: transformers' logits processors, in its order."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ..errors import InputError
from ..models.registry import LoadedModel
from ..sampling_params import SamplingParams
from .structure import Structure


class NewTokenPenalties(LogitsProcessor):
    """OpenAI's and vLLM's penalties of what has been written, the prompt not counted: `frequency` for each time that a
    token stands there, `presence` once."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Logits `[B, V]` behind tokens `[B, T]`."""
        written = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)  # type: ignore[return-value]


def constraints(
    params: SamplingParams,
    prompt: int,
    ends: Collection[int],
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
) -> LogitsProcessorList:
    """All but structured outputs. prompt: how many tokens the prompt has; ends: those that end an answer."""
    found = LogitsProcessorList()
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        found.append(NewTokenPenalties(prompt, params.presence_penalty, params.frequency_penalty))
    if params.bad_words:
        assert tokenizer is not None, "check_answerable has seen to it"
        found.append(NoBadWordsLogitsProcessor(bad_word_ids(params, tokenizer)))
    if params.min_tokens and ends:
        found.append(MinNewTokensLengthLogitsProcessor(prompt, params.min_tokens, sorted(ends), device=str(device)))
    if params.allowed_token_ids is not None:
        allowed: Any = torch.tensor(sorted(set(params.allowed_token_ids)), device=device)
        found.append(PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed, params.num_beams))
    found.extend(params.logits_processors)
    return found


def bad_word_ids(params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokens of each bad word, at the beginning of a text and, behind a space, within one."""
    spelled = [text for word in params.bad_words for text in (word.strip(), f" {word.strip()}")]
    found: Any = tokenizer(spelled, add_special_tokens=False)["input_ids"]
    return [list(ids) for ids in dict.fromkeys(map(tuple, found)) if ids]


def check_answerable(params: SamplingParams, model: LoadedModel) -> None:
    """Raises InputError where the model has no such tokens, or no tokenizer for what needs one."""
    vocab = model.adapter.geometry.vocab
    named = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise InputError(f"{name} has {wrong}, which is not in the vocabulary of {model.name} (0-{vocab - 1})")
    if params.structured_outputs is not None:
        ends = () if params.ignore_eos else model.eos_token_ids
        Structure(params.structured_outputs, model.tokenizer, vocab, {*ends, *params.stop_token_ids})
    if params.bad_words and model.tokenizer is None:
        raise InputError(f"bad_words are texts, and {model.name} has no tokenizer: pass tokenizer=, or use logit_bias")
