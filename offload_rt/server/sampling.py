"""Sampling parameters and token limits of requests."""

from __future__ import annotations

from typing import Any

from .errors import refused
from .openai.requests import SampledBody
from .options import ServerOptions

_SAME = (
    "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "bad_words", "allowed_token_ids",
    "include_stop_str_in_output",
)  # fmt: skip
"""Fields with the same meaning in requests and in `SamplingParams`."""


class Room:
    """Token limits: context length of the model, KV cache capacity, and the server's limit on new tokens.

    Args:
        positions: Context length of the model in tokens.
        most: Capacity of the KV cache in tokens.
        options: Server options.
    """

    def __init__(self, positions: int, most: int, options: ServerOptions) -> None:
        self.positions, self.most, self._limit = positions, most, options.max_tokens_limit

    def check_prompt(self, tokens: int) -> None:
        """Raise RefusedError if a prompt of at least `tokens` tokens exceeds the limits."""
        if tokens >= self.positions:
            raise refused(
                f"this model's maximum context length is {self.positions:,} tokens, and the prompt has at least "
                f"{tokens:,}: shorten it",
                code="context_length_exceeded",
            )
        if tokens >= self.most:
            raise refused(
                f"the prompt has at least {tokens:,} tokens, and the KV cache has room for {self.most:,}, including "
                "the response: shorten the prompt, or raise --host-memory",
                code="pool_full",
            )

    def tokens(self, prompt: int, asked: int | None, default: int | None = None) -> int:
        """Return the maximum number of new tokens for a prompt of `prompt` tokens.

        It is `asked` if given, else the smallest of `default` and the limits. The engine refuses requests that exceed
        the KV cache. Raises RefusedError if the context length or the server's limit is exceeded.
        """
        room = self.positions - prompt
        if prompt == 0:
            raise refused("the prompt is empty: send at least one token")
        if room < 1 or (asked is not None and asked > room):
            wanted = f"{prompt:,} in the prompt" + (f" and {asked:,} new ones" if asked else "")
            raise refused(
                f"this model's maximum context length is {self.positions:,} tokens, and you requested {wanted}: "
                "shorten the prompt, or request fewer",
                code="context_length_exceeded",
            )
        if asked is not None and self._limit is not None and asked > self._limit:
            raise refused(f"{asked:,} new tokens are more than this server's limit of {self._limit:,}", "max_tokens")
        fits = max(1, self.most - prompt)
        return asked or min(n for n in (default, room, fits, self._limit) if n is not None)


def sampling_fields(body: SampledBody) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a request sets."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    return given | ({"logit_bias": _bias(body.logit_bias)} if body.logit_bias else {})


def _bias(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise refused(f"logit_bias: {token!r:.80} is not a token id", "logit_bias")
    return {int(token): value for token, value in bias.items()}
