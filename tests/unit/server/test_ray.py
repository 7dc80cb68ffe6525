"""Test routing and killed processes with two replicas and two batch engines on a local Ray cluster.

The tests need the environment variable OFFLOAD_RT_STRESS and the package ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from support.serving import TEMPLATE
from support.tiny_models import tiny_checkpoint, tiny_prompt

from offload_rt.cli import main
from offload_rt.config import EngineConfig
from offload_rt.server.options import ServerOptions

if not os.environ.get("OFFLOAD_RT_STRESS"):
    pytest.skip("a cluster, for minutes: make stress PART=ray", allow_module_level=True)
pytest.importorskip("ray.data", reason="ray is not installed: pip install '.[ray]'")
pytestmark = pytest.mark.filterwarnings("default")  # for warnings of ray

LONG = "It was a dark night, and the river was high. " * 12


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import ray
    from ray import serve

    from offload_rt.server.ray_app import Cluster, ray_app

    folder = Path(tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    store = tmp_path_factory.mktemp("store")
    options = ServerOptions(documents=store / "server", grace=5)
    config = EngineConfig(policy="full", device="cpu", verify="off", host_memory="32MiB")
    ray.init(num_cpus=6, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 8417})
    serve.run(ray_app(str(folder), config, options, store, None, Cluster(replicas=2)), name="offload-rt")
    yield "http://127.0.0.1:8417"
    serve.shutdown()
    ray.shutdown()


def replicas() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if line.startswith("ray::ServeReplica:offload-rt:engine"):
            found.append(process)
    return found


def complete(url: str, prompt: str, tokens: int = 4) -> httpx2.Response:
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx2.post(f"{url}/v1/completions", json=asked, timeout=120)


def cached_tokens_of_completion(answer: httpx2.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def send_at_once(ask: Callable[[], httpx2.Response], count: int) -> list[httpx2.Response]:
    with ThreadPoolExecutor(count) as pool:
        return [each.result() for each in [pool.submit(ask) for _ in range(count)]]


def test_requests_go_to_the_replica_with_their_prefix_except_under_load(url: str) -> None:
    beginnings = [f"{i}. {LONG}" for i in range(6)]
    for beginning in beginnings:
        cached_tokens_of_completion(complete(url, beginning))
    assert all(cached_tokens_of_completion(complete(url, f"{beginning} Who?")) > 100 for beginning in beginnings)
    answers = send_at_once(lambda: complete(url, f"{beginnings[0]} Who?", 100), 24)
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    computed = [answer for answer in answers if cached_tokens_of_completion(answer) < 64]
    print(f"{len(computed)} of {len(answers)} requests computed the beginning again: on the other replica")
    assert 1 <= len(computed) <= 12


def respond(url: str, session: str, text: str, before: str | None = None) -> httpx2.Response:
    asked: dict[str, Any] = {"input": text, "max_output_tokens": 4, "temperature": 0}
    asked |= {"previous_response_id": before} if before else {}
    return httpx2.post(f"{url}/v1/responses", json=asked, headers={"x-session-id": session}, timeout=120)


def cached_tokens_of_response(answer: httpx2.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["input_tokens_details"]["cached_tokens"])


def test_sessions_keep_their_replica_and_survive_its_death(url: str) -> None:
    texts = {f"s{i}": f"{i} {LONG}" for i in range(8)}
    first = {name: respond(url, name, text) for name, text in texts.items()}
    assert all(cached_tokens_of_response(answer) < 64 for answer in first.values()), "the prompts share no prefix"
    second = {name: respond(url, name, "Go on.", first[name].json()["id"]) for name in texts}
    assert all(cached_tokens_of_response(answer) > 100 for answer in second.values()), (
        "a session stays on the replica with its KV"
    )
    stream = {"messages": [{"role": "user", "content": "Hm?"}], "max_tokens": 8, "stream": True}
    streamed = httpx2.post(f"{url}/v1/chat/completions", json=stream, timeout=60)
    assert streamed.text.rstrip().endswith("data: [DONE]")
    pids = {process.pid for process in replicas()}
    assert len(pids) == 2

    results: list[tuple[str, Any]] = []
    ended = threading.Event()

    def send_requests(name: str) -> None:
        while not ended.is_set():
            try:
                results.append((name, respond(url, name, "And?", second[name].json()["id"]).status_code))
            except httpx2.HTTPError as error:
                results.append((name, type(error).__name__))

    threads = [threading.Thread(target=send_requests, args=(name,)) for name in texts]
    for thread in threads:
        thread.start()
    time.sleep(3)
    victim = min(pids)
    os.kill(victim, signal.SIGKILL)
    deadline = time.monotonic() + 180
    while victim in (running := {process.pid for process in replicas()}) or len(running) < 2:
        assert time.monotonic() < deadline, "the killed replica was not replaced"
        time.sleep(1)
    time.sleep(10)
    ended.set()
    for thread in threads:
        thread.join(150)
        assert not thread.is_alive(), "an answer was lost silently"
    outcomes = {outcome for _, outcome in results}
    print(f"{len(results)} requests, outcomes {[(o, sum(each == o for _, each in results)) for o in outcomes]}")
    good = sum(outcome == 200 for _, outcome in results)
    known = {200, 500, 502, 503, "ReadError", "RemoteProtocolError", "ConnectError"}
    assert good > 0.5 * len(results) and outcomes <= known
    # Every conversation must continue with its earlier answers on any replica.
    for name in texts:
        again = respond(url, name, "And?", second[name].json()["id"])
        assert again.status_code == 200
        whole = [
            {"role": "user", "content": texts[name]},
            {"role": "assistant", "content": text_of(first[name])},
            {"role": "user", "content": "Go on."},
            {"role": "assistant", "content": text_of(second[name])},
            {"role": "user", "content": "And?"},
        ]
        fresh = httpx2.post(
            f"{url}/v1/chat/completions", json={"messages": whole, "max_tokens": 4, "temperature": 0}, timeout=60
        )
        assert fresh.json()["choices"][0]["message"]["content"] == text_of(again)


def text_of(answer: httpx2.Response) -> str:
    return "".join(part["text"] for item in answer.json()["output"] for part in item["content"])


FAMILIES, EACH = 8, 4


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def start_batch(model: str, folder: Path) -> subprocess.Popen[bytes]:
    flags = ["--policy", "full", "--device", "cpu", "--max-new-tokens", "300", "--temperature", "0", "--at-once", "4"]
    arguments = ["batch", model, str(folder / "in"), str(folder / "out"), "--ray", "2", *flags]
    return subprocess.Popen([sys.executable, "-m", "offload_rt", *arguments])


def wait_for(process: subprocess.Popen[bytes], path: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or len(lines(path)) < count:
        assert process.poll() is None and time.monotonic() < deadline, "the command has ended, or makes no progress"
        time.sleep(0.05)


def engine_processes(parent: int) -> list[psutil.Process]:
    below = psutil.Process(parent).children(recursive=True)
    return [one for one in below if " ".join(one.cmdline()).startswith("ray::MapWorker")]


def test_a_killed_batch_loses_and_repeats_no_request(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2, max_position_embeddings=4096)
    beginnings = [tiny_prompt(150, seed=i) for i in range(FAMILIES)]
    requests = [
        {"id": f"{i} {j}", "prompt": beginning + tiny_prompt(9, seed=100 + j), "ignore_eos": True}
        for j in range(EACH)
        for i, beginning in enumerate(beginnings)
    ]
    (tmp_path / "in").write_text("".join(json.dumps(each) + "\n" for each in requests), encoding="utf-8")
    out = tmp_path / "out"
    command = start_batch(model, tmp_path)
    wait_for(command, out, EACH)
    working = engine_processes(command.pid)
    assert len(working) == 2
    working[0].send_signal(signal.SIGKILL)
    wait_for(command, out, len(lines(out)) + 2 * EACH)
    assert len(engine_processes(command.pid)) == 2, "the killed engine is replaced"
    command.kill()
    command.wait()
    done = lines(out)
    assert EACH < len(done) < len(requests)
    assert start_batch(model, tmp_path).wait(300) == 0
    found = lines(out)
    assert found[: len(done)] == done and sorted(each["id"] for each in found) == sorted(r["id"] for r in requests)
    order = [each["id"].split()[0] for each in found]
    assert all(len(set(order[i : i + EACH])) == 1 for i in range(0, len(order), EACH)), (
        "requests with a common prefix are adjacent"
    )
    alone = tmp_path / "alone"
    flags = ["--policy", "full", "--max-new-tokens", "300", "--temperature", "0"]
    assert main(["batch", model, str(tmp_path / "in"), str(alone), *flags]) == 0
    assert {each["id"]: each for each in lines(alone)} == {each["id"]: each for each in found}
