"""Test server sessions after a restart and with several API keys, request traces, and a policy per request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from support.serving import TEMPLATE, served, wait_until
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, AsyncLLM

ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
LONG = "It was a dark night, and the river was high. " * 12
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=2)
    return folder


@contextmanager
def serving(model: Path, store: Path, policy: str = "full", **options: Any) -> Iterator[tuple[httpx2.Client, AsyncLLM]]:
    """Serve sessions in `store` with a new model, as a restarted process would."""
    llm = LLM(model, policy=policy, verify="off", host_memory="32MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    engine = AsyncLLM(llm, store=store)
    with (
        served(engine, api_keys=("one", "two"), documents=store / "server", **options) as url,
        httpx2.Client(base_url=url, headers=ONE, timeout=60) as http,
    ):
        yield http, engine


def ask(http: httpx2.Client, **more: Any) -> Any:
    answer = http.post("/v1/chat/completions", json=ASK | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_session_comes_back_from_disk_and_is_its_keys(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (http, _):
        first = ask(http, session="novel")
        said = first["choices"][0]["message"]["content"]
        [listed] = http.get("/v1/sessions").json()["data"]
        assert listed["id"] == "novel" and listed["title"].startswith("It was a dark") and listed["turns"] == 1
    with serving(model, tmp_path) as (http, engine):  # a restarted server has nothing in memory
        kept = http.get("/v1/sessions/novel").json()["messages"]
        assert [message["role"] for message in kept] == ["user", "assistant"] and kept[1]["content"] == said
        more = ask(http, session="novel", messages=[*kept, {"role": "user", "content": "Go on."}])
        usage = more["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 64 > 100
        assert engine.load().session_disk_tokens > 100 and engine.load().store_bytes > 0
        assert 'tier="disk"' in http.get("/metrics").text
        alone = ask(http, messages=[*kept, {"role": "user", "content": "Go on."}])
        assert alone["choices"] == more["choices"], "what came from disk is what would be computed"
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


def test_a_response_is_gone_on_with_after_a_restart(model: Path, tmp_path: Path) -> None:
    asked: Any = {"model": "tiny", "max_output_tokens": 6, "temperature": 0}
    with serving(model, tmp_path) as (http, _), openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="one") as client:
        first = client.responses.create(input=LONG, **asked)
    with serving(model, tmp_path) as (http, engine):
        with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="one", max_retries=0) as client:
            second = client.responses.create(input="Go on.", previous_response_id=first.id, **asked)
            assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 100
            assert engine.load().session_disk_tokens > 100
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


def test_a_session_without_a_conversation_is_deleted(model: Path, tmp_path: Path) -> None:
    """Text completions store no messages, but the engine stores the tokens."""
    with serving(model, tmp_path) as (http, engine):
        asked = {"prompt": LONG, "max_tokens": 4, "session": "novel"}
        assert http.post("/v1/completions", json=asked).status_code == 200
        assert http.delete("/v1/sessions/novel", headers=TWO).status_code == 404
        assert http.delete("/v1/sessions/novel").json()["deleted"]
        assert engine.llm.runner.pool.bytes_held == 0
        assert http.delete("/v1/sessions/novel").status_code == 404
    assert not list(tmp_path.rglob("session-*"))


def test_a_response_that_its_client_left_leaves_no_session(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as (http, engine):
        asked = {"input": LONG, "max_output_tokens": 3000, "stream": True}
        with http.stream("POST", "/v1/responses", json=asked) as answer:
            assert next(answer.iter_lines()).startswith("event: response.created")
        wait_until(lambda: engine.llm.runner.pool.bytes_held == 0)
    assert not list(tmp_path.rglob("session-*"))


def test_what_a_request_does_is_traced(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path, policy="infinigen") as (http, _):
        answer = http.post("/v1/chat/completions", json=ASK | {"stream": True, "trace": True, "max_tokens": 5})
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        head, *steps = [chunk["trace"] for chunk in chunks if "trace" in chunk]
        assert "".join(head["segments"]) == f"user: {LONG}\nassistant: "
        assert (head["policy"], head["layers"], head["segment_tokens"]) == ("infinigen", 2, 1)
        assert len(head["segments"]) == head["prompt_tokens"]
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
        expected = ask(http)
        for policy in ("streaming", "full"):  # the second engine replaces the first
            found = ask(http, policy=policy)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 100, "its prefill was there"
            traced = http.post("/v1/chat/completions", json=ASK | {"policy": policy, "trace": True, "stream": True})
            assert f'"trace":{{"policy":"{policy}"' in traced.text
        assert found["choices"] == expected["choices"]
        tokens = http.get("/v1/load").json()["generated_tokens"]
        assert tokens == 30 > engine.load().generated_tokens == 6, "all engines count, also those that are gone"
        for wrong in ({"policy": "nothing"}, {"policy": "streaming", "policy_options": {"x": 1}}):
            assert http.post("/v1/chat/completions", json=ASK | wrong).status_code == 400
        both = http.post("/v1/chat/completions", json=ASK | {"policy": "full", "session": "x"})
        assert both.status_code == 400 and both.json()["error"]["param"] == "policy"


def test_without_a_store_there_are_no_sessions(model: Path) -> None:
    llm = LLM(model, policy="full", verify="off", host_memory="8MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    with served(AsyncLLM(llm)) as url:
        assert httpx2.get(f"{url}/v1/sessions").json() == {"object": "list", "store": False, "data": []}
        refused = httpx2.post(f"{url}/v1/chat/completions", json=ASK | {"session": "x"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "session"
