"""Logits processors of a request. They run before temperature and the sampling filters.

Most of them are transformers' own processors, and they run in the same order as in transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from ..errors import InputError, LogitsError
from ..models.loading import LoadedModel
from ..sampling_params import SamplingParams
from .guided_decoding import GuidedDecoder


class NewTokenPenalties(LogitsProcessor):
    """Presence and frequency penalties as in OpenAI's API and vLLM: only generated tokens count, not prompt tokens."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        written = input_ids[:, self._prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self._frequency * counts - self._presence * (counts > 0)  # type: ignore[return-value]


class AllowedTokens(LogitsProcessor):
    def __init__(self, tokens: Collection[int], device: torch.device) -> None:
        self._tokens = torch.tensor(sorted(set(tokens)), device=device)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        # If other processors forbid all of these tokens, no token is left, and the caller raises an error.
        # transformers' PrefixConstrainedLogitsProcessor would allow the tokens again.
        found = torch.full_like(scores, -torch.inf)
        found[:, self._tokens] = scores[:, self._tokens]
        return cast(torch.FloatTensor, found)


def logits_processors(
    params: SamplingParams,
    prompt: int,
    ends: Collection[int],
    tokenizer: PreTrainedTokenizerBase | None,
    device: torch.device,
) -> LogitsProcessorList:
    """Return all logits processors of a request except the one for structured outputs.

    `prompt` is the number of prompt tokens. `ends` contains the tokens that end the text.
    """
    found = LogitsProcessorList()
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.presence_penalty or params.frequency_penalty:
        found.append(NewTokenPenalties(prompt, params.presence_penalty, params.frequency_penalty))
    if params.bad_words:
        assert tokenizer is not None, "check_answerable refuses bad_words without a tokenizer"
        found.append(NoBadWordsLogitsProcessor(_bad_word_ids(params, tokenizer)))
    if params.min_tokens and ends:
        found.append(MinNewTokensLengthLogitsProcessor(prompt, params.min_tokens, sorted(ends), device=str(device)))
    if params.allowed_token_ids is not None:
        found.append(AllowedTokens(params.allowed_token_ids, device))
    found.extend(params.logits_processors)
    return found


def check_logits(logits: torch.Tensor) -> None:
    """Raise LogitsError if any row of logits `[..., V]` contains NaN or +inf, or has no finite value."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise LogitsError(
            "the model's logits are not finite (NaN or infinite): its activations overflowed, as they can in float16, "
            "or its weights contain such values; load it with dtype='bfloat16' or 'float32'"
        )


def apply_processors(processors: LogitsProcessorList, history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Apply `processors` to `scores` and return the resulting logits `[B, V]`.

    `history` contains the earlier tokens `[B, T]`. Raises InputError if a processor returns anything other than logits
    `[B, V]`.
    """
    found: Any = scores
    for processor in processors:
        found = processor(cast(torch.LongTensor, history), found)
        if not _is_logits(found, scores.shape):
            raise InputError(
                f"the logits processor {type(processor).__name__} returned {_describe_result(found)}; it must return "
                f"floating-point logits of shape {tuple(scores.shape)}"
            )
    return cast(torch.Tensor, found.to(scores))


def _is_logits(value: Any, shape: torch.Size) -> bool:
    if not isinstance(value, torch.Tensor) or value.shape != shape or not value.is_floating_point():
        return False
    return value.layout == torch.strided and not value.is_meta


def _describe_result(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    return f"a tensor of {value.dtype}, shape {tuple(value.shape)}, layout {value.layout} on {value.device}"


def check_any_allowed(scores: torch.Tensor) -> None:
    """Raise InputError if any row of processed logits `[..., V]` allows no token, or contains NaN or +inf."""
    best = scores.amax(dim=-1)
    if best.isnan().any():
        raise InputError("a logits processor returned NaN; it must return numbers, or -inf for tokens to forbid")
    if best.isposinf().any():
        raise InputError(
            "a logit became infinite: use a lower logit_bias, a repetition_penalty closer to 1, and logits_processors "
            "that return finite numbers, or -inf for tokens to forbid"
        )
    if not torch.isfinite(best).all():
        raise InputError(
            "no token is allowed: the constraints contradict each other (allowed_token_ids, structured_outputs, "
            "logits_processors; bad_words, logit_bias, min_tokens)"
        )


def _bad_word_ids(params: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # Encode words with and without a leading space, which is a part of the token in many vocabularies.
    spelled = [text for word in params.bad_words for text in (word.strip(), f" {word.strip()}")]
    found: Any = tokenizer(spelled, add_special_tokens=False)["input_ids"]
    return [list(ids) for ids in dict.fromkeys(map(tuple, found)) if ids]


def check_answerable(params: SamplingParams, model: LoadedModel) -> None:
    """Raise InputError if the model cannot serve `params`.

    This is the case if token ids are unknown, if the grammar is invalid, or if a tokenizer is needed but missing.
    """
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
        GuidedDecoder(params.structured_outputs, model.tokenizer, vocab, {*ends, *params.stop_token_ids})
    if params.bad_words and model.tokenizer is None:
        raise InputError(f"bad_words need a tokenizer, and {model.name} has none: set tokenizer=, or use logit_bias")
