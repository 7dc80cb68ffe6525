"""Guided decoding: JSON schemas, patterns and grammars of requests."""

from __future__ import annotations

import json
from typing import Any

from ..sampling_params import StructuredOutputs
from .conversation import Conversation
from .errors import refused
from .openai.requests import ResponseFormat, StructuredBody


def structured_outputs(asked: ResponseFormat | None, vllm: StructuredBody | None = None) -> dict[str, Any]:
    """Return the `structured_outputs` field of `SamplingParams` for OpenAI's or vLLM's format, or no field.

    Raises RefusedError or ConfigError if the format is invalid.
    """
    if vllm is not None and (given := vllm.model_dump(exclude_none=True, by_alias=True)):
        return {"structured_outputs": StructuredOutputs(**given)}
    if asked is None or asked.type == "text":
        return {}
    if asked.type == "json_object":
        return {"structured_outputs": StructuredOutputs(json={"type": "object"})}
    schema = asked.json_schema.schema_ if asked.json_schema else None
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
    # A schema with `$id` is the base of its references at any position.

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
