"""Test the latency of normal requests while other clients misbehave, in each way alone and in all ways at once.

`make stress PART=attack` prints a table. The server runs in its own process with 256 descriptors.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
from support.tiny_models import tiny_checkpoint

STRESS = int(os.environ.get("OFFLOAD_RT_STRESS", "0"))
REQUESTS, HALF_OPEN, DESCRIPTORS = 40, 300, 256
CLIENT_SECONDS = 30
MOST_LOG = 256 << 10
SERVER = """
import sys
from offload_rt import LLM, AsyncLLM
from offload_rt.server.app import make_app
from offload_rt.server.options import ServerOptions
from offload_rt.server.run import bound, serve
options = ServerOptions(port=0, timeout=20)
make = lambda: AsyncLLM(LLM(sys.argv[1], policy="full", verify="off", host_memory="64MiB"), max_waiting=64)
serve(lambda: make_app(make(), options), options, bound(options))
"""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

pytestmark = pytest.mark.skipif(not STRESS, reason="a minute: make stress PART=attack")


def limit_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


@contextmanager
def server(folder: Path, log: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run a server. Yield its port and its process."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder)], stderr=stderr, preexec_fn=limit_descriptors
        )
    try:
        end = time.monotonic() + 60
        while not ((found := re.search(r"127\.0\.0\.1:(\d+)", log.read_text())) and '"loaded"' in log.read_text()):
            assert time.monotonic() < end and process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield int(found[1]), psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def connect(port: int, data: bytes) -> socket.socket:
    """Return a connection that has sent `data`, or as much of it as the server accepted."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.settimeout(5)
    with suppress(OSError):
        found.connect(("127.0.0.1", port))
        found.sendall(data)
    return found


def ask(port: int, path: str) -> tuple[float, str]:
    """Return the duration of one request on a new connection, and its text."""
    begun = time.monotonic()
    try:
        if path == "/health":
            answer = httpx2.get(f"http://127.0.0.1:{port}{path}", timeout=CLIENT_SECONDS)
        else:
            body = {"prompt": "It was a dark night.", "max_tokens": 6, "temperature": 0}
            answer = httpx2.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=CLIENT_SECONDS)
        text = answer.json()["choices"][0]["text"] if path != "/health" else ""
    except (httpx2.HTTPError, KeyError, ValueError) as error:
        text = f"failed: {error!r}"
    return time.monotonic() - begun, text


def measure(port: int, path: str) -> tuple[list[float], set[str]]:
    """Return latencies and the set of texts."""
    taken, texts = [], set()
    end = time.monotonic() + 60
    while len(taken) < REQUESTS and time.monotonic() < end:
        seconds, text = ask(port, path)
        taken.append(seconds)
        texts.add(text)
    return taken, texts


def half_open(port: int, attack: ExitStack) -> None:
    """Open connections that never complete a request head."""
    for _ in range(HALF_OPEN):
        attack.callback(connect(port, HEAD).close)


def silent_reader(port: int, attack: ExitStack) -> None:
    """Ask for a long stream and do not read it."""
    body = b'{"prompt": "It was", "max_tokens": 400, "ignore_eos": true, "stream": true, "n": 4}'
    attack.callback(connect(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body).close)


def large_prompt(port: int, attack: ExitStack) -> None:
    """Send a prompt of 16 MB repeatedly."""
    body = b'{"prompt": "' + b"a " * ((16 << 19) - 100) + b'"}'
    ended = threading.Event()

    def send() -> None:
        while not ended.is_set():
            connection = connect(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            with connection, suppress(OSError):
                connection.recv(4096)

    sender = threading.Thread(target=send)
    sender.start()
    attack.callback(sender.join)
    attack.callback(ended.set)


def everything(port: int, attack: ExitStack) -> None:
    for phase in (half_open, silent_reader, large_prompt):
        phase(port, attack)


PHASES: dict[str, Callable[[int, ExitStack], None]] = {
    "quiet": lambda port, attack: None,
    "half-open connections": half_open,
    "a client that does not read": silent_reader,
    "16 MB prompts": large_prompt,
    "all at once": everything,
}
HEADINGS = ("", "health median ms", "max", "completion median ms", "max", "RSS before MiB", "after", "log bytes")


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def test_normal_traffic_under_attack(tmp_path: Path) -> None:
    folder, log = tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2), tmp_path / "log"
    rows, texts = [row(*HEADINGS), row(*["---"] * len(HEADINGS))], {}
    with server(folder, log) as (port, process):
        ask(port, "/v1/completions")
        for name, phase in PHASES.items():
            rss, logged = process.memory_info().rss >> 20, log.stat().st_size
            with ExitStack() as attack:
                phase(port, attack)
                health, said = measure(port, "/health")
                completions, found = measure(port, "/v1/completions")
            texts[name] = found | said
            times = [f"{1000 * f(taken):.0f}" for taken in (health, completions) for f in (statistics.median, max)]
            rows.append(row(name, *times, rss, process.memory_info().rss >> 20, log.stat().st_size - logged))
    print("\n".join(rows))
    assert all(found == texts["quiet"] for found in texts.values()) and len(texts["quiet"]) == 2, texts
    assert log.stat().st_size < MOST_LOG and "exception" not in log.read_text()
