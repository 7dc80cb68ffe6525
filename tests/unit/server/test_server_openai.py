"""Test the server with OpenAI's client: sync, async and streaming."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import openai
import pytest
from support.serving import ScriptedEngine

from offload_rt.errors import InputError, LogitsError, PoolFullError, QueueFullError, StoreError
from offload_rt.server.chat_stream import Step
from offload_rt.server.metrics import Usage
from offload_rt.server.openai.completions import _merge_streams

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "Dick"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
ANSWERS = {
    "hello": "Good morning, “friend” and café.",
    "think": "<think>\nWell…\n</think>\n\nYes.",
    "call": f"Look: {CALL}",
    "snow": "A \N{SNOWMAN}\N{GRINNING FACE} café.",
}


def say(prompt: str) -> str:
    return next((text for word, text in ANSWERS.items() if f"user: {word}" in prompt), "It was a dark night.")


SERVER_OPTIONS = {"max_tokens_limit": 1000}


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def collect_stream(chunks: Any) -> tuple[dict[str, Any], Any]:
    """Return the fields of the streamed message, and the usage from the last chunk."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    usage, calls = None, dict[int, tuple[str, str]]()
    for chunk in chunks:
        usage = chunk.usage
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning_content"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
            for call in choice.delta.tool_calls or []:
                calls[call.index] = (
                    calls.get(call.index, ("", ""))[0] + (call.function.name or ""),
                    calls.get(call.index, ("", ""))[1] + call.function.arguments,
                )
            assert found["finish_reason"] is None
            found["finish_reason"] = choice.finish_reason
    found["tool_calls"] = list(calls.values())
    return found, usage


@pytest.mark.parametrize("word", ["hello", "think", "call"])
def test_streamed_answers_equal_complete_ones(client: openai.OpenAI, word: str) -> None:
    options: Any = {"model": "scripted", "messages": user(word), "tools": TOOLS}
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    found, usage = collect_stream(stream)
    assert found == {
        "content": message.content or "",
        "reasoning_content": (message.model_extra or {}).get("reasoning_content", ""),
        "tool_calls": [(call.function.name, call.function.arguments) for call in message.tool_calls or []],
        "finish_reason": whole.choices[0].finish_reason,
    }
    assert usage == whole.usage and usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // 2 > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_parsed_reasoning_and_tool_calls(client: openai.OpenAI) -> None:
    def ask(word: str, **more: Any) -> Any:
        return client.chat.completions.create(model="scripted", messages=user(word), **more).choices[0]

    assert ask("hello").message.content == ANSWERS["hello"]
    think = ask("think").message
    assert (think.content, think.model_extra["reasoning_content"]) == ("Yes.", "Well…")
    call = ask("call", tools=TOOLS)
    assert (call.message.content, call.finish_reason) == ("Look:", "tool_calls")
    assert json.loads(call.message.tool_calls[0].function.arguments) == {"q": "Dick"}
    assert ask("call").message.content == ANSWERS["call"]  # without tools, the text is not a tool call
    assert ask("call", tools=TOOLS, tool_choice="none").message.content == ANSWERS["call"]


