"""Test the server's authentication, limits, timeouts and shutdown, and clients that disconnect."""

from __future__ import annotations

import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from support.serving import ScriptedEngine, run_asgi_app, run_server, wait_until
from transformers import PreTrainedTokenizerBase

from offload_rt import ConfigError
from offload_rt.server.app import make_app
from offload_rt.server.log import JsonLines, TextLines
from offload_rt.server.options import ServerOptions
from offload_rt.server.run import Loading, bind_socket
from offload_rt.utils.progress import report

SECRET = "Sedley of the Moat House"
ASK = {"messages": [{"role": "user", "content": SECRET}]}


SERVER_OPTIONS = {"api_keys": ("right", "other"), "max_body": 4096, "timeout": 1.5}
AUTHORIZED = {"authorization": "Bearer right"}


def say(prompt: str) -> str:
    return "It was a dark night. " * 20


def test_api_keys_are_checked(url: str) -> None:
    with httpx2.Client(base_url=url) as http:
        assert http.get("/health").status_code == http.get("/").status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/load", "/openapi.json", "/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}, {"x-api-key": "righ"}):
                refused = http.get(path, headers=headers)
                assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key", path
                assert refused.headers["www-authenticate"] == "Bearer"
        for headers in (AUTHORIZED, {"authorization": "bearer other"}, {"x-api-key": "right"}):
            answer = http.get("/v1/models", headers=headers)
            assert answer.status_code == 200 and len(answer.headers["x-request-id"]) == 32


def test_large_bodies_are_refused(url: str, engine: ScriptedEngine) -> None:
    begun, large = engine.begun, json.dumps(ASK | {"user": "x" * 4096}).encode()
    headers = AUTHORIZED | {"content-type": "application/json"}
    announced = httpx2.post(f"{url}/v1/chat/completions", content=large, headers=headers)
    chunked = httpx2.post(f"{url}/v1/chat/completions", content=iter([large[:2000], large[2000:]]), headers=headers)
    assert announced.status_code == chunked.status_code == 413 and engine.begun == begun
    assert chunked.json()["error"]["type"] == "request_too_large"


