"""Test clients that are slow, silent, or send invalid HTTP. They are disconnected in time, and others are served."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from support.serving import ScriptedEngine, run_asgi_app, run_server, wait_until
from transformers import PreTrainedTokenizerBase
from uvicorn.server import ServerState

from offload_rt.server.app import make_app
from offload_rt.server.log import Repetitions
from offload_rt.server.options import ServerOptions
from offload_rt.server.protocol import Connections, LimitedProtocol, make_server
from offload_rt.server.run import bind_socket

ASK = {"prompt": "It was", "max_tokens": 4000}
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connect(url: str, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
    where = urlsplit(url)
    found = socket.socket()
    if receive_buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    found.settimeout(10)
    found.connect((where.hostname, where.port))
    found.sendall(data)
    return found


def read_until_closed(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    connection.close()
    return b"".join(parts)


def error_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"
    return str(json.loads(body)["error"]["type"])


def post(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = HALF + f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    return head + content


async def respond_with_32_mib(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"33554432")]})
        await send({"type": "http.response.body", "body": b"x" * (32 << 20)})


@pytest.mark.parametrize("limit", ["timeout", "send_timeout"])
def test_a_client_that_does_not_read_is_disconnected(
    tokenizer: PreTrainedTokenizerBase, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_buffers(options: ServerOptions) -> socket.socket:
        listener = bind_socket(options)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted connections inherit it
        return listener

    monkeypatch.setattr("support.serving.bind_socket", small_buffers)
    # The engine waits for the client to read and would never finish by itself.
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was a dark night. " * 200)
    ask = post(ASK | {"stream": True, "n": 4})
    with (
        run_server(engine, **{"timeout": 600, "send_timeout": 600, limit: 0.5}) as url,
        connect(url, ask, receive_buffer=4096),
    ):
        wait_until(lambda: engine.begun == 1)
        wait_until(lambda: engine.aborted == 1, 8)


@pytest.mark.parametrize("slowly", [False, True])
def test_a_complete_but_unread_response_ends_its_connection(slowly: bool) -> None:
    """The transport has buffered the whole response, so its `close()` would wait forever."""
    options = ServerOptions(port=0, timeout=0.2, send_timeout=60.0 if slowly else 0.3)
    ask = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with (
        run_asgi_app(respond_with_32_mib, options) as (url, server),
        connect(url, ask, receive_buffer=4096) as connection,
    ):
        wait_until(lambda: len(server.server_state.connections) == 1)
        end = time.monotonic() + 6
        while server.server_state.connections and time.monotonic() < end:
            if slowly:
                try:
                    connection.recv(1)
                except ConnectionResetError:
                    break
            time.sleep(0.05)
        wait_until(lambda: not server.server_state.connections, 1)


@pytest.mark.parametrize("start", [b"", b"G", HALF])
def test_request_headers_have_a_deadline(tokenizer: PreTrainedTokenizerBase, start: bytes) -> None:
    with run_server(ScriptedEngine(tokenizer, str), head_timeout=0.3) as url:
        begun = time.monotonic()
        connection = connect(url, start)
        answer = read_until_closed(connection)
        assert 0.2 < time.monotonic() - begun < 5
        assert (b"HTTP/1.1 408 " in answer and error_of(answer) == "timeout_error") if start else answer == b""


def test_single_bytes_do_not_extend_the_header_deadline(tokenizer: PreTrainedTokenizerBase) -> None:
    with run_server(ScriptedEngine(tokenizer, str), head_timeout=0.4) as url:
        connection = connect(url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(1 << 16)
        connection.sendall(HALF)  # head of the next request on this connection
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + 5:
                connection.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            pass
        connection.close()
        assert time.monotonic() - begun < 4


def test_health_answers_among_half_open_connections(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was.")
    descriptors = psutil.Process().num_fds()
    with run_server(engine, max_connections=32) as url, httpx2.Client(base_url=url) as http, ExitStack() as stack:
        for _ in range(300):
            stack.callback(connect(url, HALF).close)
            if _ % 30 == 0:
                assert http.get("/health", timeout=5).status_code == 200
                assert httpx2.get(f"{url}/health", timeout=5).status_code == 200
        # This process also has the 300 client sockets.
        assert psutil.Process().num_fds() - descriptors < 300 + 32 + 32
    assert {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING} == {
        "connection aborted: replaced by a new connection"
    }


def test_a_connection_is_refused_if_all_others_wait_for_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was.", pause=0.3)
    with run_server(engine, max_connections=2) as url:
        asking = [connect(url, post(ASK)) for _ in range(2)]
        wait_until(lambda: engine.begun == 2)
        refused = read_until_closed(connect(url))
        assert refused.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in refused
        assert error_of(refused) == "overloaded_error"
        for connection in asking:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.close()


def test_a_new_connection_does_not_end_a_response_being_read(tokenizer: PreTrainedTokenizerBase) -> None:
    ask = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with (
        run_asgi_app(respond_with_32_mib, ServerOptions(port=0, max_connections=1)) as (url, _),
        connect(url, ask, 4096) as slow,
    ):
        begun = slow.recv(100)
        assert read_until_closed(connect(url)).startswith(b"HTTP/1.1 503 ")
        assert len(begun + read_until_closed(slow)) > 32 << 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_shutdown_during_an_answer_is_reported(tokenizer: PreTrainedTokenizerBase, stream: bool) -> None:
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was. " * 1000, pause=0.1)
    options = ServerOptions(port=0, grace=1)
    with run_asgi_app(make_app(engine, options), options) as (url, server):  # type: ignore[arg-type]
        asking = connect(url, post(ASK | {"stream": stream}))
        wait_until(lambda: engine.begun == 1)
        if stream:
            assert asking.recv(100).startswith(b"HTTP/1.1 200 ")
        server.should_exit = True
        answer = read_until_closed(asking)
    assert b"the server is shutting down" in answer and b'"overloaded_error"' in answer
    assert answer.endswith(b"0\r\n\r\n") if stream else answer.startswith(b"HTTP/1.1 503 ")
    assert engine.aborted == 1


def test_small_writes_are_sent_immediately() -> None:
    """Without TCP_NODELAY, a response body would wait 40 ms until the client acknowledges the headers."""

    async def nodelay_option(listener: socket.socket) -> int:
        accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda reader, writer: accepted.set_result(writer), sock=listener)
        async with server:
            _, client_side = await asyncio.open_connection(*listener.getsockname())
            server_side = await accepted
            found = server_side.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for writer in (client_side, server_side):
                writer.close()
        return int(found)

    assert asyncio.run(nodelay_option(bind_socket(ServerOptions(port=0)))) == 1


def test_a_refused_client_receives_the_reason(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """If the socket were closed before the request arrives, the connection would be reset and the response lost."""
    engine = ScriptedEngine(tokenizer, lambda prompt: "It was. " * 50, pause=0.1)
    with run_server(engine, max_connections=4) as url, ExitStack() as stack:
        for _ in range(4):
            stack.callback(connect(url, post(ASK)).close)
        wait_until(lambda: engine.begun == 4)
        late = connect(url)
        wait_until(lambda: "connection refused: too many are open" in caplog.messages)
        for _ in range(3):
            late.sendall(post(ASK))
            time.sleep(0.05)
        with late:
            assert late.recv(1 << 16).startswith(b"HTTP/1.1 503 ") and late.recv(1) == b""


def test_a_reset_connection_is_refused_without_an_error() -> None:
    transport = MagicMock()
    transport.write_eof.side_effect = OSError("not connected")  # as if the client had reset the connection

    async def refuse() -> None:
        config = make_server(FastAPI(), ServerOptions()).config
        connections = Connections(ServerOptions())
        connections.limit = 0
        refused = LimitedProtocol(connections, config, ServerState(), {})
        refused.connection_made(transport)
        assert connections.refused == {refused}
        refused.connection_lost(None)
        assert not connections.refused

    asyncio.run(refuse())
    assert transport.write.call_args[0][0].startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("most", [4, 16, 64])
def test_a_waiting_request_is_not_replaced_by_idle_connections(most: int) -> None:
    begun, go = threading.Event(), threading.Event()

    async def busy(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/busy":
            begun.set()
            go.wait(20)  # blocks the event loop
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    options = ServerOptions(port=0, max_connections=most)
    with run_asgi_app(busy, options) as (url, _), ExitStack() as stack:
        stack.callback(go.set)
        stack.callback(connect(url, b"GET /busy HTTP/1.1\r\nHost: x\r\n\r\n").close)
        assert begun.wait(20)
        normal = connect(url, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        stack.callback(normal.close)
        for _ in range(4 * most):
            stack.callback(connect(url).close)
        go.set()
        assert normal.recv(100).startswith(b"HTTP/1.1 200 ")


SERVER_OPTIONS = {"head_timeout": 1.0, "max_body": 4096}


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40) + b"\r\n\r\n",  # TLS
        b"\r\n\r\nnonsense\r\n\r\n",
        HALF + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HALF + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HALF + b"Content-Length: -1\r\n\r\n",
        HALF + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HALF + b"x: y\r\n" * 20_000 + b"\r\n",
        HALF + b"x: " + b"y" * 200_000,
        b"GET http://127.0.0.1/nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"TRACE /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /nothing HTTP/1.0\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    ],
)
def test_invalid_requests_are_refused(url: str, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    connection = connect(url)
    with suppress(OSError):
        connection.sendall(data)
    answer = read_until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 4") or (len(data) > 100_000 and not answer), answer
    assert not [record for record in caplog.records if record.exc_info]
    assert httpx2.get(f"{url}/health").status_code == 200


def test_garbage_after_a_refused_body_logs_no_error(url: str, caplog: pytest.LogCaptureFixture) -> None:
    oversized = HALF + b"Transfer-Encoding: chunked\r\n\r\n" + b"1388\r\n" + b"x" * 5000 + b"\r\n"
    connection = connect(url, oversized)
    assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    connection.sendall(b"nonsense\r\n")
    read_until_closed(connection)
    assert not [record for record in caplog.records if record.exc_info]


def test_incomplete_bodies_share_one_limit(tokenizer: PreTrainedTokenizerBase) -> None:
    with run_server(ScriptedEngine(tokenizer, str), max_body=1024) as address, ExitStack() as stack:
        for _ in range(18):
            connection = connect(address, HALF + b"Content-Length: 1024\r\n\r\n" + b"x" * 1000)
            stack.callback(connection.close)
        assert connection.recv(100).startswith(b"HTTP/1.1 503 ")
        stack.close()
        wait_until(lambda: httpx2.post(f"{address}/v1/completions", content=b"x" * 900).status_code == 400)


def test_repeated_messages_are_counted_instead_of_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    # Do not patch `time.monotonic` itself: the event loop of the module's server uses it and would sleep for hours.
    monkeypatch.setattr("offload_rt.server.log.time", SimpleNamespace(monotonic=lambda: clock[0]))
    repetitions = Repetitions(limit=3, seconds=10)

    def passes(message: str, level: int = logging.WARNING) -> logging.LogRecord | None:
        record = logging.LogRecord("x", level, "", 0, message, None, None)
        return record if repetitions.filter(record) else None

    assert [bool(passes("a")) for _ in range(5)] == [True] * 3 + [False] * 2
    assert passes("b") and all(passes("c", logging.INFO) for _ in range(5))
    clock[0] += 11
    record = passes("c", logging.INFO)
    assert record is not None and record.__dict__["fields"] == {"suppressed": {"a": 2}}
