"""Streaming parsers for reasoning and tool calls, and their selection by model and request."""

from __future__ import annotations

from collections.abc import Sequence

from ..options import ReasoningParser, ToolParser
from . import hermes, think
from .hermes import Hermes
from .llama_json import LlamaJson
from .pieces import InRow, Parser, Plain
from .think import Think


def tool_parser(configured: ToolParser, template: str) -> ToolParser:
    """Return the configured tool parser. "auto" chooses one by the tags in the chat template."""
    if configured != "auto":
        return configured
    if hermes.OPEN in template:
        return "hermes"
    llama = '"parameters"' in template and ("python_tag" in template or "ipython" in template)
    return "llama3_json" if llama else "none"


def reasoning_parser(configured: ReasoningParser, template: str) -> ReasoningParser:
    """Return the configured reasoning parser. "auto" chooses one by the tags in the chat template."""
    if configured != "auto":
        return configured
    return "think" if think.CLOSE in template else "none"


def answer_parser(
    tools: ToolParser, reasoning: ReasoningParser, names: Sequence[str] | None, *, thinking: bool = False
) -> Parser:
    """Return a parser that extracts reasoning first and tool calls from the remaining text.

    Args:
        tools: Format of tool calls.
        reasoning: Format of reasoning.
        names: Names of the tools that may be called. None disables tool calls.
        thinking: Whether the prompt ends inside a reasoning section.
    """
    parser: Parser = Plain()
    if names is not None and tools != "none":
        parser = Hermes(names) if tools == "hermes" else LlamaJson(names)
    return InRow(Think(inside=thinking), parser) if reasoning == "think" else parser


def ends_within_thinking(prompt: str) -> bool:
    """Return whether a rendered prompt ends with an opening reasoning tag, as some templates do."""
    return prompt.rstrip().endswith(think.OPEN)
