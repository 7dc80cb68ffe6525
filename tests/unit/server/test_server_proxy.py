"""Test the proxy that forwards requests to an upstream process, and how a Ray replica is chosen."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.routing import Mount
from starlette.types import Message
from support.serving import ScriptedEngine, run_asgi_app, run_server, wait_until

from offload_rt.errors import ConfigError
from offload_rt.server.app import make_app
from offload_rt.server.options import ServerOptions
from offload_rt.server.proxy import PREFIX, ForwardedRequest, Proxy, balance_by_load, route_key, run_app

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello?"}]}
OPTIONS = ServerOptions(port=0, grace=5, max_body=10_000)


class FlakyUpstream:
    """Upstream whose connection breaks after `breaks_after` messages."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.app = make_app(engine, OPTIONS)  # type: ignore[arg-type]
        self.breaks_after: int | None = None
        self.keys: list[str] = []

    async def ask(self, asked: ForwardedRequest, key: str) -> AsyncIterator[Message]:
        self.keys.append(key)
        passed = 0
        answers = run_app(self.app, asked)
        try:
            async for message in answers:
                if passed == self.breaks_after:
                    raise ConnectionError("the replica died")
                passed += 1
                yield message
        finally:
            await answers.aclose()  # type: ignore[attr-defined]


@pytest.fixture
def upstream(engine: ScriptedEngine) -> FlakyUpstream:
    return FlakyUpstream(engine)


@pytest.fixture
def http(upstream: FlakyUpstream) -> Iterator[httpx2.Client]:
    app = Starlette(routes=[Mount("/", app=Proxy(upstream.ask, OPTIONS.max_body, OPTIONS.timeout))])
    with run_asgi_app(app) as (url, _), httpx2.Client(base_url=url) as client:
        yield client


def test_answers_equal_those_of_the_application(http: httpx2.Client, engine: ScriptedEngine) -> None:
    def parts(client: httpx2.Client) -> list[Any]:
        whole = client.post("/v1/chat/completions", json=ASK).json()
        streamed = client.post("/v1/chat/completions", json=ASK | {"stream": True})
        deltas = [json.loads(line[6:])["choices"] for line in streamed.text.splitlines() if line.startswith("data: {")]
        page, wrong = client.get("/"), client.post("/v1/chat/completions", json={"messages": 5})
        models = client.get("/v1/models", params={"x": "y"}).json()["data"][0]["id"]
        return [whole["choices"], deltas, streamed.headers["content-type"], page.text, wrong.status_code, models]

    with run_server(engine) as url, httpx2.Client(base_url=url) as straight:
        expected = parts(straight)
    assert parts(http) == expected and len(expected[1]) > 5
    assert http.post("/v1/chat/completions", content=b"x" * 20_000).status_code == 413


def test_a_disconnected_client_ends_its_request(http: httpx2.Client, engine: ScriptedEngine) -> None:
    engine.pause, aborted = 0.05, engine.aborted
    try:
        with http.stream("POST", "/v1/chat/completions", json=ASK | {"stream": True}) as answer:
            next(answer.iter_lines())
        wait_until(lambda: engine.aborted == aborted + 1)
    finally:
        engine.pause = 0.0


def test_a_lost_replica_is_a_503_or_a_closed_connection(http: httpx2.Client, upstream: FlakyUpstream) -> None:
    upstream.breaks_after = 0  # before the response begins
    answer = http.post("/v1/chat/completions", json=ASK)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "replica_lost"
    upstream.breaks_after = 3  # during the response
    with pytest.raises(httpx2.RemoteProtocolError):
        http.post("/v1/chat/completions", json=ASK | {"stream": True})


def key_of(body: Any, **headers: str) -> str:
    return route_key(
        Headers({name.replace("_", "-"): value for name, value in headers.items()}), json.dumps(body).encode()
    )


LONG = "It was a dark night, and the river was high. " * 60


def test_requests_with_equal_routing_keys() -> None:
    assert key_of({}, x_session_id="a") == key_of(ASK, x_session_id="a") != key_of(ASK, x_session_id="b")
    named = {"session": "novel"}
    assert (
        key_of(named, authorization="one")
        == key_of(ASK | named, authorization="one")
        != key_of(named, authorization="two")
    )
    cached = {"prompt_cache_key": "novel"}
    assert key_of({"prompt": LONG} | cached) == key_of(cached) != key_of(named)
    one, other = ([{"role": "user", "content": LONG + end}] for end in ("Who?", "Why?"))
    parts = [{"role": "user", "content": [{"type": "text", "text": LONG}]}]
    assert key_of({"messages": one}) == key_of({"messages": other}) == key_of({"messages": parts}) != ""
    short = LONG[:500]
    assert key_of({"prompt": f"{short} Who?"}) == key_of({"prompt": f"{short} Why not?"}) != key_of({"prompt": LONG})
    assert key_of({"messages": one}) != key_of({"system": "Be brief.", "messages": one})
    assert key_of({"prompt": LONG}) == key_of({"prompt": [LONG, "x"]}) and key_of({"input": LONG})
    assert key_of({"prompt": [7] * PREFIX}) == key_of({"prompt": [7] * PREFIX + [8]}) != ""
    assert key_of({"prompt": [8, *[7] * PREFIX]}) != key_of({"prompt": [7] * PREFIX})


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 10_000, b"[1]", b"\xff", json.dumps(ASK).encode()])
def test_requests_without_a_routing_key(body: bytes) -> None:
    assert route_key(Headers({}), body) == ""


def test_a_loaded_replica_is_not_preferred() -> None:
    assert balance_by_load([4, 0, 1], 4) == [0, 1, 2], "the difference is within the limit"
    assert balance_by_load([5, 0, 1], 4) == [1, 2, 0]
    assert balance_by_load([0, 9], 4) == [0, 1]
    assert balance_by_load([], 4) == []


def test_cluster_sizes_are_options_of_ray_serve() -> None:
    from offload_rt.server.ray_app import Cluster

    assert Cluster(2).size == {"num_replicas": 2}
    scaling = Cluster(2, 5).size["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (2, 5)
    for wrong in ((0,), (3, 2)):
        with pytest.raises(ConfigError, match="replicas"):
            Cluster(*wrong)
