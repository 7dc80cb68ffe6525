"""Test details that the protocols do not specify, such as unknown fields, model names and unsupported features."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import openai
import pytest
from support.serving import ScriptedEngine, claude_client, reference_tokenizer, run_server
from transformers import PreTrainedTokenizerBase

PLAIN = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template without tools."""

FIND: Any = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}
USER = {"role": "user", "content": "Who?"}


class FixedAnswer:
    """Answer function that returns a fixed text for every prompt and records the prompts."""

    def __init__(self, text: str) -> None:
        self.text, self.prompts = text, list[str]()

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.text


say = FixedAnswer("Yes.")
SERVER_OPTIONS = {"served_model_names": ("first", "second")}


def test_several_or_any_model_names_are_accepted(http: httpx2.Client, engine: ScriptedEngine) -> None:
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["first", "second"]
    for path, body in (
        ("chat/completions", {"messages": [USER]}),
        ("completions", {"prompt": "x"}),
        ("responses", {"input": "x"}),
        ("messages", {"messages": [USER], "max_tokens": 5}),
    ):
        for name in ("first", "second"):
            assert http.post(f"/v1/{path}", json=body | {"model": name}).json()["model"] == name
        answer = http.post(f"/v1/{path}", json=body | {"model": "third"})
        assert answer.status_code == 404 and "'first' and 'second'" in answer.text
    with run_server(engine, accept_any_model=True) as url:
        body = {"messages": [USER], "model": "gpt-5"}
        assert httpx2.post(f"{url}/v1/chat/completions", json=body).json()["model"] == "gpt-5"


def test_unknown_fields_are_reported(http: httpx2.Client) -> None:
    body = {"messages": [USER]}
    plain = http.post("/v1/chat/completions", json=body | {"prompt_cache_key": "x", "user": "u", "metadata": {}})
    assert plain.status_code == 200 and "x-ignored-fields" not in plain.headers
    warned = http.post("/v1/chat/completions", json=body | {"verbosity": "low", "unknown": {"x": 1}, "a\nb": 1})
    assert warned.status_code == 200 and warned.headers["x-ignored-fields"] == "verbosity, unknown"
    count = {"messages": [USER], "max_tokens": 5, "n": "five", "thinking": {}}  # a field of another protocol
    assert http.post("/v1/messages", json=count).headers["x-ignored-fields"] == "n, thinking"
    refused = http.post("/v1/chat/completions", json=body | {"guided_json": {}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "guided_json"
    assert "structured_outputs" in refused.json()["error"]["message"]
    assert http.post("/v1/chat/completions", json=body | {"functions": None}).status_code == 200


def test_responses_have_the_sampling_parameters_of_completions(http: httpx2.Client, engine: ScriptedEngine) -> None:
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.25}
    given = {"seed": 3, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True} | penalties
    answer = http.post("/v1/responses", json={"input": "x", "stop": "END"} | given)
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers
    assert {name: getattr(engine.params, name) for name in given} == given and engine.params.stop == ("END",)
    assert {name: answer.json()[name] for name in penalties} == penalties


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/chat/completions", "add /v1 to the end"),
        ("/messages", "add /v1 to the end"),
        ("/v1/v1/messages", "remove /v1"),
        ("/api/generate", "are under /v1"),
    ],
)
def test_unknown_paths_get_a_hint(http: httpx2.Client, path: str, message: str) -> None:
    answer = http.post(path, json={})
    assert answer.status_code == 404 and message in answer.json()["error"]["message"]


def test_input_items_are_listed_and_can_be_sent_back(http: httpx2.Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "find", "arguments": '{"q": "Dick"}'}
    result = {"type": "function_call_output", "call_id": "c", "output": "Richard"}
    asked: Any = [{"role": "user", "content": "Who?"}, call, result]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        made = client.responses.create(model="first", input=asked)
        items = list(client.responses.input_items.list(made.id, order="asc", limit=2))  # in pages of two
        assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
        assert [item.id for item in client.responses.input_items.list(made.id)] == [item.id for item in items][::-1]
        back = [item.model_dump(exclude_none=True) for item in items]
        again = client.responses.create(model="first", input=back)  # type: ignore[arg-type]
        assert again.usage is not None and made.usage is not None
        assert again.usage.input_tokens == made.usage.input_tokens
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(made.id, after="x")


