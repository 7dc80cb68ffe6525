"""Test answer parsers: results do not depend on how the stream is split, and reasoning never appears in the content."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.server.parsers import (
    Content,
    Parser,
    Piece,
    Reasoning,
    ToolCall,
    answer_parser,
    ends_within_thinking,
    joined,
    reasoning_parser,
    tool_parser,
)

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a<b"}}\n</tool_call>'
FOUND = ToolCall("find", '{"q": "a<b"}')


def parse(parser: Parser, parts: list[str]) -> list[Piece]:
    return joined([*(piece for part in parts for piece in parser.push(part)), *parser.finish()])


FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "<", "</", "<th", "ink>", "tool_call>", " ", "\n", "a",
    "é", '{"name": "find", "arguments": {}}',
    '{"name": "find", "parameters": {"q": 1}}', "; ", "{", "}", "<|python_tag|>",
    "<|",     "[1", '"', "x < y",
)  # fmt: skip


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "none"])
@pytest.mark.parametrize("reasoning", ["think", "none"])
@settings(max_examples=2000 if "OFFLOAD_RT_STRESS" in os.environ else 15, deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_same(tools: str, reasoning: str, thinking: bool, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=10)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def make() -> Parser:
        return answer_parser(tools, reasoning, ["find"], thinking=thinking)  # type: ignore[arg-type]

    whole = parse(make(), [text])
    assert parse(make(), parts) == whole
    assert parse(make(), list(text)) == whole
    said = "".join(piece.text for piece in whole if isinstance(piece, Content))
    if reasoning == "think":
        assert "<think>" not in said
    elif tools == "none":
        assert said == text
    if tools == "hermes":
        assert CALL not in said


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (" Hello", [Content(" Hello")]),
        ("\n<think>a</think> ", [Reasoning("a")]),
        ("<think>\nhm\n</think>\n\nHello ", [Reasoning("hm"), Content("Hello ")]),
        (f"<think>a</think>Look:\n{CALL}\n{CALL}\n", [Reasoning("a"), Content("Look:"), FOUND, FOUND]),
        (f"<think>{CALL}</think>b", [Reasoning(CALL), Content("b")]),
        ("<think>never ends", [Reasoning("never ends")]),
        ('<tool_call>{"name": "find", "arguments": {}}', [ToolCall("find", "{}")]),
        ('a <tool_call>{"name": "other"}</tool_call>', [Content('a <tool_call>{"name": "other"}</tool_call>')]),
        ("<tool_call>no json</tool_call> b", [Content("<tool_call>no json</tool_call> b")]),
        ("a < b, <tool", [Content("a < b, <tool")]),
    ],
)
def test_hermes_and_thinking(text: str, pieces: list[Piece]) -> None:
    assert parse(answer_parser("hermes", "think", ["find"]), list(text)) == pieces


def test_a_prompt_that_opens_thinking() -> None:
    parser = answer_parser("none", "think", None, thinking=True)
    assert parse(parser, list("so\n</think>\nyes")) == [Reasoning("so"), Content("yes")]
    assert ends_within_thinking("<|im_start|>assistant\n<think>\n")
    assert not ends_within_thinking("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('{"name": "find", "parameters": {"q": 1}}', [ToolCall("find", '{"q": 1}')]),
        (
            '<|python_tag|>{"name": "find", "parameters": {}}; {"name": "find", "parameters": {"a": "}"}}',
            [ToolCall("find", "{}"), ToolCall("find", '{"a": "}"}')],
        ),
        ('{"name": "other", "parameters": {}}', [Content('{"name": "other", "parameters": {}}')]),
        ('{"name": "find"} and more', [Content('{"name": "find"} and more')]),
        ("No { here", [Content("No { here")]),
        ("[" * 5000, [Content("[" * 5000)]),
        ("{" + '"a":{' * 5000, [Content("{" + '"a":{' * 5000)]),
    ],
)
def test_llama_json(text: str, pieces: list[Piece]) -> None:
    assert parse(answer_parser("llama3_json", "none", ["find"]), [text]) == pieces


def test_without_tools_nothing_is_a_call() -> None:
    assert parse(answer_parser("hermes", "none", None), [CALL]) == [Content(CALL)]


def test_parsers_are_chosen_by_the_template() -> None:
    qwen = "{{ '<tool_call>' }} <think> </think>"
    assert (tool_parser("auto", qwen), reasoning_parser("auto", qwen)) == ("hermes", "think")
    assert tool_parser("auto", '"parameters": x Environment: ipython') == "llama3_json"
    assert (tool_parser("auto", "{{ messages }}"), reasoning_parser("auto", "")) == ("none", "none")
    assert (tool_parser("none", qwen), reasoning_parser("none", qwen)) == ("none", "none")


def test_arguments_are_json() -> None:
    text = '<tool_call>{"name": "find", "arguments": "{\\"q\\": \\"é\\"}"}</tool_call>'
    (call,) = parse(answer_parser("hermes", "none", ["find"]), [text])
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == {"q": "é"}
