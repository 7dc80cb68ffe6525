"""Answers that follow a schema, a pattern or a grammar."""

from __future__ import annotations

from typing import Any

from ..sampling_params import StructuredOutputs
from .conversation import Conversation
from .errors import refused
from .openai_requests import ResponseFormat, StructuredBody


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
    calls = [
        _call(tool["function"])
        for tool in conversation.tools
        if tool["function"]["name"] in (conversation.offered or ())
    ]
    return {"structured_outputs": StructuredOutputs(json=calls[0] if len(calls) == 1 else {"anyOf": calls})}


def _call(function: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call of a function."""
    parameters = function.get("parameters") or {}
    arguments = parameters if parameters.get("type") == "object" else {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
