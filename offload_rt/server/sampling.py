"""How tokens are chosen and how many, from what a client asked for and what the model and the server allow."""

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
"""Fields that mean the same in a request and in `SamplingParams`."""


class Room:
    """How many tokens there may be: `positions` of the model, `most` that memory has room for, and the server's limit
    on an answer."""

    def __init__(self, positions: int, most: int, options: ServerOptions) -> None:
        self.positions, self.most, self._limit = positions, most, options.max_tokens_limit

    def check_prompt(self, tokens: int) -> None:
        """Raises RefusedError if a prompt of at least `tokens` tokens can never be answered."""
        if tokens >= self.positions:
            raise refused(
                f"this model's maximum context length is {self.positions:,} tokens, and the prompt has at least "
                f"{tokens:,}: shorten it",
                code="context_length_exceeded",
            )
        if tokens >= self.most:
            raise refused(
                f"the prompt has at least {tokens:,} tokens, and this server's memory has room for {self.most:,}, the "
                "answer included: shorten it, or start the server with more --host-memory",
                code="pool_full",
            )

    def tokens(self, prompt: int, asked: int | None, default: int | None = None) -> int:
        """New tokens for a prompt of so many: as many as were asked for, else `default`, else what there is room for.
        Raises RefusedError where there are not as many positions. What memory has no room for the engine refuses."""
        room = self.positions - prompt
        if prompt == 0:
            raise refused("the prompt is empty: give at least one token")
        if room < 1 or (asked is not None and asked > room):
            wanted = f"{prompt:,} in the prompt" + (f" and {asked:,} new ones" if asked else "")
            raise refused(
                f"this model's maximum context length is {self.positions:,} tokens, and you asked for {wanted}: "
                "shorten the prompt, or ask for fewer",
                code="context_length_exceeded",
            )
        if asked is not None and self._limit is not None and asked > self._limit:
            raise refused(f"{asked:,} new tokens are more than this server's limit of {self._limit:,}", "max_tokens")
        fits = max(1, self.most - prompt)
        return asked or min(n for n in (default, room, fits, self._limit) if n is not None)


def sampling_fields(body: SampledBody) -> dict[str, Any]:
    """The fields of `SamplingParams` that a request sets."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    return given | ({"logit_bias": _bias(body.logit_bias)} if body.logit_bias else {})


def _bias(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise refused(f"logit_bias: {token!r:.80} is no token id", "logit_bias")
    return {int(token): value for token, value in bias.items()}
