"""A hostile HTTP client over raw sockets."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from offload_rt.server.options import ServerOptions

LONG_ANSWER = 3000
"""Length of an abandoned answer in tokens. Decoding all of it would take seconds."""
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize")
JSON_HOLES = [
    '{"prompt": %s}', '{"messages": %s}', '{"messages": [{"role": "user", "content": %s}]}', '{"logit_bias": %s}',
    '{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": %s}}}',
    '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": %s}}', "%s", '{"input": %s}',
]  # fmt: skip
GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\r\n" * 50,
    b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 100,
    b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n", b"GET  / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\nHost: x\n\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff/../..//v1/models/%2e%2e HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
]  # fmt: skip
SESSIONS = ("s0", "s1", "s2")
ACTIONS = (
    "bytewise", "half_heads", "garbage", "wrong_length", "chunked", "oversized", "cut_request", "cut_response",
    "stop_reading", "pipelined", "nested", "invalid_text", "abandon_stream", "session",
)  # fmt: skip


class HostileClient:
    def __init__(self, url: str, options: ServerOptions, key: str, rng: random.Random) -> None:
        self.address = ("127.0.0.1", urlsplit(url).port)
        self.options, self.key, self.rng = options, key, rng
        self.counts = Counter[str]()
        self.open: list[socket.socket] = []
        self.abandoned: list[str] = []
        """Ids of long streaming requests that the client abandoned at the start."""

    def run(self) -> None:
        for _ in range(self.rng.randint(3, 6)):
            action = self.rng.choice(ACTIONS)
            self.counts[action] += 1
            with suppress(OSError):  # the server may close, reset or not respond
                getattr(self, action)()

    def disconnect(self) -> None:
        for connection in self.open:
            connection.close()
        self.open.clear()

    def check_abandoned(self, requests: dict[str, dict[str, Any]]) -> None:
        for request_id in self.abandoned:
            ended = requests[request_id]
            late = ended["finish"] == "timeout" and self.options.timeout < 10
            assert late or (ended["finish"] == "abort" and ended.get("client") == "gone"), ended
            assert ended["generated_tokens"] < LONG_ANSWER // 2, ended

    # ------------------------------------------------------------------------------------------------------- requests

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        found = socket.socket()
        if receive_buffer is not None:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        found.settimeout(3)
        self.open.append(found)
        found.connect(self.address)
        return found

    def close(self, connection: socket.socket) -> None:
        how = self.rng.choice(("close", "close", "reset", "shutdown", "stay"))
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "shutdown":
            connection.shutdown(socket.SHUT_WR)
        if how in ("close", "reset"):
            connection.close()
            self.open.remove(connection)

    def head(self, path: str, *lines: str) -> bytes:
        given = ["Host: localhost", "Content-Type: application/json", f"Authorization: Bearer {self.key}", *lines]
        return "\r\n".join([f"POST {path} HTTP/1.1", *given, ""]).encode()

    def post(self, path: str, content: bytes, *lines: str) -> bytes:
        return self.head(path, f"Content-Length: {len(content)}", *lines) + b"\r\n" + content

    def body(self, **fields: Any) -> bytes:
        body_data = {"prompt": f"It was {self.rng.randrange(9)}", "max_tokens": self.rng.choice((1, 20, 200))}
        return json.dumps(body_data | {"stream": self.rng.random() < 0.5} | fields).encode()

    def valid_request(self) -> bytes:
        return self.post("/v1/completions", self.body())

    def exchange(self, data: bytes) -> None:
        connection = self.connect()
        with suppress(OSError):
            connection.sendall(data)
        connection.settimeout(self.rng.choice((0.01, 0.3, 1.5)))
        with suppress(OSError):
            while connection.recv(1 << 16):
                pass
        self.close(connection)

    # -------------------------------------------------------------------------------------------------------- actions

    def bytewise(self) -> None:
        connection, data = self.connect(), self.valid_request()
        for i in range(self.rng.randint(1, len(data))):
            connection.sendall(data[i : i + 1])
            time.sleep(self.rng.choice((0, 0, 0, 0.01)))
        self.close(connection)

    def half_heads(self) -> None:
        for _ in range(self.rng.randint(1, 40)):
            connection = self.connect()
            data = self.head("/v1/completions")
            connection.sendall(data[: self.rng.randrange(len(data))])

    def garbage(self) -> None:
        rng = self.rng
        kind = rng.randrange(3)
        data = bytearray(self.valid_request())
        for _ in range(rng.randint(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        self.exchange([rng.choice(GARBAGE), rng.randbytes(rng.randint(1, 3000)), bytes(data)][kind])

    def wrong_length(self) -> None:
        content, rng = self.body(), self.rng
        length = rng.choice((0, 1, len(content) - 1, len(content) + 1, 10**6, 10**30, -1, "x", "1 1", "+5", "", "٣"))
        more = rng.choice(((), ("Content-Length: 7",), ("Transfer-Encoding: chunked",), ("Expect: 100-continue",)))
        self.exchange(self.head("/v1/completions", f"Content-Length: {length}", *more) + b"\r\n" + content)

    def chunked(self) -> None:
        content, rng, parts = self.body(), self.rng, list[bytes]()
        while content:
            size = rng.randint(1, len(content))
            part, content = content[:size], content[size:]
            size_line = (
                f"{size:x}" if rng.random() < 0.8 else rng.choice(("", "-1", "zz", "f" * 40, "0", f"{size + 3:x}"))
            )
            parts.append(size_line.encode() + rng.choice((b"", b"", b";x=y")) + b"\r\n" + part + b"\r\n")
        end = rng.choice((b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"", b"0\r\n" + b"x: y\r\n" * 9000, b"\r\n"))
        coding = rng.choice(("chunked", "chunked", "gzip", "chunked, chunked", "identity"))
        self.exchange(self.head("/v1/completions", f"Transfer-Encoding: {coding}") + b"\r\n" + b"".join(parts) + end)

    def oversized(self) -> None:
        rng = self.rng
        size = rng.choice((1 << 12, 1 << 16, 1 << 18, 1 << 21))
        kind = rng.randrange(5)
        if kind == 0:
            self.exchange(self.head("/v1/completions", *(["x: y"] * (size // 6))) + b"\r\n")
        elif kind == 1:
            self.exchange(self.head("/v1/completions", "x: " + "y" * size) + b"\r\n")
        elif kind == 2:
            self.exchange(self.head("/" + "x" * size) + b"\r\n")
        elif kind == 3:
            self.exchange(self.post(rng.choice(PATHS), self.body(prompt="a " * (size // 2))))
        else:
            self.exchange(self.post("/v1/completions", self.body(prompt=[1] * (size // 3), max_tokens=10**9)))

    def cut_request(self) -> None:
        data = self.valid_request()
        connection = self.connect()
        connection.sendall(data[: self.rng.randrange(len(data))])
        self.close(connection)

    def cut_response(self) -> None:
        connection = self.connect()
        connection.sendall(self.valid_request())
        left = self.rng.randint(0, 3000)
        while left > 0 and (got := connection.recv(min(left, 100))):
            left -= len(got)
        self.close(connection)

    def stop_reading(self) -> None:
        connection = self.connect(receive_buffer=2048)
        body_data = self.body(stream=True, n=self.rng.choice((1, 4)), max_tokens=LONG_ANSWER, ignore_eos=True)
        connection.sendall(self.post("/v1/completions", body_data))
        time.sleep(self.rng.random())
        if self.rng.random() < 0.5:
            self.close(connection)

    def pipelined(self) -> None:
        requests = [self.valid_request() for _ in range(self.rng.randint(2, 6))]
        if self.rng.random() < 0.5:
            requests.insert(self.rng.randrange(len(requests)), self.rng.choice(GARBAGE))
        self.exchange(b"".join(requests))

    def nested(self) -> None:
        rng = self.rng
        depth = rng.choice((10, 90, 900, 20_000))
        inner = rng.choice(("1", "", '"x"', "NaN", "1e999", "1" * 5000))
        opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('{"properties":{"a":', "}}")))
        text = rng.choice(JSON_HOLES) % (opening * depth + inner + closing * rng.choice((depth, depth, depth - 1)))
        self.exchange(self.post(rng.choice(PATHS), text.encode()))

    def invalid_text(self) -> None:
        text = self.rng.choice(
            (b"\xff\xfe", b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\x00", b"\xf4\x90")
        )
        hole = self.rng.choice((b'{"prompt": "%s"}', b'{"messages": [{"role": "user", "content": "%s"}]}', b"%s"))
        kind = self.rng.choice(("Accept: */*", "Content-Type: text/plain", "Content-Encoding: gzip"))
        self.exchange(self.post(self.rng.choice(PATHS), hole.replace(b"%s", text * 3), kind))

    def abandon_stream(self, **fields: Any) -> None:
        """Disconnect at the start of a long stream. `check_abandoned` later checks that the request has ended."""
        connection = self.connect()
        body_data = self.body(stream=True, max_tokens=LONG_ANSWER, ignore_eos=True, temperature=0, **fields)
        connection.sendall(self.post("/v1/completions", body_data))
        data = connection.recv(4096)
        if data.startswith(b"HTTP/1.1 200") and (found := re.search(rb"x-request-id: (\w+)", data)):
            self.abandoned.append(found[1].decode())
            self.counts["streams left"] += 1
        connection.close()
        self.open.remove(connection)

    def session(self) -> None:
        if self.options.documents is None:
            return
        name = self.rng.choice(SESSIONS)
        self.abandon_stream(session=name)
        data = self.head(f"/v1/sessions/{name}", "Connection: close").replace(b"POST", b"DELETE", 1) + b"\r\n"
        self.exchange(data)
