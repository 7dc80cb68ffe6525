"""Which parsers an answer goes through."""

from __future__ import annotations

from collections.abc import Sequence

from ..options import ReasoningParser, ToolParser
from . import hermes, think
from .hermes import Hermes
from .llama_json import LlamaJson
from .pieces import InRow, Parser, Plain
from .think import Think


def tool_parser(asked: ToolParser, template: str) -> ToolParser:
    """The parser of calls in force: the one that was asked for, or the one whose marks the chat template has."""
    if asked != "auto":
        return asked
    if hermes.OPEN in template:
        return "hermes"
    llama = '"parameters"' in template and ("python_tag" in template or "ipython" in template)
    return "llama3_json" if llama else "none"


def reasoning_parser(asked: ReasoningParser, template: str) -> ReasoningParser:
    """The parser of thinking in force."""
    if asked != "auto":
        return asked
    return "think" if think.CLOSE in template else "none"


def answer_parser(
    tools: ToolParser, reasoning: ReasoningParser, names: Sequence[str] | None, *, thinking: bool = False
) -> Parser:
    """What takes an answer apart: thinking first, then calls in what is left. names: the tools there are; None: none,
    so that nothing is a call. thinking: the prompt ends within thinking."""
    parser: Parser = Plain()
    if names is not None and tools != "none":
        parser = Hermes(names) if tools == "hermes" else LlamaJson(names)
    return InRow(Think(inside=thinking), parser) if reasoning == "think" else parser


def ends_within_thinking(prompt: str) -> bool:
    """Whether a rendered prompt opens thinking for the answer, as some templates do."""
    return prompt.rstrip().endswith(think.OPEN)
