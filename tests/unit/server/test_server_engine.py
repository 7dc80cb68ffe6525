"""Test the server with a real engine: concurrent clients get the same text as a single client, and memory is freed."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.faults import fault
from support.serving import TEMPLATE, run_server, wait_until
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM, SamplingParams
from offload_rt.engine.runner import Runner
from offload_rt.server.conversation import MAX_CALLS

WORDS = ("Dick", "Joan", "a dark night", "the river", "Sir Daniel", "arrows", "bread", "forest")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncLLM:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=2)
    llm = LLM(folder, policy="full", verify="off", host_memory="32MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    return AsyncLLM(llm, max_waiting=64)


def text_without_server(engine: AsyncLLM, i: int) -> str:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=i)
    prompt = f"user: {WORDS[i % 8]} {i}\nassistant: "
    ids = engine.llm.tokenizer(prompt, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    return engine.llm.generate(ids, params)[0].outputs[0].text


def test_concurrent_clients_get_their_own_text(url: str, engine: AsyncLLM) -> None:
    expected = [text_without_server(engine, i) for i in range(16)]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        messages: Any = [{"role": "user", "content": f"{WORDS[i % 8]} {i}"}]
        asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 12, "seed": i}
        if i % 2:
            return (await client.chat.completions.create(**asked)).choices[0].message.content or ""
        stream = await client.chat.completions.create(**asked, stream=True)
        return "".join([block.choices[0].delta.content or "" async for block in stream])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    assert asyncio.run(all_at_once()) == expected
    assert len(set(expected)) > 8


def test_a_disconnected_client_frees_its_memory(url: str, engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps are slow, so that the answer is incomplete when the test reads the load.
    decode = Runner.decode
    monkeypatch.setattr(Runner, "decode", lambda runner, batch: (time.sleep(0.005), decode(runner, batch))[1])
    asked = {"prompt": "Dick", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx2.stream("POST", f"{url}/v1/completions", json=asked) as answer:
        lines = answer.iter_lines()  # freeing the iterator closes the response
        assert next(lines).startswith("data: ")
        wait_until(lambda: engine.load().running == 1)  # the load is that of the last completed step
    # The engine thread dequeues the request before it releases the blocks, so the load must be polled.
    wait_until(lambda: (engine.load().running, engine.load().pool_used_bytes) == (0, 0))


def test_an_unexpected_error_is_a_500_for_only_one_client(
    url: str, engine: AsyncLLM, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(client: httpx2.AsyncClient, i: int) -> httpx2.Response:
        asked = {"messages": [{"role": "user", "content": f"{WORDS[i]} {i}"}], "max_tokens": 12, "seed": i}
        return await client.post(f"{url}/v1/chat/completions", json=asked)

    async def send_both() -> list[httpx2.Response]:
        async with httpx2.AsyncClient() as client:
            return await asyncio.gather(*(ask(client, i) for i in range(2)))

    with fault(engine.llm, "sample", 3, AssertionError("an invariant is broken")):
        answers = asyncio.run(send_both())
    answers += asyncio.run(send_both())
    assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 500]
    for i, answer in enumerate(answers):
        body = answer.json()
        if answer.status_code == 200:
            assert body["choices"][0]["message"]["content"] == text_without_server(engine, i % 2)
        else:
            assert "invariant" not in body["error"]["message"]
    assert any(record.exc_info and record.exc_info[0] is AssertionError for record in caplog.records)


def test_error_messages_reveal_no_folders_of_the_server(url: str, engine: AsyncLLM) -> None:
    for wrong in ({"prompt": [5000]}, {"prompt": []}, {"prompt": ""}, {"prompt": "x" * 20_000}):
        answer = httpx2.post(f"{url}/v1/completions", json=wrong)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and message and engine.llm.name not in message, wrong


def test_more_prompts_than_can_wait_are_refused(engine: AsyncLLM) -> None:
    small = LLM(engine.llm.name, policy="full", verify="off", host_memory="8MiB")
    with run_server(AsyncLLM(small, max_waiting=2), max_waiting=2) as url:
        for count, status in ((2, 200), (3, 400)):
            answer = httpx2.post(f"{url}/v1/completions", json={"prompt": ["It"] * count, "max_tokens": 2})
            assert answer.status_code == status
    assert answer.json()["error"]["param"] == "prompt" and "--max-waiting" in answer.json()["error"]["message"]


def test_an_answer_ends_when_host_memory_is_full(engine: AsyncLLM) -> None:
    # Host memory has room for 128 of the 4,096 positions of the model.
    limited = LLM(engine.llm.name, policy="full", verify="off", host_memory="128KiB")
    limited.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    with run_server(AsyncLLM(limited)) as url:
        assert httpx2.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 128
        asked: Any = {"messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "ignore_eos": True}
        answer = httpx2.post(f"{url}/v1/chat/completions", json=asked).json()
        assert answer["usage"]["total_tokens"] == 128 and answer["choices"][0]["finish_reason"] == "length"
        capped = httpx2.post(f"{url}/v1/chat/completions", json=asked | {"max_tokens": 200}).json()
        assert capped["usage"]["total_tokens"] == 128 and capped["choices"][0]["finish_reason"] == "length"
        more = {"messages": [{"role": "user", "content": "Dick and Joan. " * 50}]}
        assert httpx2.post(f"{url}/v1/chat/completions", json=asked | more).json()["error"]["code"] == "pool_full"


SCHEMA = {
    "type": "object",
    "properties": {"who": {"enum": ["Dick", "Joan"]}, "old": {"type": "boolean"}},
    "required": ["who", "old"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_an_answer_follows_a_schema(url: str, path: str) -> None:
    schema = {"name": "person", "schema": SCHEMA}
    if path.endswith("responses"):
        asked: Any = {"input": "Who?", "text": {"format": {"type": "json_schema", **schema}}, "max_output_tokens": 60}
        answer = httpx2.post(url + path, json=asked).json()["output"][0]["content"][0]["text"]
    else:
        asked = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 60, "seed": 1}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
        whole, text = httpx2.post(url + path, json=asked).json(), ""
        answer = whole["choices"][0]["message"]["content"]
        for line in httpx2.post(url + path, json=asked | {"stream": True}).text.splitlines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        assert text == answer
    assert json.loads(answer)["who"] in ("Dick", "Joan")


def test_required_tool_calls_follow_their_schema(url: str) -> None:
    # A reference to a local definition, in the form that pydantic writes.
    whole = {"type": "object", "properties": {"who": {"$ref": "#/$defs/Name"}}, "$defs": {"Name": {"enum": ["Dick"]}}}
    tools: Any = [
        {
            "type": "function",
            "function": {"name": "find", "parameters": whole | {"required": ["who"], "additionalProperties": False}},
        },
        {"type": "function", "function": {"name": "lose", "parameters": SCHEMA}},
    ]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "tools": tools, "seed": 2}
        find, lose = ({"type": "function", "function": {"name": name}} for name in ("find", "lose"))
        for choice, names in (("required", {"find", "lose"}), (lose, {"lose"}), (find, {"find"})):
            got = client.chat.completions.create(**asked, tool_choice=choice, max_tokens=1000).choices[0]
            calls: Any = got.message.tool_calls
            assert got.finish_reason == "tool_calls" and 1 <= len(calls) <= (MAX_CALLS if choice == "required" else 1)
            for call in calls:
                assert call.function.name in names and json.loads(call.function.arguments)["who"] in ("Dick", "Joan")
        once = client.chat.completions.create(
            **asked, tool_choice="required", parallel_tool_calls=False, response_format={"type": "json_object"}
        )
        assert len(once.choices[0].message.tool_calls or ()) == 1
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**asked, response_format=bad)


def test_a_template_without_tools_supports_required_calls(tmp_path: Path) -> None:
    llm = LLM(tiny_checkpoint(tmp_path / "tiny", "llama", head_dim=32), policy="full", verify="off")
    llm.tokenizer.chat_template = (  # type: ignore[union-attr]
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "Who?"}], "tools": [tool], "tool_choice": "required"}
    with run_server(AsyncLLM(llm)) as url:
        for stream in (False, True):
            asked = body | {"temperature": 0, "n": 2, "max_tokens": 600, "stream": stream}
            answer = httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
            if not stream:
                first, second = (choice["message"]["tool_calls"] for choice in answer.json()["choices"])
                arguments = [call["function"]["arguments"] for call in first]
                assert arguments == [call["function"]["arguments"] for call in second]
                continue
            parts: dict[tuple[int, int], str] = {}
            for line in answer.text.splitlines():
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    for call in choice["delta"].get("tool_calls", ()):
                        key = choice["index"], call["index"]
                        parts[key] = parts.get(key, "") + call["function"]["arguments"]
            assert parts == {(i, number): text for i in range(2) for number, text in enumerate(arguments)}
    assert arguments and all(json.loads(text)["who"] in ("Dick", "Joan") for text in arguments)


def test_echo_returns_logprobs_of_the_prompt(url: str) -> None:
    asked = {"prompt": "It was a dark \N{SNOWMAN} night", "max_tokens": 5, "seed": 1, "logprobs": 2}
    plain, echoed = (
        httpx2.post(f"{url}/v1/completions", json=asked | {"echo": echo}).json()["choices"][0] for echo in (False, True)
    )
    found, before = plain["logprobs"], echoed["logprobs"]
    assert len(found["tokens"]) == 5 and len(before["tokens"]) > 5
    assert before["tokens"].count("\ufffd") >= 3 and before["text_offset"][1] == len(before["tokens"][0])
    places = zip(before["tokens"], before["text_offset"], strict=True)
    assert all(echoed["text"].startswith(token, at) for token, at in places if "\ufffd" not in token)
    assert before["token_logprobs"][0] is None and before["tokens"][-5:] == found["tokens"]
    assert before["token_logprobs"][-5:] == pytest.approx(found["token_logprobs"], abs=1e-4)
    assert all(value <= 0 for value in before["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"])
    (_, *tokens), (_, *tops) = before["tokens"], before["top_logprobs"]
    assert all(token in top for token, top in zip(tokens, tops, strict=True))
