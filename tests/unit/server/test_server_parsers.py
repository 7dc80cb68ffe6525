"""Test reasoning before content and tool calls: it never appears in the content, however the stream is split."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.server.parsers import answer_parser
from offload_rt.server.parsers.pieces import Content, Parser, Piece, Reasoning, ToolCall, joined
from offload_rt.server.parsers.reasoning import ends_within_thinking

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a<b"}}\n</tool_call>'
OFFERED = {"find": dict[str, object]()}
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
        return answer_parser(tools, reasoning, OFFERED, thinking=thinking)  # type: ignore[arg-type]

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
    ],
)
def test_hermes_and_thinking(text: str, pieces: list[Piece]) -> None:
    assert parse(answer_parser("hermes", "think", OFFERED), list(text)) == pieces


def test_a_prompt_that_opens_thinking() -> None:
    parser = answer_parser("none", "think", None, thinking=True)
    assert parse(parser, list("so\n</think>\nyes")) == [Reasoning("so"), Content("yes")]
    assert ends_within_thinking("<|im_start|>assistant\n<think>\n")
    assert not ends_within_thinking("<think>\n\n</think>\n\n")
    assert ends_within_thinking("user: Who?\nassistant: <think>\nSo", "<think>\nSo")
    assert not ends_within_thinking("user: <think>\nassistant: <think>\nSo</think> I", "<think>\nSo</think> I")


def test_without_tools_nothing_is_a_call() -> None:
    assert parse(answer_parser("hermes", "none", None), [CALL]) == [Content(CALL)]
