"""Test conversations with scripted answers: they are continued, renamed, replaced and deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.serving import ScriptedEngine, run_server, wait_until
from transformers import PreTrainedTokenizerBase

USER = {"role": "user", "content": "Who?"}
ASSISTANT = {"role": "assistant", "content": "It was"}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
TOOL = {"role": "tool", "tool_call_id": "c", "content": "Dick"}


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
            lines = answer.iter_lines()  # keep a reference, because collecting the generator would close the connection
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
