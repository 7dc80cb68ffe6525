"""Test sessions and stored responses: restarts, deletion, isolation of API keys, traces, and policies of requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.serving import TEMPLATE, ScriptedEngine, run_server, wait_until
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt
from transformers import PreTrainedTokenizerBase

from offload_rt import LLM, AsyncLLM, SamplingParams
from offload_rt.errors import PoolFullError
from offload_rt.server.engines import Engines
from offload_rt.server.options import ServerOptions

ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
LONG = "It was a dark night, and the river was high. " * 12
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=2)
    return folder


@contextmanager
def serving(
    model: Path, store: Path | None, policy: str = "full", **options: Any
) -> Iterator[tuple[httpx2.Client, AsyncLLM]]:
    """Load the model and serve it, as a new process would. Sessions are stored in `store` if it is given."""
    llm = LLM(model, policy=policy, verify="off", host_memory="32MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    engine = AsyncLLM(llm, store=store)
    given = {"api_keys": ("one", "two"), "documents": None if store is None else store / "server"} | options
    with run_server(engine, **given) as url, httpx2.Client(base_url=url, headers=ONE, timeout=60) as http:
        yield http, engine


def ask(http: httpx2.Client, **more: Any) -> Any:
    answer = http.post("/v1/chat/completions", json=ASK | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_session_is_restored_from_disk_only_for_its_api_key(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (http, _):
        first = ask(http, session="novel")
        answer = first["choices"][0]["message"]["content"]
        [listed] = http.get("/v1/sessions").json()["data"]
        assert listed["id"] == "novel" and listed["title"].startswith("It was a dark") and listed["turns"] == 1
    with serving(model, tmp_path) as (http, engine):  # a restarted server has no KV in memory
        kept = http.get("/v1/sessions/novel").json()["messages"]
        assert [message["role"] for message in kept] == ["user", "assistant"] and kept[1]["content"] == answer
        more = ask(http, session="novel", messages=[*kept, {"role": "user", "content": "Go on."}])
        usage = more["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 64 > 100
        assert engine.load().disk_hit_tokens > 100 and engine.load().store_bytes > 0
        assert 'tier="disk"' in http.get("/metrics").text
        alone = ask(http, messages=[*kept, {"role": "user", "content": "Go on."}])
        assert alone["choices"] == more["choices"], "KV from disk gives the same answer as computed KV"
        # Another key finds no session, even under the same name.
        assert http.get("/v1/sessions", headers=TWO).json()["data"] == []
        for method in ("GET", "DELETE"):
            refused = http.request(method, "/v1/sessions/novel", headers=TWO)
            assert refused.status_code == 404 and refused.json()["error"]["code"] == "session_not_found"
        other = http.post("/v1/chat/completions", json=ASK | {"session": "novel"}, headers=TWO)
        assert other.status_code == 200
        assert len(http.get("/v1/sessions/novel").json()["messages"]) == 4
        assert http.delete("/v1/sessions/novel").status_code == 200
        assert http.get("/v1/sessions/novel").status_code == 404
        wait_until(lambda: len([*tmp_path.glob("*/*.doc")]) == 1)  # the file of the other key
        assert len([*tmp_path.glob("server/conversations/*")]) == 1


def test_a_response_is_continued_after_a_restart(model: Path, tmp_path: Path) -> None:
    asked: Any = {"model": "tiny", "max_output_tokens": 6, "temperature": 0}
    with serving(model, tmp_path) as (http, _), openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="one") as client:
        first = client.responses.create(input=LONG, **asked)
    with serving(model, tmp_path) as (http, engine):
        with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="one", max_retries=0) as client:
            second = client.responses.create(input="Go on.", previous_response_id=first.id, **asked)
            assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 100
            assert engine.load().disk_hit_tokens > 100
            branch = client.responses.create(input="Go back.", previous_response_id=first.id, **asked)
            assert branch.usage is not None and branch.usage.input_tokens_details.cached_tokens > 100
            with ThreadPoolExecutor(8) as threads:  # no request may find the session busy
                on = asked | {"input": "Go on.", "previous_response_id": first.id}
                at_once = [threads.submit(client.responses.create, **on) for _ in range(16)]
                assert {answer.result().output_text for answer in at_once} == {second.output_text}
            assert client.responses.retrieve(first.id).output_text == first.output_text
            client.responses.delete(first.id)
            for gone in (first.id, "resp_../../x"):
                with pytest.raises(openai.NotFoundError):
                    client.responses.create(input="x", previous_response_id=gone, **asked)
        with (
            openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="two", max_retries=0) as other,
            pytest.raises(openai.NotFoundError),
        ):
            other.responses.create(input="x", previous_response_id=second.id, **asked)


def test_a_session_of_text_completions_is_deleted(model: Path, tmp_path: Path) -> None:
    """The server stores no messages of text completions. Only the engine stores the session."""
    with serving(model, tmp_path) as (http, engine):
        asked = {"prompt": LONG, "max_tokens": 4, "session": "novel"}
        assert http.post("/v1/completions", json=asked).status_code == 200
        assert http.delete("/v1/sessions/novel", headers=TWO).status_code == 404
        assert http.delete("/v1/sessions/novel").json()["deleted"]
        assert engine.llm.runner.pool.sequence_bytes == 0
        assert http.delete("/v1/sessions/novel").status_code == 404
    assert not list(tmp_path.rglob("session-*"))


def test_a_response_of_a_disconnected_client_leaves_no_session(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (http, engine):
        asked = {"input": LONG, "max_output_tokens": 3000, "stream": True}
        with http.stream("POST", "/v1/responses", json=asked) as answer:
            assert next(answer.iter_lines()).startswith("event: response.created")
        wait_until(lambda: engine.llm.runner.pool.sequence_bytes == 0)
    assert not list(tmp_path.rglob("session-*"))


def test_requests_are_traced(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, policy="infinigen") as (http, _):
        answer = http.post("/v1/chat/completions", json=ASK | {"stream": True, "trace": True, "max_tokens": 5})
        blocks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        head, *steps = [block["trace"] for block in blocks if "trace" in block]
        assert "".join(head["bins"]) == f"user: {LONG}\nassistant: "
        assert (head["policy"], head["layers"], head["bin_tokens"]) == ("infinigen", 2, 1)
        assert len(head["bins"]) == head["prompt_tokens"]
        attended = [share for step in steps for share in step["attended"]]
        assert len(attended) == 4 and all(len(layers) == 2 and 0 < min(layers) <= 1 for layers in attended)
        assert all((share == 1) == (layer in head["dense_layers"]) for layer, share in enumerate(attended[0]))
        assert steps[-1]["prefill"] == [2, 2] and steps[-1]["h2d_bytes"] > 0
        assert [step["h2d_bytes"] for step in steps] == sorted(step["h2d_bytes"] for step in steps)
        total = [sum(counts) for counts in zip(*(step["selected"] for step in steps if step["selected"]), strict=True)]
        assert sum(total) > 0 and not any(total[: head["sinks"]]), "resident tokens are not selected"
        plain = http.post("/v1/chat/completions", json=ASK | {"stream": True})
        assert "trace" not in plain.text
        for wrong in ({"trace": True}, {"exact": True}, {"policy": "full"}, {"policy_options": {"alpha": 1}}):
            assert http.post("/v1/chat/completions", json=ASK | wrong).status_code == 400, wrong


def test_a_request_names_its_policy(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, max_engines=2) as (http, engine):
        [listed] = http.get("/v1/models").json()["data"]
        assert listed["policy"] == "full" and {"full", "infinigen"} < set(listed["policies"])
        expected = ask(http)
        for policy in ("streaming", "full"):  # the second engine replaces the first
            found = ask(http, policy=policy)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, "the policies share cached prompts"
            traced = http.post("/v1/chat/completions", json=ASK | {"policy": policy, "trace": True, "stream": True})
            assert f'"trace":{{"policy":"{policy}"' in traced.text
        assert found["choices"] == expected["choices"]
        tokens = http.get("/v1/load").json()["generated_tokens"]
        assert tokens == 30 > engine.load().generated_tokens == 6, "tokens of closed engines are counted"
        for wrong in ({"policy": "nothing"}, {"policy": "streaming", "policy_options": {"x": 1}}):
            assert http.post("/v1/chat/completions", json=ASK | wrong).status_code == 400
        both = http.post("/v1/chat/completions", json=ASK | {"policy": "full", "session": "x"})
        assert both.status_code == 400 and both.json()["error"]["param"] == "policy"


def test_without_a_store_there_are_no_sessions(model: Path) -> None:
    with serving(model, None) as (http, _):
        assert http.get("/v1/sessions").json() == {"object": "list", "store": False, "data": []}
        refused = http.post("/v1/chat/completions", json=ASK | {"session": "x"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "session"


USER = {"role": "user", "content": "Who?"}
ASSISTANT = {"role": "assistant", "content": "It was"}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "Dick"}


@pytest.fixture(scope="module")
def http(tokenizer: PreTrainedTokenizerBase) -> Iterator[httpx2.Client]:
    with (
        run_server(ScriptedEngine(tokenizer, lambda prompt: "A dark night.")) as url,
        httpx2.Client(base_url=url) as made,
    ):
        yield made


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
        ("chat/completions", {"messages": [USER], "continue_final_message": True}, "messages"),
        ("chat/completions", {"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ("../tokenize", {"messages": [USER], "continue_final_message": True}, "messages"),
    ],
)
def test_conversations_that_cannot_be_continued_are_refused(
    http: httpx2.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = http.post("/tokenize" if path == "../tokenize" else f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and ("continue" in error["message"] or "result of each call" in error["message"])


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("chat/completions", {}),
        ("chat/completions", {"continue_final_message": True, "add_generation_prompt": False}),
        ("messages", {"max_tokens": 50}),
        ("responses", {}),
    ],
)
def test_a_final_assistant_message_is_continued(
    tokenizer: PreTrainedTokenizerBase, path: str, more: dict[str, Any]
) -> None:
    seen: list[str] = []

    def say(prompt: str) -> str:
        seen.append(prompt)
        return " a dark night."

    name = "input" if path == "responses" else "messages"
    with run_server(ScriptedEngine(tokenizer, say)) as url, httpx2.Client(base_url=url) as http:
        for messages in ([USER, ASSISTANT], [USER, {"role": "assistant", "content": "<think>\nIt"}]):
            answer = http.post(f"/v1/{path}", json={name: messages} | more)
            assert answer.status_code == 200 and seen[-1] == f"user: Who?\nassistant: {messages[-1]['content']}"
            text = json.dumps(answer.json())
            assert "a dark night." in text and "It was a dark" not in text
            thinking = '"thinking": ' in text or '"reasoning"' in text.replace('"reasoning": null', "")
            assert (thinking or "reasoning_content" in text) == (messages[-1] is not ASSISTANT)
        if path == "messages":
            count = http.post("/v1/messages/count_tokens", json={"messages": [USER, ASSISTANT]}).json()["input_tokens"]
            assert count == len(tokenizer("user: Who?\nassistant: It was", add_special_tokens=False)["input_ids"])
        if path == "responses":
            made = http.post("/v1/responses", json={"input": [USER, ASSISTANT]}).json()["id"]
            items = http.get(f"/v1/responses/{made}/input_items", params={"order": "asc"}).json()["data"]
            assert [item["content"][0]["text"] for item in items] == ["Who?", "It was"]
            http.post("/v1/responses", json={"input": "B", "previous_response_id": made})
            assert seen[-1] == "user: Who?\nassistant: It was a dark night.\nuser: B\nassistant: "


def test_a_new_message_may_follow_an_assistant_message(tokenizer: PreTrainedTokenizerBase) -> None:
    seen: list[str] = []
    with run_server(ScriptedEngine(tokenizer, lambda prompt: seen.append(prompt) or "Yes.")) as url:  # type: ignore[func-returns-value]
        body = {"messages": [USER, ASSISTANT], "continue_final_message": False}
        assert httpx2.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    assert seen == ["user: Who?\nassistant: It was\nassistant: "]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [USER, ASSISTANT, USER]}),
        ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, TOOL]}),
        ("chat/completions", {"messages": [{"role": "system", "content": "Be brief."}]}),
        ("chat/completions", {"messages": [USER], "add_generation_prompt": True, "continue_final_message": False}),
        ("responses", {"input": [USER, ASSISTANT, USER]}),
    ],
)
def test_other_conversations_are_answered(http: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text


def test_a_session_is_not_deleted_during_an_answer(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night. " * 40, pause=0.02)
    ask = {"messages": [USER], "session": "novel", "stream": True}
    with run_server(engine, documents=tmp_path) as url, httpx2.Client(base_url=url) as http:
        with http.stream("POST", "/v1/chat/completions", json=ask) as answer:
            lines = answer.iter_lines()  # must stay referenced, as collecting the generator closes the connection
            next(lines)
            for method, path, body in (
                ("DELETE", "/v1/sessions/novel", None),
                ("POST", "/v1/chat/completions", ask | {"stream": False}),
                ("POST", "/v1/completions", {"prompt": "Who?", "session": "novel"}),
            ):
                refused = http.request(method, path, json=body)
                assert refused.status_code == 409 and "retry-after" in refused.headers, refused.text
                assert refused.json()["error"]["code"] == "session_busy"
            assert len(http.get("/v1/sessions").json()["data"]) == 1
        wait_until(lambda: engine.aborted == 1)
        wait_until(lambda: http.delete("/v1/sessions/novel").status_code == 200)
        assert http.get("/v1/sessions").json()["data"] == [] and len(engine.deleted) == 1
        assert http.delete("/v1/sessions/novel").status_code == 404


def test_a_conversation_is_renamed_and_replaced(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "Yes.")
    with run_server(engine, documents=tmp_path) as url, httpx2.Client(base_url=url) as http:
        path = "/v1/sessions/novel"
        assert http.post(path, json={"title": "A"}).status_code == 404
        assert http.post(path, json={"messages": [USER, ASSISTANT]}).status_code == 200
        assert http.get(path).json()["messages"] == [USER, ASSISTANT]
        assert http.get("/v1/sessions").json()["data"][0]["title"] == "Who?"
        assert http.post(path, json={"title": "A novel"}).status_code == 200
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "B"}], "session": "novel"})
        [head] = http.get("/v1/sessions").json()["data"]
        assert head["title"] == "A novel" and head.keys() == {"id", "title", "turns", "updated"}
        assert http.get(path).json()["messages"][0]["content"] == "B"
        for words, excerpts in (("b YES", ["B Yes."]), ("novel", [""]), ("a b", ["B Yes."]), ("who", [])):
            listed = http.get("/v1/sessions", params={"query": words}).json()["data"]
            assert [each["excerpt"] for each in listed] == excerpts, words
        assert http.get("/v1/sessions", params={"query": "x" * 201}).status_code == 400
        for wrong in ({"title": ""}, {"messages": []}, {"title": "x" * 201}):
            assert http.post(path, json=wrong).status_code == 400, wrong


def test_a_response_is_not_deleted_while_its_conversation_continues(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night. " * (40 if "more" in prompt else 1), 0.02)
    with run_server(engine, documents=tmp_path) as url, httpx2.Client(base_url=url) as http:
        first = http.post("/v1/responses", json={"input": "Who?"}).json()["id"]
        ask = {"input": "more", "previous_response_id": first, "stream": True}
        with http.stream("POST", "/v1/responses", json=ask) as answer:
            lines = answer.iter_lines()
            new = next(json.loads(line[6:])["response"]["id"] for line in lines if line.startswith("data: "))
            for name in (first, new):
                refused = http.delete(f"/v1/responses/{name}")
                assert refused.status_code == 409 and "retry-after" in refused.headers, refused.text
            assert not engine.deleted
        wait_until(lambda: engine.aborted == 1)
        wait_until(lambda: http.delete(f"/v1/responses/{first}").status_code == 200)
        assert len(engine.deleted) == 1
        assert http.get(f"/v1/responses/{first}").status_code == 404


def cached_tokens(http: httpx2.Client, headers: dict[str, str], **more: Any) -> int:
    body = {"prompt": LONG, "max_tokens": 2, "temperature": 0} | more
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_api_keys_share_no_kv_by_default(model: Path) -> None:
    with serving(model, None) as (http, _):
        assert [cached_tokens(http, each) > 0 for each in (ONE, TWO, ONE, TWO)] == [False, False, True, True]
        salted = [cached_tokens(http, each, cache_salt=salt) > 0 for salt in "ab" for each in (ONE, TWO, ONE)]
        assert salted == [False, False, True] * 2
        for path, body in (
            ("chat/completions", {"messages": [USER | {"content": "Who was it? " * 60}], "max_tokens": 2}),
            ("messages", {"messages": [USER | {"content": "Where was it? " * 60}], "max_tokens": 2}),
            ("responses", {"input": "When was it? " * 60, "max_output_tokens": 2}),
        ):
            found = []
            for headers in (ONE, TWO, ONE):
                usage = http.post(f"/v1/{path}", json=body, headers=headers).json()["usage"]
                details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
                found.append(details.get("cached_tokens", usage.get("cache_read_input_tokens")) > 0)
            assert found == [False, False, True], path
    with serving(model, None, share_prefixes=True) as (http, _):
        assert [cached_tokens(http, each) > 0 for each in (ONE, TWO)] == [False, True]
        assert cached_tokens(http, TWO, cache_salt="a") == 0
    with serving(model, None, api_keys=("one", "one")) as (http, _):
        assert (
            cached_tokens(http, ONE) == 0
            and cached_tokens(http, ONE) > 0
            and cached_tokens(http, ONE, cache_salt="a") == 0
        )


def test_salts_do_not_reveal_api_keys(tokenizer: PreTrainedTokenizerBase) -> None:
    salts = []
    for _ in range(2):  # each process has its own secret
        engine = ScriptedEngine(tokenizer, lambda prompt: "Yes.")
        with run_server(engine, api_keys=("one", "two")) as url, httpx2.Client(base_url=url) as http:
            for headers, more in ((ONE, {}), (TWO, {}), (ONE, {"cache_salt": "a"}), (ONE, {"cache_salt": "b"})):
                answer = http.post("/v1/completions", json={"prompt": "Who?"} | more, headers=headers)
                assert answer.status_code == 200
                salts.append(engine.cache_salt)
    assert len(set(salts)) == 8 and all(len(salt) == 64 for salt in salts)


def test_the_error_of_a_full_pool_names_no_sessions(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "Yes.")
    engine.fails = PoolFullError("the pool is full; sessions use 3 MB of it: 'abc' 3 MB (answering)")
    engine.fails.__cause__ = PoolFullError("the pool is full")
    with run_server(engine) as url, httpx2.Client(base_url=url) as http:
        error = http.post("/v1/completions", json={"prompt": "Who?"}).json()["error"]
        assert error["message"] == "the pool is full" and error["code"] == "pool_full"


async def generate_under(engines: Engines, policy: str) -> None:
    async with engines.engine_for(policy, None) as engine:
        async for _ in engine.generate(tiny_prompt(9), SamplingParams(max_tokens=3, temperature=0)):
            pass


def test_clients_may_leave_while_an_engine_is_opened_or_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_model("llama", num_hidden_layers=2), policy="full", verify="off", host_memory="8MiB")
    go, made = threading.Event(), list[LLM]()
    under, end = LLM.under, AsyncLLM._end

    def slow_under(*given: object) -> LLM:
        go.wait(10)
        made.append(under(*given))  # type: ignore[arg-type]
        return made[-1]

    async def leave(engines: Engines, policy: str) -> None:
        go.clear()
        leaving = asyncio.create_task(generate_under(engines, policy))
        await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        go.set()

    async def run() -> list[int]:
        engines = Engines(AsyncLLM(llm), ServerOptions(max_engines=2))
        monkeypatch.setattr(LLM, "under", slow_under)
        await leave(engines, "full")
        await generate_under(engines, "full")  # uses the engine that is still being created
        monkeypatch.setattr(LLM, "under", under)
        monkeypatch.setattr(AsyncLLM, "_end", lambda self: (go.wait(10), end(self))[1])
        await leave(engines, "streaming")
        counted = [engines.load().generated_tokens]  # includes tokens of the closed engine
        await generate_under(engines, "streaming")
        await engines.close()
        return [*counted, engines.load().generated_tokens]

    assert asyncio.run(run()) == [3, 6] and len(made) == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "offload-rt engine"]
