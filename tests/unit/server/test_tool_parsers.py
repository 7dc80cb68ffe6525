"""Test tool parsers with recorded responses in each format, both complete and truncated."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.server.options import ToolParser
from offload_rt.server.parsers import TOOL_PARSERS, answer_parser, needs_special_tokens, reasoning_parser, tool_parser
from offload_rt.server.parsers.json_calls import fits_schema
from offload_rt.server.parsers.pieces import Arguments, Content, Parser, Piece, Reasoning, ToolCall, joined
from offload_rt.server.parsers.reasoning import ends_within_thinking

TOOLS: dict[str, Any] = {
    "find": {
        "type": "object",
        "properties": {"q": {"type": "string"}, "most": {"type": "integer"}, "exact": {"type": "boolean"}},
    },
    "write_file": {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}},
    "stop": {},
}
CODE = 'if a < b:\n    print("} ] </x> é")\n\n'
FIND = ("find", {"q": "Dick", "most": 3, "exact": True})
WRITE = ("write_file", {"path": "a.py", "content": CODE})
CALLS = [FIND, WRITE, ("stop", {})]
"""The tool calls in each recorded response."""


def json_call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def hermes_call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json_call(name, arguments)}\n</tool_call>"


def qwen_coder_call(name: str, arguments: Any) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm_call(name: str, arguments: Any) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def deepseek_v3_call(name: str, arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"


def deepseek_v31_call(name: str, arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"


def mistral_v11_call(name: str, arguments: Any) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def python_call(name: str, arguments: Any) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def harmony_call(name: str, arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"


def all_calls(begin: str, end: str, separator: str, write: Any) -> str:
    return begin + separator.join(write(name, arguments) for name, arguments in CALLS) + end


LISTED = [{"name": name, "arguments": arguments} for name, arguments in CALLS]
WITH_IDS = [one | {"id": f"a1B2c3D4{i}"} for i, one in enumerate(LISTED)]
LOOK = [Content("Look:")]

RECORDED: dict[str, tuple[str, str, list[Piece]]] = {
    "hermes": ("hermes", "Look:\n" + all_calls("", "\n", "\n", hermes_call), LOOK),
    "hermes, one pair of tags": (
        "hermes",
        "<tool_call>\n" + "\n".join(json_call(*call) for call in CALLS) + "\n</tool_call>",
        [],
    ),
    "hermes, fences": (
        "hermes",
        "Look:\n" + "\n".join(f"```json\n{json.dumps(one, indent=2, ensure_ascii=False)}\n```" for one in LISTED),
        LOOK,
    ),
    "hermes, one fence": ("hermes", "Look:\n```json\n" + "\n".join(json_call(*call) for call in CALLS) + "\n```", LOOK),
    "qwen3_coder": ("qwen3_coder", "Look:\n\n" + all_calls("", "", "\n", qwen_coder_call), LOOK),
    "qwen3_coder, first tag omitted": (
        "qwen3_coder",
        "Look: " + all_calls("", "", "\n", qwen_coder_call).removeprefix("<tool_call>\n"),
        LOOK,
    ),
    "glm": ("glm", "Look:\n" + all_calls("", "", "\n", glm_call), LOOK),
    "deepseek v3": (
        "deepseek",
        "Look:" + all_calls("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n", deepseek_v3_call),
        LOOK,
    ),
    "deepseek v3.1": (
        "deepseek",
        "Look:" + all_calls("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "", deepseek_v31_call),
        LOOK,
    ),
    "mistral list": ("mistral", f"[TOOL_CALLS] {json.dumps(WITH_IDS, ensure_ascii=False)}", []),
    "mistral v11": ("mistral", "Look:" + all_calls("", "", "", mistral_v11_call), LOOK),
    "pythonic": ("pythonic", all_calls("[", "]", ", ", python_call), []),
    "llama 4": ("pythonic", all_calls("<|python_start|>[", "]<|python_end|>", ", ", python_call), []),
    "llama3_json": (
        "llama3_json",
        "; ".join(json_call(name, arguments, "parameters") for name, arguments in CALLS),
        [],
    ),
    "llama3_json, tag": (
        "llama3_json",
        "<|python_tag|>" + "; ".join(json_call(name, arguments, "parameters") for name, arguments in CALLS),
        [],
    ),
    "json, list": ("json", json.dumps(LISTED, ensure_ascii=False), []),
    "json, fence": ("json", "Look:\n```json\n" + json.dumps(LISTED, indent=2, ensure_ascii=False) + "\n```\n", LOOK),
    "json, fences": (
        "json",
        "Look:\n" + "\n".join(f"```json\n{json_call(*call)}\n```" for call in CALLS),
        LOOK,
    ),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>Well…<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
        + all_calls("", "", "", harmony_call),
        [Reasoning("Well…"), Content("Look:")],
    ),
}


def make(name: str) -> Parser:
    tools: Any = name
    return answer_parser(tools, "harmony" if name == "harmony" else "none", TOOLS)


def parse(parser: Parser, parts: list[str]) -> list[Piece]:
    return [*(piece for part in parts for piece in parser.push(part)), *parser.finish()]


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_responses_are_parsed_at_any_split(case: str) -> None:
    name, text, before = RECORDED[case]
    whole = joined(parse(make(name), [text]))
    calls = [piece for piece in whole if isinstance(piece, ToolCall)]
    assert whole == [*before, *calls]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
    for cut in range(len(text)):
        assert joined(parse(make(name), [text[:cut], text[cut:]])) == whole, text[:cut]
    assert joined(parse(make(name), list(text))) == whole


@pytest.mark.parametrize("case", RECORDED)
def test_arguments_are_streamed_in_parts(case: str) -> None:
    name, text, _ = RECORDED[case]
    # These calls are parsed only when they are complete.
    complete = name == "pythonic" or case in ("hermes, fences", "hermes, one fence")
    pieces = parse(make(name), list(text))
    parts = [piece for piece in pieces if isinstance(piece, Arguments)]
    assert (len(parts) > len(CODE)) != complete


@pytest.mark.parametrize("case", RECORDED)
def test_a_truncated_response_contains_its_first_calls(case: str) -> None:
    name, text, _ = RECORDED[case]
    for cut in range(len(text)):
        found = joined(parse(make(name), [text[:cut]]))
        calls = [piece for piece in found if isinstance(piece, ToolCall)]
        assert [call.name for call in calls] == [call[0] for call in CALLS[: len(calls)]]
        for call, (_, arguments) in zip(calls[:-1], CALLS, strict=False):
            assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("case", RECORDED)
def test_calls_of_tools_that_are_not_offered_stay_text(case: str) -> None:
    name, text, _ = RECORDED[case]
    tools: Any = name
    found = joined(parse(answer_parser(tools, "harmony" if name == "harmony" else "none", {"other": {}}), list(text)))
    assert not any(isinstance(piece, ToolCall) for piece in found)
    content = "".join(piece.text for piece in found if isinstance(piece, Content))
    assert content == text or name == "harmony"


FENCED_STOP = f"```json\n{json_call('stop', {})}\n```"

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=find>", "<parameter=q>", "</parameter>", "</function>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "find", "stop", "(", ")", "q=",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```", "```json",
    "json",
    "<|python_tag|>", "<|python_start|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "analysis",
    "to=functions.find", '{"name": "find", "arguments": {', '{"name": "find"', '"', "\\", "{", "}", "[", "]", ",", ";",
    " ", "\n", "\n\n", "a", "é", "<", "｜", "|>", "1", "'", "<think>", "</think>", "</", "<th", "ink>",
]  # fmt: skip


@pytest.mark.parametrize("name", [*TOOL_PARSERS, "none"])
@settings(max_examples=examples(30, stress=2000), deadline=None)
@given(data=st.data())
def test_any_split_of_the_stream_gives_the_same_result(name: str, data: st.DataObject) -> None:
    recorded = [text for kind, text, _ in RECORDED.values() if name in (kind, "none")]
    parts = st.sampled_from(FRAGMENTS) | st.sampled_from(recorded).flatmap(
        lambda text: st.integers(0, len(text)).map(lambda at: text[:at])
    )
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    thinks, begun = data.draw(st.booleans()) and name != "harmony", data.draw(st.booleans())
    tools: Any = name

    def parse_pieces(pieces: list[str]) -> list[Piece]:
        parser = answer_parser(tools, "think", TOOLS, thinking=begun) if thinks else make(name)
        return joined(parse(parser, pieces))

    whole = parse_pieces([text])
    assert parse_pieces([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    assert parse_pieces(list(text)) == whole
    for piece in whole:
        assert not isinstance(piece, ToolCall) or piece.name in TOOLS
    content = "".join(piece.text for piece in whole if isinstance(piece, Content))
    assert not thinks or "<think>" not in content
    assert name != "none" or thinks or content == text
    assert name != "hermes" or hermes_call(*FIND) not in content


CALL = hermes_call(*FIND)
FOUND = ToolCall("find", json.dumps(FIND[1]))


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
def test_reasoning_and_hermes_calls_are_separated(text: str, pieces: list[Piece]) -> None:
    assert joined(parse(answer_parser("hermes", "think", TOOLS), list(text))) == pieces


def test_reasoning_may_begin_in_the_prompt() -> None:
    parser = answer_parser("none", "think", None, thinking=True)
    assert joined(parse(parser, list("so\n</think>\nyes"))) == [Reasoning("so"), Content("yes")]
    assert ends_within_thinking("<|im_start|>assistant\n<think>\n")
    assert not ends_within_thinking("<think>\n\n</think>\n\n")
    assert ends_within_thinking("user: Who?\nassistant: <think>\nSo", "<think>\nSo")
    assert not ends_within_thinking("user: <think>\nassistant: <think>\nSo</think> I", "<think>\nSo</think> I")


def test_calls_are_content_if_no_tools_are_offered() -> None:
    assert joined(parse(answer_parser("hermes", "none", None), [CALL])) == [Content(CALL)]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("hermes", "<tool_call>no json</tool_call> b", [Content("<tool_call>no json</tool_call> b")]),
        ("hermes", 'a <tool_call>{"name": "x"}</tool_call>', [Content('a <tool_call>{"name": "x"}</tool_call>')]),
        ("hermes", "a < b, <tool", [Content("a < b, <tool")]),
        ("hermes", '<tool_call>{"arguments": {}, "name": "stop"}', [ToolCall("stop", "{}")]),
        ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"q\\": 1}"}', [ToolCall("find", '{"q": 1}')]),
        (
            "hermes",
            '<tool_call>a <tool_call>{"name": "stop", "arguments": {}}</tool_call>b',
            [Content("<tool_call>a"), ToolCall("stop", "{}"), Content("b")],
        ),
        (
            "hermes",
            f"<tool_call>{json_call('find', {'q': '</tool_call>'})}</tool_call>",
            [ToolCall("find", '{"q": "</tool_call>"}')],
        ),
        ("hermes", '<tool_call>{"name": "stop", "arguments": {}</tool_call>', [ToolCall("stop", "{}")]),
        ("hermes", FENCED_STOP, [ToolCall("stop", "{}")]),
        ("hermes", FENCED_STOP.removesuffix("```"), [ToolCall("stop", "{}")]),
        ("hermes", f"{FENCED_STOP}\n{hermes_call('stop', {})}", [ToolCall("stop", "{}"), ToolCall("stop", "{}")]),
        (
            "hermes",
            f"{hermes_call('stop', {})}\n{FENCED_STOP}",
            [ToolCall("stop", "{}"), Content(FENCED_STOP)],
        ),
        *(
            ("hermes", text, [Content(text)])
            for text in (
                '```json\n{"a": 1}\n```', "```json\n[1]\n```", FENCED_STOP.replace("json", "python"),
                FENCED_STOP.replace("stop", "other"), FENCED_STOP.replace("\n```", "\n{}\n```"),
                FENCED_STOP.replace("\n```", " is a call.\n```"), "```json\n" + json_call("find", {"x": 1}) + "\n```",
                "```json\n" + json_call("find", {"most": "3"}) + "\n```",
                "```json\n" + json_call("find", {"most": True}) + "\n```",
                '```json\n{"name": "stop"', "```json\n{}\n```",
            )
        ),
        ("llama3_json", "No { here", [Content("No { here")]),
        ("llama3_json", "[" * 5000, [Content("[" * 5000)]),
        ("llama3_json", "{" + '"a":{' * 5000, [Content("{" + '"a":{' * 5000)]),
        ("llama3_json", '{"name": "stop"} x', [ToolCall("stop", "{}"), Content("x")]),
        ("json", '```json\n{"a": 1}\n```', [Content('```json\n{"a": 1}\n```')]),
        ("json", "```python\nstop()\n```", [Content("```python\nstop()\n```")]),
        ("pythonic", "[1, 2]", [Content("[1, 2]")]),
        ("pythonic", "[find(q=x)]", [Content("[find(q=x)]")]),
        ("pythonic", "[stop(), other()]", [ToolCall("stop", "{}"), Content("other()]")]),
        ("mistral", "[TOOL_CALLS]none{}", [Content("[TOOL_CALLS]none{}")]),
        ("glm", "<tool_call>stop</tool_call> x", [ToolCall("stop", "{}"), Content("x")]),
        (
            "glm",
            "<tool_call>stop\n<arg_key>a</arg_key>\n<arg_value>True</arg_value>\n<arg_key>b</arg_key>"
            "<arg_value>x y</arg_value></tool_call>",
            [ToolCall("stop", '{"a": true, "b": "x y"}')],
        ),
        ("harmony", "<|channel|>final<|message|>Yes.<|return|>", [Content("Yes.")]),
        ("harmony", "<|channel|>final The answer is 42.", [Content("The answer is 42.")]),
        ("harmony", "<|channel|>analysis Well", [Reasoning("Well")]),
        ("harmony", "<|channel|>commentary to=functions.stop", []),
        ("harmony", "to be", [Content("to be")]),
        ("harmony", "to=be", [Content("to=be")]),
        (
            "harmony",
            " to=functions.stop<|channel|>commentary json<|message|>{}<|call|>",
            [ToolCall("stop", "{}")],
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            [Reasoning("a"), Content("b")],
        ),
    ],
)  # fmt: skip
def test_unusual_responses_are_parsed(name: str, text: str, pieces: list[Piece]) -> None:
    assert joined(parse(make(name), list(text))) == pieces


@pytest.mark.parametrize("name", ["enum", "type", "properties", "required"])
@pytest.mark.parametrize("entry", [None, 5, {"a": 1}])
def test_invalid_entries_of_a_tool_schema_are_ignored(name: str, entry: object) -> None:
    if (name, entry) != ("properties", {"a": 1}):
        assert fits_schema({"city": "Ulm"}, {"type": "object", name: entry})


def test_parsers_are_chosen_by_the_template() -> None:
    templates = {
        "hermes": "<tool_call> tools <think> </think>",
        "qwen3_coder": "<tool_call> <function= <parameter=",
        "glm": "<tool_call> <arg_key> </think>",
        "deepseek": "<｜tool▁calls▁begin｜>",
        "mistral": "[TOOL_CALLS]",
        "pythonic": "[func_name1(params_name1=",
        "llama3_json": '"parameters": x Environment: ipython',
        "harmony": "<|channel|> <|message|>",
        "json": "{{ tools }}",
    }
    assert {name: tool_parser("auto", template) for name, template in templates.items()} == {
        name: name for name in templates
    }
    assert {"auto", "none", *TOOL_PARSERS} == set(get_args(ToolParser))
    thinking = [name for name, text in templates.items() if reasoning_parser("auto", text) == "think"]
    assert thinking == ["hermes", "glm"] and reasoning_parser("auto", templates["harmony"]) == "harmony"
    assert (tool_parser("none", "<tool_call>"), reasoning_parser("none", "</think>")) == ("none", "none")
    assert needs_special_tokens("mistral", "none", offered=True)
    assert not needs_special_tokens("mistral", "none", offered=False)
    assert needs_special_tokens("none", "harmony", offered=False)
