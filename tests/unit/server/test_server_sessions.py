"""Test sessions and stored responses: restarts, deletion, isolation of API keys, traces, and policies per request."""

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
    """Load and serve the model, as a new process would. If `store` is given, sessions are stored there."""
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
    """For text completions, the server stores no messages. Only the engine stores the session."""
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
            ("chat/completions", {"messages": [{"role": "user", "content": "Who was it? " * 60}], "max_tokens": 2}),
            ("messages", {"messages": [{"role": "user", "content": "Where was it? " * 60}], "max_tokens": 2}),
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
