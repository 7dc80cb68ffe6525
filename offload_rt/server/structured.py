"""Answers that follow a schema, a pattern or a grammar."""

from __future__ import annotations

import json
from typing import Any

from ..sampling_params import StructuredOutputs
from .conversation import Conversation
from .errors import refused
from .openai.requests import ResponseFormat, StructuredBody


def structured_outputs(asked: ResponseFormat | None, vllm: StructuredBody | None = None) -> dict[str, Any]:
    """The field of `SamplingParams` that makes an answer follow OpenAI's format, or vLLM's; nothing where any text will
    do. Raises RefusedError, and ConfigError, for what cannot be followed."""
    if vllm is not None and (given := vllm.model_dump(exclude_none=True, by_alias=True)):
        return {"structured_outputs": StructuredOutputs(**given)}
    if asked is None or asked.type == "text":
        return {}
    if asked.type == "json_object":
        return {"structured_outputs": StructuredOutputs(json={"type": "object"})}
    schema = asked.json_schema.schema_ if asked.json_schema else None
    if schema is None:
        raise refused("response_format.json_schema.schema: give the schema to follow", "response_format")
    return {"structured_outputs": StructuredOutputs(json=schema)}


def forced_call(conversation: Conversation) -> dict[str, Any]:
    """The field of `SamplingParams` that makes an answer a call of one of the tools that it may call; nothing where it
    need not be one."""
    if conversation.choice != "required":
        return {}
    functions = [tool["function"] for tool in conversation.tools]
    offered = [function for function in functions if function["name"] in (conversation.offered or ())]
    if len(offered) == 1:
        return {"structured_outputs": StructuredOutputs(json=_call(offered[0], "#"))}
    calls = [_call(function, f"#/anyOf/{i}") for i, function in enumerate(offered)]
    return {"structured_outputs": StructuredOutputs(json={"anyOf": calls})}


def _call(function: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema of a call of a function, which will stand at `place`."""
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
    """A schema as a part of another one, at `place`: what it refers to (`#/$defs/...`) lies there too. One with an
    `$id` is a whole of its own wherever it stands."""

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
        raise refused("tools: a schema is nested too deep", "tools") from None
    return moved
