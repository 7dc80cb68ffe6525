"""Test a real server with random limits against hostile and normal HTTP clients.

Hostile clients send broken requests over raw sockets, or disconnect at any point. Each case checks:

* a normal request gets the same text as if no other clients were connected, or a documented refusal;
* the server never responds with status 500 and logs no exception;
* at the end, no request is running, the pool is empty, and no file descriptor or thread is left.

The seed determines everything except the timing.
"""

from __future__ import annotations

import atexit
import functools
import gc
import http.client
import json
import logging
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from support.serving import TEMPLATE, run_asgi_app, wait_until
from support.tiny_models import tiny_checkpoint
from transformers.utils import logging as transformers_logging

from adversary.hostile import SESSIONS, HostileClient
from offload_rt import LLM, AsyncLLM, SamplingParams
from offload_rt.server.app import make_app
from offload_rt.server.options import ServerOptions

KEY = "a key of this test"
WORDS = ("Dick", "Joan", "a dark night", "the river", "Sir Daniel", "arrows")
REFUSALS = {408, 429, 503}
IDLE_SECONDS = 30.0
FEW_CONNECTIONS = 16
LOGGERS = ("offload_rt", "uvicorn", "asyncio")


@functools.cache
def checkpoint() -> str:
    place = tempfile.TemporaryDirectory()
    atexit.register(place.cleanup)
    return tiny_checkpoint(Path(place.name), "llama", num_hidden_layers=2)


def make_llm() -> LLM:
    llm = LLM(checkpoint(), dtype="float32", policy="full", verify="off", host_memory="32MiB")
    llm.tokenizer.chat_template = TEMPLATE  # type: ignore[union-attr]
    return llm


@functools.cache
def runtime() -> LLM:
    return make_llm()


@functools.cache
def expected_text(prompt: str, max_tokens: int) -> str:
    """Generate the text on an engine that has no other clients."""
    ids = runtime().tokenizer(prompt, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
    return runtime().generate(ids, SamplingParams(max_tokens=max_tokens, temperature=0))[0].outputs[0].text


def random_options(rng: random.Random, store: Path | None) -> ServerOptions:
    return ServerOptions(
        port=0,
        api_keys=rng.choice(((), (KEY,), (KEY, "another"))),
        max_waiting=rng.choice((1, 4, 64)),
        max_body=rng.choice((2048, 1 << 16, 1 << 20)),
        timeout=rng.choice((3.0, 30.0, 30.0)),
        max_connections=rng.choice((4, 8, 16, 64, None)),
        head_timeout=rng.choice((1.0, 2.0, 4.0)),
        send_timeout=rng.choice((0.5, 5.0)),
        grace=rng.choice((1.0, 5.0)),
        documents=store,
    )


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @contextmanager
    def capture(self) -> Iterator[None]:
        levels = {name: logging.getLogger(name).level for name in LOGGERS}
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self)
            logging.getLogger(name).setLevel(logging.INFO)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).removeHandler(self)
                logging.getLogger(name).setLevel(level)

    def check(self) -> None:
        for record in self.records:
            assert record.exc_info is None, logging.Formatter().format(record)
            fields = getattr(record, "fields", {})
            assert fields.get("status", 200) < 500 or fields["status"] == 503, fields
            expected = "timeout graceful shutdown exceeded" in record.getMessage()
            assert record.levelno < logging.ERROR or fields or expected, record.getMessage()

    def requests(self) -> dict[str, dict[str, Any]]:
        found = [getattr(record, "fields", {}) for record in self.records if record.getMessage() == "request"]
        return {fields["id"]: fields for fields in found}