def test_messages_with_tool_calls_are_rendered_by_the_template(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    seen: list[str] = []
    engine.say = lambda prompt: seen.append(prompt) or "ok"  # type: ignore[func-returns-value]
    calls = [{"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"q": "Joan"}'}}]
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        *user("Who?"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Joan Sedley"},
    ]
    client.chat.completions.create(model="scripted", messages=messages)
    engine.say = say
    assert seen == [
        "system: Be\nbrief.\nuser: Who?\nassistant: <tool_call>Joan</tool_call>\ntool: Joan Sedley\nassistant: "
    ]


def test_parameters_reach_the_engine(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    client.chat.completions.create(
        model="scripted", messages=user("x"), temperature=0.5, top_p=0.9, seed=3, n=2, stop="Z",
        max_completion_tokens=9,
        extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1},
    )  # fmt: skip
    got = engine.params
    assert (got.temperature, got.top_p, got.seed, got.n, tuple(got.stop), got.max_tokens) == (0.5, 0.9, 3, 2, ("Z",), 9)
    assert (got.top_k, got.min_p, got.repetition_penalty) == (7, 0.1, 1.1)
    client.chat.completions.create(model="scripted", messages=user("x"))
    assert engine.params.max_tokens == 1000  # limit set by the server
    client.chat.completions.create(model="scripted", messages=user("x"), max_tokens=100_000)
    assert engine.params.max_tokens == 1000
    assert engine.params.top_k == 11  # default set by the model


def test_several_choices_are_returned_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="scripted", messages=user("hello"), n=3, temperature=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {ANSWERS["hello"]}
    stream = client.chat.completions.create(model="scripted", messages=user("hello"), n=3, temperature=1, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [ANSWERS["hello"]] * 3


def test_several_greedy_choices_are_computed_once(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    options: Any = {"model": "scripted", "messages": user("hello"), "n": 2, "temperature": 0}
    whole = client.chat.completions.create(**options)
    assert engine.params.n == 1 and [choice.index for choice in whole.choices] == [0, 1]
    assert {choice.message.content for choice in whole.choices} == {ANSWERS["hello"]}
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert {chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason} == {0, 1}


def test_text_completions_accept_several_prompts_and_token_ids(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="scripted", prompt=["It", "Dick"], echo=True, max_tokens=100)
    assert [choice.text for choice in whole.choices] == ["ItIt was a dark night.", "DickIt was a dark night."]
    assert whole.usage is not None and whole.usage.completion_tokens % 2 == 0
    stream = client.completions.create(
        model="scripted", prompt=["It", "Dick"], echo=True, max_tokens=100, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and usage == whole.usage
    ids = client.completions.create(model="scripted", prompt=[5, 6, 7], max_tokens=2)
    assert ids.usage is not None and (ids.usage.prompt_tokens, ids.usage.completion_tokens) == (3, 2)
    assert ids.choices[0].finish_reason == "length"


def test_the_last_step_of_merged_streams_counts_all_tokens() -> None:
    async def steps(count: int) -> AsyncGenerator[Step, None]:
        for generated in range(1, count + 1):
            yield Step(0, [], [], None, None, None, Usage(generated=generated))
            await asyncio.sleep(0)  # the second step of one stream overtakes the first step of the other

    async def merged() -> list[tuple[int, int]]:
        return [(step.index, step.usage.generated) async for step in _merge_streams([steps(2), steps(1)], 1)]

    assert asyncio.run(merged()) == [(0, 1), (0, 2), (1, 3)]


def test_logprobs_are_returned_and_streamed(client: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": user("hello"), "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    assert "".join(entry.token for entry in whole).startswith("Good morning")
    assert [one.logprob for one in whole[0].top_logprobs] == [-0.5, -9999.0]
    assert bytes(whole[0].bytes).decode() == whole[0].token
    streamed = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole
    found = client.completions.create(model="scripted", prompt="It", logprobs=1, max_tokens=100).choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert "".join(found.tokens) == "It was a dark night."
    assert found.text_offset[1] == len(found.tokens[0]) and not any(map(math.isinf, found.token_logprobs or []))


def test_logprobs_have_the_bytes_and_positions_of_parts_of_characters(client: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "messages": user("snow"), "logprobs": True}
    entries = client.chat.completions.create(**options).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == ANSWERS["snow"]
    asked: Any = {"model": "scripted", "prompt": "user: snow", "logprobs": 1, "max_tokens": 100}
    whole = client.completions.create(**asked).choices[0]
    text, before, starts = whole.text, b"", []
    assert text == ANSWERS["snow"] and whole.logprobs is not None
    for entry in entries:
        starts.append(len(before.decode(errors="ignore")))
        before += bytes(entry.bytes)
    assert whole.logprobs.text_offset == starts and len(starts) > len(text)
    streamed = client.completions.create(**asked, stream=True)
    chunks = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [start for chunk in chunks for start in chunk.text_offset or ()] == starts


def test_endpoints_for_models_tokens_load_and_metrics(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").id == "scripted"
    with httpx2.Client(base_url=url) as http:
        made = http.post("/tokenize", json={"prompt": "It was a dark night.", "return_token_strs": True}).json()
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 4096
        assert "dark night" in http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"]
        chat = http.post("/tokenize", json={"messages": user("hello"), "add_generation_prompt": False}).json()
        text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
        assert text == "user: hello\n"
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/v1/load").json()["h2d_bytes"] == 7
        lines = http.get("/metrics").text.splitlines()
        for name in ("num_requests_running", "kv_cache_usage_perc", "prompt_tokens_cached_total", "h2d_bytes_total"):
            assert any(line.startswith(f'offload_rt_{name}{{model_name="scripted"}}') for line in lines), name
        first = next(line for line in lines if line.startswith("offload_rt_time_to_first_token_seconds_count"))
        assert float(first.split()[-1]) >= 1


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({}, "messages", "required"),
        ({"messages": user("x"), "temperature": "0.5"}, "temperature", "number"),
        ({"messages": user("x"), "temperature": True}, "temperature", "number"),
        ({"messages": user("x"), "max_tokens": 0}, "max_tokens", "greater"),
        ({"messages": user("x"), "seed": 10**30}, "seed", "less"),
        ({"messages": user("x"), "bad_words": ["x"] * 1001}, "bad_words", "at most 1000"),
        ({"messages": user("x"), "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"messages": user("x"), "logit_bias": {"a": 1}}, "logit_bias", "not a token id"),
        ({"messages": user("x"), "tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"messages": user("x"), "chat_template_kwargs": {"chat_template": "x"}}, None, "only variables"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0", "send text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content.str", "string"),
        ({"messages": user("x" * 20_000)}, None, "maximum context length"),
    ],
)  # fmt: skip
def test_bad_input_is_400_in_openais_format(client: openai.OpenAI, body: Any, param: str | None, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    error: Any = caught.value.body
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param


def test_invalid_json_and_unknown_paths_are_refused(client: openai.OpenAI, url: str) -> None:
    with httpx2.Client(base_url=url) as http:
        json_type = {"content-type": "application/json"}
        surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        bad = (b"{", b"\xff", b"[]", b"5", b"", surrogate, b"[" * 100_000)
        for body in bad:
            for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
                answer = http.post(path, content=body, headers=json_type)
                assert answer.status_code == 400 and answer.json()["error"]["message"], (path, body[:20])
        assert http.post("/v1/chat/completions", content=b"{}").status_code == 400  # the content type is not JSON
        assert http.get("/v1/nothing").status_code == 404 and http.get("/v1/nothing").json()["error"]["message"]
        assert http.get("/v1/chat/completions").status_code == 405
        assert http.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    with pytest.raises(openai.NotFoundError, match="'gpt'"):
        client.chat.completions.create(model="gpt", messages=user("x"))
    with pytest.raises(openai.BadRequestError, match="embeddings are not supported"):
        client.embeddings.create(model="scripted", input="x")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (QueueFullError("the queue is full"), 429, "queue"),
        (InputError("too long"), 400, "too long"),
        (PoolFullError("no chunk"), 400, "no chunk"),
        (LogitsError("no numbers"), 500, "no numbers"),
        (RuntimeError("a secret of ours"), 500, "internal error"),
        (StoreError("/a/folder/of/ours is full"), 500, "internal error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_engine_have_their_status_code(
    url: str, engine: ScriptedEngine, error: Exception, status: int, message: str, stream: bool
) -> None:
    engine.fails = error
    try:
        answer = httpx2.post(f"{url}/v1/chat/completions", json={"messages": user("x"), "stream": stream})
    finally:
        engine.fails = None
    assert answer.status_code == status and message in answer.json()["error"]["message"]
    assert (answer.headers.get("retry-after") is not None) == (status == 429)
