"""Sampling parameters and token limits of requests."""

from __future__ import annotations

import json
from typing import Any

from ..sampling_params import StructuredOutputs
from .conversation import Conversation
from .errors import refused
from .openai.requests import ResponseFormat, SampledBody, StructuredBody
from .options import ServerOptions

_SAME = (
    "n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "stop_token_ids",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "bad_words", "allowed_token_ids",
    "include_stop_str_in_output",
)  # fmt: skip
"""Fields with the same meaning in requests and in `SamplingParams`."""


class TokenLimits:
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
                f"the prompt has at least {tokens:,} tokens, and the capacity of the KV cache is {self.most:,}, "
                "including the response: shorten the prompt, or raise --host-memory",
                code="pool_full",
            )

    def tokens(self, prompt: int, requested: int | None, default: int | None = None) -> int:
        """Return the maximum number of new tokens for a prompt of `prompt` tokens.

        It is `requested` if given, else the minimum of `default` and the limits. The engine refuses requests that
        exceed the KV cache. Raises RefusedError if the context length or the server's limit is exceeded.
        """
        room = self.positions - prompt
        if prompt == 0:
            raise refused("the prompt is empty: send at least one token")
        if room < 1 or (requested is not None and requested > room):
            wanted = f"{prompt:,} in the prompt" + (f" and {requested:,} new ones" if requested else "")
            raise refused(
                f"this model's maximum context length is {self.positions:,} tokens, and you requested {wanted}: "
                "shorten the prompt, or request fewer new tokens",
                code="context_length_exceeded",
            )
        if requested is not None and self._limit is not None and requested > self._limit:
            raise refused(
                f"{requested:,} new tokens exceed this server's limit of {self._limit:,}: request fewer", "max_tokens"
            )
        fits = max(1, self.most - prompt)
        return requested or min(n for n in (default, room, fits, self._limit) if n is not None)


def sampling_fields(body: SampledBody) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that a request sets."""
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    return given | ({"logit_bias": _bias(body.logit_bias)} if body.logit_bias else {})


def _bias(bias: dict[str, float]) -> dict[int, float]:
    for token in bias:
        if not (token.isascii() and token.isdecimal() and len(token) < 19):
            raise refused(f"logit_bias: {token!r:.80} is not a token id", "logit_bias")
    return {int(token): value for token, value in bias.items()}


def structured_outputs(requested: ResponseFormat | None, vllm: StructuredBody | None = None) -> dict[str, Any]:
    """Return the `structured_outputs` field of `SamplingParams` for OpenAI's or vLLM's format, or no field.

    Raises RefusedError or ConfigError if the format is invalid.
    """
    if vllm is not None and (given := vllm.model_dump(exclude_none=True, by_alias=True)):
        return {"structured_outputs": StructuredOutputs(**given)}
    if requested is None or requested.type == "text":
        return {}
    if requested.type == "json_object":
        return {"structured_outputs": StructuredOutputs(json={"type": "object"})}
    schema = requested.json_schema.schema_ if requested.json_schema else None
    if schema is None:
        raise refused("response_format.json_schema.schema is missing: add the JSON schema", "response_format")
    return {"structured_outputs": StructuredOutputs(json=schema)}


def forced_call(conversation: Conversation) -> dict[str, Any]:
    """Return the `structured_outputs` field of `SamplingParams` that forces a tool call, or no field."""
    if conversation.choice != "required":
        return {}
    functions = [tool["function"] for tool in conversation.tools]
    offered = [function for function in functions if function["name"] in (conversation.offered or ())]
    if len(offered) == 1:
        return {"structured_outputs": StructuredOutputs(json=_call(offered[0], "#"))}
    calls = [_call(function, f"#/anyOf/{i}") for i, function in enumerate(offered)]
    return {"structured_outputs": StructuredOutputs(json={"anyOf": calls})}


def _call(function: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the schema of a call of `function`. `place`: JSON pointer of the schema."""
    parameters = function.get("parameters") or {}
    known = parameters.get("type") == "object"
    arguments = _moved(parameters, f"{place}/properties/arguments") if known else {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """Adjust the references of a schema (`#/$defs/...`) for its new position `place` in another schema."""
    # References in a schema with `$id` are relative to that schema, wherever it is.

    def move(found: dict[str, Any]) -> dict[str, Any]:
        target = found.get("$ref")
        if not isinstance(target, str) or not target.startswith("#"):
            return found
        return found | {"$ref": place + target[1:]}

    if "$id" in schema:
        return schema
    try:
        moved: dict[str, Any] = json.loads(json.dumps(schema), object_hook=move)
    except RecursionError:
        raise refused("tools: a schema is nested too deeply", "tools") from None
    return moved
