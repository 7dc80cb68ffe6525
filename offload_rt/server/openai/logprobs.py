"""Log-probabilities in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...outputs import Logprob, Logprobs

LEAST = -9999.0
"""Replacement for minus infinity, which JSON cannot represent."""


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[Logprobs], top: int) -> dict[str, Any]:
    """Return the chat format for tokens `[t]`, each with the `top` most probable alternatives."""
    content = []
    for token, there in zip(token_ids, logprobs, strict=True):
        best = sorted(there.items(), key=lambda item: item[1].rank)[:top]
        content.append(_entry(token, there[token]) | {"top_logprobs": [_entry(i, one) for i, one in best]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], top: int, offset: int, first: str = ""
) -> dict[str, Any]:
    """Return the completion format for tokens `[t]`.

    Args:
        token_ids: Tokens.
        logprobs: Log-probabilities of each token. None for the first token of a prompt.
        top: Number of alternatives for each token.
        offset: Character offset of the first token.
        first: Text of a token without log-probabilities.
    """
    tokens: list[str] = []
    found: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, there in zip(token_ids, logprobs, strict=True):
        text = _text(token, there[token]) if there else first
        best = sorted(there.items(), key=lambda item: item[1].rank)[:top] if there else []
        tokens.append(text)
        found.append(_finite(there[token].logprob) if there else None)
        tops.append({_text(i, one): _finite(one.logprob) for i, one in best} if there else None)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": found, "top_logprobs": tops, "text_offset": offsets}


def _entry(token: int, logprob: Logprob) -> dict[str, Any]:
    text = _text(token, logprob)
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(text.encode())}


def _text(token: int, logprob: Logprob) -> str:
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def _finite(value: float) -> float:
    return max(value, LEAST)
