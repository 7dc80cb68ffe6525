"""Streaming parsers for reasoning and tool calls. The model and the request determine which parser is used."""

from __future__ import annotations

from collections.abc import Mapping

from ..options import ReasoningParser, ToolParser
from .json_calls import DeepSeek, FencedJson, Hermes, LlamaJson, Mistral
from .pieces import Parser, Pipeline, Plain, Tools
from .pythonic import Pythonic
from .reasoning import THINK_END, Harmony, Think
from .scanner import Scanner
from .xml_calls import Glm, QwenCoder

TOOL_PARSERS: Mapping[str, type[Scanner]] = {
    "harmony": Harmony,
    "deepseek": DeepSeek,
    "mistral": Mistral,
    "glm": Glm,
    "qwen3_coder": QwenCoder,
    "hermes": Hermes,
    "pythonic": Pythonic,
    "llama3_json": LlamaJson,
    "json": FencedJson,
}
"""Tool parsers by name. "auto" chooses the first one whose `marks` occur in the chat template, otherwise "json"."""


def tool_parser(configured: ToolParser, template: str) -> ToolParser:
    """Return the configured tool parser. For "auto", it is chosen by the tags in the chat template."""
    if configured != "auto":
        return configured
    for name, kind in TOOL_PARSERS.items():
        if any(all(mark in template for mark in marks) for marks in kind.marks):
            return name  # type: ignore[return-value]
    return "json"


def reasoning_parser(configured: ReasoningParser, template: str) -> ReasoningParser:
    """Return the configured reasoning parser. For "auto", it is chosen by the tags in the chat template."""
    if configured != "auto":
        return configured
    if tool_parser("auto", template) == "harmony":
        return "harmony"
    return "think" if THINK_END in template else "none"


def needs_special_tokens(tools: ToolParser, reasoning: ReasoningParser, *, offered: bool) -> bool:
    """Return whether the parsers need special tokens in the text. `offered` tells whether tools may be called."""
    calls = offered and tools != "none" and TOOL_PARSERS[tools].special
    return calls or reasoning == "harmony"


def answer_parser(
    tools: ToolParser, reasoning: ReasoningParser, offered: Tools | None, *, thinking: bool = False
) -> Parser:
    """Return a parser that first extracts reasoning and then extracts tool calls from the remaining text.

    Args:
        offered: Tools that may be called. None disables tool calls.
        thinking: Whether the prompt ends inside a reasoning section.
    """
    if reasoning == "harmony":  # harmony handles both reasoning and tool calls
        return Harmony(offered or {})
    calls: Parser = Plain() if offered is None or tools == "none" else TOOL_PARSERS[tools](offered)
    return Pipeline(Think(inside=thinking), calls) if reasoning == "think" else calls
