"""Latency of normal requests while other clients misbehave. `make stress PART=attack` prints a table.

The server runs in a process of its own with 256 descriptors.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
from support.tiny_models import tiny_checkpoint

STRESS = int(os.environ.get("OFFLOAD_RT_STRESS", "0"))
REQUESTS, HALF_OPEN, DESCRIPTORS = 40, 300, 256
MOST_LOG = 256 << 10
SERVER = """
import sys
from offload_rt import LLM, AsyncLLM
from offload_rt.server.options import ServerOptions
from offload_rt.server.run import bound, serve
options = ServerOptions(port=0, timeout=20)
make = lambda: AsyncLLM(LLM(sys.argv[1], policy="full", verify="off", host_memory="64MiB"), max_waiting=64)
serve(make, options, bound(options))
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
    """Return a connection that has sent `data`, or as much of it as was taken."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.settimeout(5)
    with suppress(OSError):
        found.connect(("127.0.0.1", port))
        found.sendall(data)
    return found


def ask(port: int, path: str) -> tuple[float, str]:
    """Return how long one request took over a new connection, and its text."""
    begun = time.monotonic()
    try:
        if path == "/health":
            answer = httpx2.get(f"http://127.0.0.1:{port}{path}", timeout=10)
        else:
            body = {"prompt": "It was a dark night.", "max_tokens": 6, "temperature": 0}
            answer = httpx2.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=10)
        text = answer.json()["choices"][0]["text"] if path != "/health" else ""
    except (httpx2.HTTPError, KeyError, ValueError) as error:
        text = f"failed: {type(error).__name__}"
    return time.monotonic() - begun, text


def measure(port: int, path: str) -> tuple[list[float], set[str]]:
    """Return sorted latencies and all texts."""
    taken, texts = [], set()
    end = time.monotonic() + 60
    while len(taken) < REQUESTS and time.monotonic() < end:
        seconds, text = ask(port, path)
        taken.append(seconds)
        texts.add(text)
    return sorted(taken), texts


def row(name: str, taken: list[float], process: psutil.Process, log_bytes: int) -> str:
    numbers = [statistics.median(taken), taken[max(0, int(len(taken) * 0.99) - 1)], taken[-1]]
    times = " | ".join(f"{1000 * seconds:.0f}" for seconds in numbers)
    return f"| {name} | {times} | {process.memory_info().rss >> 20} | {log_bytes} |"


def test_normal_traffic_under_attack(tmp_path: Path) -> None:
    folder, log = tiny_checkpoint(tmp_path / "tiny", "llama", num_hidden_layers=2), tmp_path / "log"
    with server(folder, log) as (port, process), ExitStack() as attack:
        ask(port, "/v1/completions")
        quiet, texts = measure(port, "/v1/completions")
        rows = ["| | median ms | p99 ms | max ms | RSS MiB | log bytes |", "|---|---|---|---|---|---|"]
        rows.append(row("quiet, completions", quiet, process, log.stat().st_size))
        rows.append(row("quiet, health", measure(port, "/health")[0], process, log.stat().st_size))
        before = log.stat().st_size
        for _ in range(HALF_OPEN):
            attack.callback(connect(port, HEAD).close)
        body = b'{"prompt": "It was", "max_tokens": 400, "ignore_eos": true, "stream": true, "n": 4}'
        attack.callback(connect(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body).close)
        large = b'{"prompt": "' + b"a " * ((16 << 19) - 100) + b'"}'
        sender = threading.Thread(
            target=lambda: connect(port, HEAD + b"Content-Length: %d\r\n\r\n" % len(large) + large).close()
        )
        sender.start()
        attack.callback(sender.join)
        health, health_texts = measure(port, "/health")
        rows.append(row("attack, health", health, process, log.stat().st_size - before))
        attacked, attacked_texts = measure(port, "/v1/completions")
        rows.append(row("attack, completions", attacked, process, log.stat().st_size - before))
    print("\n".join(rows))
    print(f"texts: quiet {len(texts)}, under attack {attacked_texts - texts}, health {health_texts}")
    assert texts == attacked_texts and len(texts) == 1
    assert health_texts == {""} and health[-1] < 2
    assert log.stat().st_size - before < MOST_LOG
