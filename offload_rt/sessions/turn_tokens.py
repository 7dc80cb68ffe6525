"""Tokens of a turn, and the check that the turn fits the model and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from ..engine.prompts import token_ids
from ..errors import InputError, ModelError
from ..sampling_params import SamplingParams
from .chat_template import TurnTokens, turn_tokens
from .session_kv import SessionKV
from .truncate import tokens_after
from .turn import check_turn


def tokens_of_turn(kv: SessionKV, prompt: str | Seq[int]) -> TurnTokens:
    """Return the tokens that `prompt` adds to a session. Raise InputError if the prompt is invalid."""
    model = kv.runner.model
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer: give token ids, or pass tokenizer=")
        return turn_tokens(model.tokenizer, kv.history, prompt, model.eos_token_ids)
    added, vocab = token_ids(prompt), kv.runner.adapter.geometry.vocab
    if not added or any(not 0 <= token < vocab for token in added):
        raise InputError(f"a turn needs at least one token id, each from 0 to {vocab - 1}")
    return TurnTokens(len(kv.history.tokens), 0, tuple(added))


def check_fits(kv: SessionKV, tokens: TurnTokens, params: SamplingParams) -> None:
    """Check whether a turn with these tokens and `max_tokens` generated tokens fits.

    Raises:
        InputError: A parameter is not supported in sessions, or a turn that rewrites earlier turns must be truncated.
        ModelError, PoolFullError: The turn does not fit.
    """
    check_turn(params, kv.runner.model)
    new = len(tokens.added) + params.max_tokens
    _check_overflow(kv, new - tokens.dropped)
    left = tokens_after(kv, new - tokens.dropped)
    if tokens.dropped > 1 and left < tokens.held:
        raise InputError(
            f"the chat template rewrites earlier turns of session {kv.history.name!r}, which would outgrow the model's "
            "positions and cannot be truncated and rewritten at once: use another template, or a new session"
        )
    kv.runner.check_fits(left + new)


def _check_overflow(kv: SessionKV, new: int) -> None:
    """Raise ModelError if `new` further tokens would exceed the model's positions and `overflow` is "error"."""
    most, held = kv.runner.adapter.geometry.max_positions, len(kv.history.tokens)
    if kv.context.options.overflow == "error" and held + new > most:
        raise ModelError(
            f"session {kv.history.name!r} has {held:,} tokens, {new:,} more (the turn and max_tokens) are needed, "
            f"and {kv.history.model} has {most:,} positions: call truncate, ask for fewer new ones, or open the "
            "store with overflow='truncate'"
        )