def test_fill_in_the_middle_needs_special_tokens() -> None:
    tokenizer = reference_tokenizer()
    engine = ScriptedEngine(tokenizer, say)
    with run_server(engine) as url:
        answer = httpx2.post(f"{url}/v1/completions", json={"prompt": "a", "suffix": "b"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "suffix"
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    with run_server(engine) as url:
        body = {"prompt": "def f():", "suffix": "\n    return x", "stop_token_ids": [3], "stream": False}
        assert httpx2.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"] == "Yes."
        assert say.prompts[-1] == "<|fim_prefix|>def f():<|fim_suffix|>\n    return x<|fim_middle|>"
        stops = set(tokenizer.convert_tokens_to_ids(marks))
        assert stops | {3} <= set(engine.params.stop_token_ids)
        assert httpx2.post(f"{url}/v1/completions", json=body | {"prompt": [1]}).status_code == 400


# ------------------------------------------------------------------------------- a template that has no tools


def plain_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = reference_tokenizer()
    tokenizer.chat_template = PLAIN
    return tokenizer


CALLS = '[{"name": "find", "arguments": {"q": "Dick"}}, {"name": "find", "arguments": {"q": "Joan"}}]'


def test_tools_are_described_if_the_template_has_none() -> None:
    answer_with_calls = FixedAnswer(CALLS)
    engine = ScriptedEngine(plain_tokenizer(), answer_with_calls)
    with run_server(engine) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "scripted", "tools": [FIND]}
        system: Any = {"role": "system", "content": "Be brief."}
        for choice in ("auto", "required"):
            found = client.chat.completions.create(messages=[system, USER], tool_choice=choice, **asked).choices[0]
            assert [json.loads(call.function.arguments)["q"] for call in found.message.tool_calls] == ["Dick", "Joan"]
            assert found.finish_reason == "tool_calls"
            assert (engine.params.structured_outputs is not None) == (choice == "required")
        assert (
            answer_with_calls.prompts[-1].startswith("system: Be brief.\n\nYou may call tools.")
            and '"find"' in answer_with_calls.prompts[-1]
        )
        one = client.chat.completions.create(messages=[USER], parallel_tool_calls=False, **asked).choices[0]  # type: ignore[list-item]
        assert len(one.message.tool_calls or ()) == 1

        history: Any = [USER, found.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": c.id, "content": "Yes"} for c in found.message.tool_calls]
        client.chat.completions.create(messages=history, **asked)
        results = "user: Result of find:\nYes\n\nResult of find:\nYes\nassistant: "
        assert answer_with_calls.prompts[-1].endswith(f"user: Who?\nassistant: {CALLS}\n{results}")

        tool: Any = {"name": "find", "input_schema": {"type": "object"}}
        with claude_client(url) as claude:
            options: Any = {"model": "scripted", "max_tokens": 100, "tools": [tool], "messages": [USER]}
            with claude.messages.stream(tool_choice={"type": "any"}, **options) as stream:
                blocks = stream.get_final_message().content
            assert [block.input for block in blocks if block.type == "tool_use"] == [{"q": "Dick"}, {"q": "Joan"}]
            once: Any = {"type": "any", "disable_parallel_tool_use": True}
            claude.messages.create(tool_choice=once, **options)
            schema: Any = engine.params.structured_outputs
            assert "anyOf" in schema.json and "items" not in schema.json


def test_truncated_arguments_can_be_sent_back(http: httpx2.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"q": "Di'}}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "?"},
    ]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert "<tool_call>Di</tool_call>" in say.prompts[-1]
    call["function"]["arguments"] = "Di"  # type: ignore[index]
    assert http.post("/v1/chat/completions", json={"messages": messages}).status_code == 400


@pytest.mark.parametrize("field", ["tool_call_id", "id"])
def test_tool_call_ids_must_be_strings_if_the_template_has_no_tools(field: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "c", "content": "?"}
    (result if field == "tool_call_id" else call)[field] = ["c"]
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, result]
    with run_server(ScriptedEngine(plain_tokenizer(), say)) as url:
        answer = httpx2.post(f"{url}/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [CALLS[:12], CALLS[:20], CALLS[:-20]])
def test_truncated_forced_calls_leave_no_content(text: str, stream: bool) -> None:
    flat = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    bodies: dict[str, Any] = {
        "chat/completions": {"messages": [USER], "tools": [FIND], "tool_choice": "required"},
        "responses": {"input": "x", "tools": [flat], "tool_choice": "required"},
        "messages": {
            "messages": [USER],
            "max_tokens": 100,
            "tools": [{"name": "find", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any"},
        },
    }
    with run_server(ScriptedEngine(reference_tokenizer(), lambda prompt: text)) as url:
        for path, body in bodies.items():
            answer = httpx2.post(f"{url}/v1/{path}", json=body | {"stream": stream}).text
            assert not re.findall(r'"(?:content|text)": ?"[^"]+', answer), path
            assert ("call_" in answer or "toolu_" in answer) == ("Dick" in text), path  # the id of a call


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_tool_calls_are_returned_in_every_protocol(stream: bool) -> None:
    text = '<tool_call>\n{"name": "find", "arguments": {"q": "' + "Dick and Joan " * 30
    engine = ScriptedEngine(reference_tokenizer(), lambda prompt: text)
    tool: Any = {"name": "find", "input_schema": {"type": "object"}}
    flat: Any = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    with run_server(engine) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            options: Any = {"model": "scripted", "messages": [USER], "tools": [FIND], "max_tokens": 60}
            whole: Any = client.chat.completions.create(**options, stream=stream)
            if stream:
                deltas = [choice for chunk in whole for choice in chunk.choices]
                calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
                assert {call.index for call in calls} == {0} and [call.id for call in calls[1:]] == [None] * (
                    len(calls) - 1
                )
                reason, arguments = deltas[-1].finish_reason, "".join(call.function.arguments for call in calls)
            else:
                [choice] = whole.choices
                reason, arguments = choice.finish_reason, choice.message.tool_calls[0].function.arguments
            assert reason == "length" and arguments.startswith('{"q": "Dick and Joan')
            made: Any = client.responses.create(
                model="scripted", input="x", tools=[flat], max_output_tokens=60, stream=stream
            )
            response = list(made)[-1].response if stream else made
            assert response.status == "incomplete" and response.output[0].arguments.startswith('{"q": "Dick')
        with claude_client(url) as claude:
            asked: Any = {"model": "scripted", "max_tokens": 60, "tools": [tool], "messages": [USER]}
            if stream:
                with claude.messages.stream(**asked) as events:
                    message = events.get_final_message()
            else:
                message = claude.messages.create(**asked)
            [block] = message.content
            assert message.stop_reason == "max_tokens" and block.type == "tool_use" and block.name == "find"
            # The client itself drops the incomplete string of a stream.
            assert stream or block.input["q"].startswith("Dick and")  # type: ignore[index]
