"""Test that request bodies in which one value is random never cause an internal error.

`make stress PART=api` tests thousands of bodies.
"""

from __future__ import annotations

import copy
import json
import os
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CASES = 1500 if "OFFLOAD_RT_STRESS" in os.environ else 15

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"q": 1}'}}
SAMPLING: dict[str, Any] = {
    "model": "scripted", "temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "n": 1, "seed": 1, "stop": ["x"],
    "top_k": 3, "min_p": 0.1, "logit_bias": {"5": 1.5}, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "min_tokens": 1, "repetition_penalty": 1.1, "stop_token_ids": [1], "bad_words": ["a"],
    "allowed_token_ids": [5, 6], "ignore_eos": True,
    "include_stop_str_in_output": True, "stream": False, "stream_options": {"include_usage": True}, "user": "u",
    "structured_outputs": {"choice": ["a", "b"]},
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": SAMPLING | {
        "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "1", "tool_call_id": "1"},
        ],
        "tools": [TOOL], "tool_choice": "auto", "logprobs": True, "top_logprobs": 2,
        "response_format": {"type": "text"}, "chat_template_kwargs": {"x": 1},
    },
    "/v1/completions": SAMPLING | {"prompt": ["It was", "Dick"], "echo": True, "logprobs": 1, "best_of": 1},
    "/v1/responses": {
        "model": "scripted", "instructions": "i", "max_output_tokens": 5, "temperature": 1.0, "top_p": 1.0,
        "store": False,
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}], "tool_choice": "auto",
        "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "stream": False,
    },
    "/v1/messages": {
        "model": "scripted", "max_tokens": 5, "system": "s", "temperature": 1.0, "top_k": 5, "top_p": 0.9,
        "stream": False, "stop_sequences": ["x"], "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"q": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
        ],
    },
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip

EDGES = [
    None, True, "", "\x00", "\ud800", "x" * 5000, -1, 0, 2**31, 2**63, 10**400, -0.0, 1e-320, 1e308, float("nan"),
    float("inf"), [], {}, [[]], [None], {"type": "text"}, {"type": "function"}, "{{ 1 // 0 }}", [{"role": "user"}],
]  # fmt: skip
VALUES = st.sampled_from(EDGES) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def paths_in(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(place for key, inner in items for place in paths_in(inner, (*here, key)))]


def with_value_at(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(body)
    if not place:
        return value
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return found


@pytest.mark.parametrize("path", BODIES)
def test_valid_bodies_are_answered(http: httpx2.Client, path: str) -> None:
    answer = http.post(path, json=BODIES[path])
    assert answer.status_code == 200, answer.text
    described = http.get("/openapi.json").json()["paths"]
    assert path in described


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_one_random_value_causes_no_internal_error(http: httpx2.Client, path: str, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(paths_in(BODIES[path])))
    body = with_value_at(BODIES[path], place, data.draw(VALUES))
    if data.draw(st.booleans()) and isinstance(body, dict) and "stream" in body:
        body = body | {"stream": True}
    content = json.dumps(body).encode()
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        assert answer.status_code in (400, 404) and answer.json()["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert "internal error" not in answer.text, (body, answer.text)
