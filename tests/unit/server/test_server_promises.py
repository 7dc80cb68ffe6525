"""Test guarantees of the server: no prefilled answers, deleted data stays deleted, API keys share no information."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.serving import TEMPLATE, ScriptedEngine, reference_tokenizer, served, wait_until
from support.tiny_models import tiny_checkpoint
from transformers import PreTrainedTokenizerBase

from offload_rt import LLM, AsyncLLM
from offload_rt.errors import PoolFullError

ONE, TWO = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
USER = {"role": "user", "content": "Who?"}
ASSISTANT = {"role": "assistant", "content": "It was"}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "Dick"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return reference_tokenizer()


@pytest.fixture(scope="module")
def http(tokenizer: PreTrainedTokenizerBase) -> Iterator[httpx2.Client]:
    with served(ScriptedEngine(tokenizer, lambda prompt: "A dark night.")) as url, httpx2.Client(base_url=url) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"messages": [USER, ASSISTANT]}, "messages"),
        ("chat/completions", {"messages": [USER, ASSISTANT], "stream": True}, "messages"),
        ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
        ("chat/completions", {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {"messages": [USER], "add_generation_prompt": False}, "add_generation_prompt"),
        ("messages", {"messages": [USER, ASSISTANT], "max_tokens": 5}, None),
        ("responses", {"input": [USER, ASSISTANT]}, "input"),
        ("../tokenize", {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_prefill_is_refused(http: httpx2.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = http.post("/tokenize" if path == "../tokenize" else f"/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert "continue" in error["message"] and error.get("param") == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [USER, ASSISTANT, USER]}),
        ("chat/completions", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, TOOL]}),
        ("chat/completions", {"messages": [{"role": "system", "content": "Be brief."}]}),
        ("chat/completions", {"messages": [USER], "add_generation_prompt": True, "continue_final_message": False}),
        ("messages/count_tokens", {"messages": [USER, ASSISTANT]}),
        ("responses", {"input": [USER, ASSISTANT, USER]}),
    ],
)
def test_other_conversations_are_answered(http: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text


def test_what_is_being_answered_is_not_deleted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night. " * 40, pause=0.02)
    ask = {"messages": [USER], "session": "novel", "stream": True}
    with served(engine, documents=tmp_path) as url, httpx2.Client(base_url=url) as http:
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


def test_a_response_is_not_deleted_while_its_conversation_goes_on(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night. " * (40 if "more" in prompt else 1), 0.02)
    with served(engine, documents=tmp_path) as url, httpx2.Client(base_url=url) as http:
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


@contextmanager
def keys(model: Path, **options: Any) -> Iterator[httpx2.Client]:
    llm = LLM(model, policy="full", verify="off", host_memory="32MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    with served(AsyncLLM(llm), **options) as url, httpx2.Client(base_url=url, timeout=60) as http:
        yield http


def cached(http: httpx2.Client, headers: dict[str, str], **more: Any) -> int:
    """Return the number of cached tokens of a long prompt."""
    long = "It was a dark night, and the river was high. " * 12
    body = {"prompt": long, "max_tokens": 2, "temperature": 0} | more
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_keys_share_no_kv_unless_told_to(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2)
    with keys(model, api_keys=("one", "two")) as http:
        assert [cached(http, each) > 0 for each in (ONE, TWO, ONE, TWO)] == [False, False, True, True]
        salted = [cached(http, each, cache_salt=salt) > 0 for salt in "ab" for each in (ONE, TWO, ONE)]
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
    with keys(model, api_keys=("one", "two"), share_prefixes=True) as http:
        assert [cached(http, each) > 0 for each in (ONE, TWO)] == [False, True]
        assert cached(http, TWO, cache_salt="a") == 0
    with keys(model, api_keys=("one", "one")) as http:
        assert cached(http, ONE) == 0 and cached(http, ONE) > 0 and cached(http, ONE, cache_salt="a") == 0


def test_no_salt_tells_of_its_key(tokenizer: PreTrainedTokenizerBase) -> None:
    salts = []
    for _ in range(2):  # each process has its own secret
        engine = ScriptedEngine(tokenizer, lambda prompt: "Yes.")
        with served(engine, api_keys=("one", "two")) as url, httpx2.Client(base_url=url) as http:
            for headers, more in ((ONE, {}), (TWO, {}), (ONE, {"cache_salt": "a"}), (ONE, {"cache_salt": "b"})):
                answer = http.post("/v1/completions", json={"prompt": "Who?"} | more, headers=headers)
                assert answer.status_code == 200
                salts.append(engine.cache_salt)
    assert len(set(salts)) == 8 and all(len(salt) == 64 for salt in salts)


def test_a_full_pool_names_no_sessions(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "Yes.")
    engine.fails = PoolFullError("the pool is full; sessions hold 3 MB of it: 'abc' 3 MB (answering)")
    engine.fails.__cause__ = PoolFullError("the pool is full")
    with served(engine) as url, httpx2.Client(base_url=url) as http:
        error = http.post("/v1/completions", json={"prompt": "Who?"}).json()["error"]
        assert error["message"] == "the pool is full" and error["code"] == "pool_full"


def test_two_turns_at_once_are_one_turn(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night. " * 5, pause=0.02)
    with served(engine, documents=tmp_path) as url, httpx2.Client(base_url=url) as http, ThreadPoolExecutor(4) as pool:
        ask = {"messages": [USER], "session": "novel"}
        found = [pool.submit(http.post, "/v1/chat/completions", json=ask) for _ in range(4)]
        assert sorted(each.result().status_code for each in found) == [200, 409, 409, 409]