def test_foreign_hosts_and_origins_are_refused(url: str, tokenizer: PreTrainedTokenizerBase) -> None:
    for host, status in (("evil.example", 403), ("localhost:8000", 200), ("[::1]:9", 200), ("127.0.0.1", 200)):
        assert httpx2.get(f"{url}/health", headers={"host": host}).status_code == status, host
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx2.options(f"{url}/v1/models", headers=preflight).headers
    scripted = ScriptedEngine(tokenizer, str)
    with run_server(scripted, cors_origins=("https://a.example",), allowed_hosts=("b.example",)) as address:
        allowed = httpx2.options(f"{address}/v1/models", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        refused = httpx2.get(f"{address}/health", headers={"host": "c.example", "origin": "https://a.example"})
        assert refused.status_code == 403 and refused.headers["access-control-allow-origin"] == "https://a.example"
        preflight["origin"] = "https://c.example"
        assert "access-control-allow-origin" not in httpx2.options(f"{address}/v1/models", headers=preflight).headers
        assert httpx2.get(f"{address}/health", headers={"host": "b.example"}).status_code == 200
    assert scripted.closed  # closed with the server


def send(url: str, body: dict[str, Any]) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    found, content = socket.create_connection((host, int(port))), json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer right\r\n"
    found.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnected_client_ends_its_request(tokenizer: PreTrainedTokenizerBase, stream: bool) -> None:
    slow = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night. " * 20, pause=0.05)
    with run_server(slow) as address:  # without an abort, the answer would take several seconds
        connection = send(address, ASK | {"stream": stream})
        wait_until(lambda: slow.begun == 1)
        if stream:
            assert b"200" in connection.recv(100)
        connection.close()
        wait_until(lambda: slow.aborted == 1, 10)


def test_requests_time_out(url: str, engine: ScriptedEngine) -> None:
    aborted, engine.pause = engine.aborted, 0.05

    def ask(stream: bool) -> httpx2.Response:
        return httpx2.post(f"{url}/v1/chat/completions", json=ASK | {"stream": stream}, headers=AUTHORIZED, timeout=20)

    with ThreadPoolExecutor(2) as threads:
        whole, streamed = threads.map(ask, (False, True))
    assert whole.status_code == 408 and whole.json()["error"]["type"] == "timeout_error"
    assert whole.headers["x-should-retry"] == "false"
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert streamed.status_code == 200 and json.loads(events[-1])["error"]["type"] == "timeout_error"
    assert engine.aborted == aborted + 2
    engine.pause = 0.0


def test_prompts_are_logged_only_with_the_option(
    url: str, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    httpx2.post(f"{url}/v1/chat/completions", json=ASK, headers=AUTHORIZED)
    httpx2.post(f"{url}/v1/chat/completions", json=ASK | {"temperature": SECRET}, headers=AUTHORIZED)
    wait_until(lambda: len(caplog.records) > 1)
    lines = [JsonLines().format(record) for record in caplog.records]
    assert SECRET not in "".join(lines) and "right" not in "".join(lines)
    logged = next(fields for line in lines if (fields := json.loads(line)).get("path") == "/v1/chat/completions")
    assert {"id", "status", "seconds", "prompt_tokens", "cached_tokens", "generated_tokens", "finish"} <= logged.keys()
    caplog.clear()
    with run_server(engine, log_prompts=True) as address:
        httpx2.post(f"{address}/v1/chat/completions", json=ASK)
        assert httpx2.post(f"{address}/v1/completions", json={"prompt": [2**40]}).status_code == 400
    lines = [JsonLines().format(record) for record in caplog.records]
    assert SECRET in "".join(lines) and "dark night" in "".join(lines)


def test_running_answers_are_finished_at_shutdown(tokenizer: PreTrainedTokenizerBase) -> None:
    slow = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night.", pause=0.1)
    found: list[httpx2.Response] = []
    with run_server(slow) as address:
        asking = threading.Thread(target=lambda: found.append(httpx2.post(f"{address}/v1/chat/completions", json=ASK)))
        asking.start()
        wait_until(lambda: slow.begun == 1)
    asking.join(20)
    assert found[0].json()["choices"][0]["message"]["content"] == "It was a dark night."
    assert (slow.aborted, slow.closed) == (0, True)


def test_an_address_in_use_is_reported() -> None:
    with bind_socket(ServerOptions(port=0)) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind_socket(ServerOptions(port=taken.getsockname()[1]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"port": 70000}, "port=70000 must be between 0 and 65535"),
        ({"max_waiting": 0}, "max_waiting=0 must be at least 1"),
        ({"timeout": "soon"}, "timeout='soon' is not a duration"),
        ({"tool_parser": "x"}, "tool_parser='x' is unknown .one of: auto"),
        ({"api_keys": ("",)}, "an API key must not be empty"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerOptions(**wrong)


def test_the_server_reports_progress_while_the_model_is_loaded(tokenizer: PreTrainedTokenizerBase) -> None:
    ready, engine = threading.Event(), ScriptedEngine(tokenizer, str)

    def make() -> Any:
        report("verifying", 1, 3)
        assert ready.wait(20)
        return make_app(engine)  # type: ignore[arg-type]

    with run_asgi_app(Loading(make)) as (address, _):
        wait_until(lambda: "task" in httpx2.get(f"{address}/health").json())
        early = httpx2.get(f"{address}/health"), httpx2.post(f"{address}/v1/chat/completions", json=ASK)
        assert [answer.status_code for answer in early] == [503, 503] and early[0].json()["status"] == "loading"
        assert early[0].json()["task"] == "verifying" and early[0].json()["total"] == 3
        assert early[1].json()["error"]["code"] == "loading" and early[1].headers["retry-after"]
        page = httpx2.get(address)
        assert page.status_code == 200 and "Loading the model" in page.text
        assert httpx2.get(f"{address}/page.js").headers["content-security-policy"]
        ready.set()
        wait_until(lambda: httpx2.get(f"{address}/health").status_code == 200)
        assert httpx2.post(f"{address}/v1/chat/completions", json=ASK).status_code == 200
    assert engine.closed


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    def make() -> Any:
        raise ConfigError("no such thing")

    loading = Loading(make)
    ends: list[bool] = []
    loading.on_failure = lambda: ends.append(True)
    with run_asgi_app(loading) as (address, _):
        wait_until(lambda: bool(ends))
        assert httpx2.get(f"{address}/health").status_code == 503
    assert isinstance(loading.error, ConfigError)


def test_the_log_of_a_terminal_has_no_control_characters() -> None:
    record = logging.makeLogRecord(
        {"msg": "request", "levelno": logging.WARNING, "levelname": "WARNING", "created": 0.0}
    )
    record.fields = {"id": "1", "path": "/a\x1b[2J\nb", "status": 404}
    assert TextLines().format(record)[9:] == "warning: request path=/a [2J b status=404"
    record.text = "ready at http://127.0.0.1:8000"
    assert TextLines().format(record).endswith("warning: ready at http://127.0.0.1:8000")