class NormalClient:
    """Client that sends valid requests and checks the responses.

    Attributes:
        tries: Maximum number of connections per request. A server that allows few connections may drop one before the
            request arrives.
    """

    def __init__(self, url: str, rng: random.Random, tries: int = 1) -> None:
        self.port, self.rng, self.tries, self.counts = urlsplit(url).port, rng, tries, Counter[str]()

    def call(self, path: str, body: dict[str, Any], method: str = "POST") -> tuple[int, bytes]:
        """Send a request over a new connection. Return the status and body of the response."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        for tries in range(1, self.tries + 1):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90)
            with closing(connection):
                try:
                    connection.request(method, path, json.dumps(body), headers)
                    answer = connection.getresponse()
                except ConnectionError:
                    if tries == self.tries:
                        raise
                    self.counts["normal replaced"] += 1
                    time.sleep(0.3)
                else:
                    return answer.status, answer.read()
        raise AssertionError

    def send_request(self) -> int:
        rng = self.rng
        words, max_tokens = f"{rng.choice(WORDS)} {rng.randrange(5)}", rng.choice((1, 8, 30))
        chat, stream = rng.random() < 0.5, rng.random() < 0.5
        prompt = f"user: {words}\nassistant: " if chat else words
        body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "stream": stream}
        body |= {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        status, data = self.call(path, body)
        if status == 200:
            error, text = read_events(data) if stream else (None, response_text(json.loads(data)))
            assert error is None or error["type"] in ("timeout_error", "overloaded_error"), error
            expected = expected_text(prompt, max_tokens)
            assert text == expected if error is None else expected.startswith(text), (prompt, text, expected)
            status = 200 if error is None else 408
        else:
            assert status in REFUSALS and json.loads(data)["error"]["message"], (status, data)
        self.counts[f"normal {status}"] += 1
        return status


def response_text(answer: dict[str, Any]) -> str:
    found = ""
    for choice in answer["choices"]:
        message = choice.get("message") or choice.get("delta") or choice
        found += message.get("text") or message.get("content") or ""
    return found


def read_events(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return the error that ended a stream, or None, and the streamed text."""
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    error = next((event["error"] for event in events if "error" in event), None)
    assert error is not None or lines[-1] == "[DONE]", data[-200:]
    return error, "".join(response_text(event) for event in events if "error" not in event)


def attack(url: str, hostile: list[HostileClient], seed: int, tries: int) -> Counter[str]:
    normal = [NormalClient(url, random.Random(seed * 100 + 50 + i), tries) for i in range(2)]
    attack_ended = threading.Event()

    def send_requests(client: NormalClient) -> None:
        sent = 0
        while sent < 3 or not attack_ended.is_set():
            client.send_request()
            sent += 1

    with ThreadPoolExecutor(len(hostile) + len(normal)) as threads:
        attacks = [threads.submit(client.run) for client in hostile]
        requests = [threads.submit(send_requests, client) for client in normal]
        wait(attacks)
        attack_ended.set()
        for one in (*attacks, *requests):
            one.result()
    return sum((client.counts for client in (*hostile, *normal)), Counter[str]())


def wait_idle(engine: AsyncLLM) -> None:
    wait_until(lambda: engine._engine.idle and not engine._clients and engine.load().waiting == 0, IDLE_SECONDS)


def check_empty(engine: AsyncLLM) -> None:
    assert not engine._by_number
    engine._engine.check_integrity()
    engine.llm.runner.check_integrity()
    assert not engine.llm.runner._open and engine.llm.runner.pool.sequence_bytes == 0


def serve_case(seed: int, store: Path | None, log: Log) -> Counter[str]:
    rng = random.Random(seed)
    options = random_options(rng, store)
    engine = AsyncLLM(make_llm(), max_waiting=options.max_waiting, store=None if store is None else store / "kv")
    with ExitStack() as ends, run_asgi_app(make_app(engine, options), options) as (url, server):
        clients = range(rng.randint(2, 5))
        hostile = [HostileClient(url, options, KEY, random.Random(seed * 100 + i)) for i in clients]
        for client in hostile:
            ends.callback(client.disconnect)
        few = options.max_connections is not None and options.max_connections <= FEW_CONNECTIONS
        counts = attack(url, hostile, seed, 5 if few else 1)
        stay = rng.random() < 0.3
        if not stay:
            for client in hostile:
                client.disconnect()
            wait_until(lambda: not server.server_state.connections, IDLE_SECONDS)
            wait_idle(engine)
            last = NormalClient(url, random.Random(seed))
            assert last.send_request() == 200
            for name in SESSIONS:
                status, data = last.call(f"/v1/sessions/{name}", {}, "DELETE")
                assert status == 404 or (store is not None and status == 200), (status, data)
            wait_idle(engine)
            check_empty(engine)
    wait_idle(engine)
    check_empty(engine)
    for client in hostile:
        client.check_abandoned(log.requests())
    return counts + Counter(stayed=int(stay), servers=1)


@functools.cache
def warm_up() -> None:
    options = ServerOptions(port=0, api_keys=(KEY,))
    with run_asgi_app(make_app(AsyncLLM(make_llm()), options), options) as (url, _):
        client = NormalClient(url, random.Random(0))
        for _ in range(3):
            client.send_request()
    gc.collect()


def run_case(seed: int) -> Counter[str]:
    transformers_logging.disable_progress_bar()
    warm_up()
    log = Log()
    with log.capture():
        threads, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
        with tempfile.TemporaryDirectory() as place:
            counts = serve_case(seed, Path(place) if seed % 3 == 0 else None, log)
        gc.collect()
    log.check()
    leaked = [thread for thread in threading.enumerate() if thread not in threads]
    assert not leaked, leaked
    assert psutil.Process().num_fds() <= descriptors, (psutil.Process().num_fds(), descriptors)
    return counts
