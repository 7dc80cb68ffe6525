"""The same application on a Ray Serve cluster: a door that takes requests, before replicas with an engine each.

Requests with one `x-session-id`, of one session or with one beginning go to one replica, by Serve's consistent
hashing, unless it has more to do than the others. What was said lies in a folder that all replicas share, so that any
of them can go on with any conversation; KV rows lie in a folder of each replica, which the one that takes a dead one's
place takes over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Message

from ...async_llm import AsyncLLM
from ...config import EngineConfig, StoreOptions
from ...errors import ConfigError, StoreError
from ...llm import LLM
from ..app import make_app
from ..forwarding import Asked, Behind, Door
from ..options import ServerOptions

ROUTER = "offload_rt.server.ray.router.AffinityRouter"

ENGINE, DOOR = "engine", "door"
"""Names of the deployments."""

MOST_AT_THE_DOOR = 10_000
"""Requests that the door has under way; it only waits for the replicas."""

MOST_FOLDERS = 1000
"""Of replicas' KV rows; a store with more is not one that is locked."""


@dataclass(frozen=True)
class Cluster:
    """replicas: engines that run; where `most_replicas` is given, at least, and up to that many while each has over
    `target_ongoing` requests under way. max_ongoing: requests of one replica at a time; further ones go to the next.
    most_ahead: requests that one replica may have more than another before what it has of a prompt counts no more.
    cpus, gpus: that Ray keeps for each replica. upscale_delay, downscale_delay: seconds for which there must be more or
    less to do before replicas are added or ended. Raises ConfigError."""

    replicas: int = 2
    most_replicas: int | None = None
    target_ongoing: float = 8
    upscale_delay: float = 10
    downscale_delay: float = 300
    max_ongoing: int = 64
    most_ahead: int = 4
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.replicas < 1 or (self.most_replicas is not None and self.most_replicas < self.replicas):
            most = "" if self.most_replicas is None else f" to {self.most_replicas}"
            raise ConfigError(f"a cluster of {self.replicas}{most} replicas: give at least 1, and no fewer at most")

    @property
    def size(self) -> dict[str, Any]:
        """What a deployment is told of how many replicas it has."""
        if self.most_replicas is None:
            return {"num_replicas": self.replicas}
        scaling = {
            "min_replicas": self.replicas,
            "max_replicas": self.most_replicas,
            "target_ongoing_requests": self.target_ongoing,
            "upscale_delay_s": self.upscale_delay,
            "downscale_delay_s": self.downscale_delay,
        }
        return {"autoscaling_config": scaling}


class Replica:
    """A deployment's class: the application over an engine of its own, which answers what the door passes on."""

    def __init__(self, build: Callable[[], FastAPI]) -> None:
        self._app = build()
        self._behind = Behind(self._app)

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        """What the application sends."""
        async for message in self._behind.answer(asked):
            yield message

    async def __del__(self) -> None:
        """Serve awaits it when the replica ends: sessions are saved."""
        async with self._app.router.lifespan_context(self._app):
            pass


def ray_app(
    model: str,
    config: EngineConfig,
    options: ServerOptions,
    store: Path | None = None,
    store_options: StoreOptions | None = None,
    cluster: Cluster | None = None,
) -> Any:
    """The application for `ray.serve.run`. `store` must be a folder that all nodes see."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    cluster = cluster or Cluster()
    engines = serve.deployment(
        Replica,
        name=ENGINE,
        max_ongoing_requests=cluster.max_ongoing,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        graceful_shutdown_timeout_s=options.grace,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"most_ahead": cluster.most_ahead}
        ),
        **cluster.size,
    )
    door = serve.deployment(
        serve.ingress(lambda: _door(options))(),
        name=DOOR,
        max_ongoing_requests=MOST_AT_THE_DOOR,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.grace,
    )
    return door.bind(engines.bind(_builder(model, config, options, store, store_options)))


def _door(options: ServerOptions) -> Starlette:
    """What the door's process runs: whatever comes is asked of a replica."""
    from ray import serve

    handle = serve.get_deployment_handle(ENGINE).options(stream=True)

    async def ask(asked: Asked, affinity: str) -> AsyncIterator[Message]:
        """Where nothing is shared there is no session id, and Serve's router takes any replica."""
        answers = (handle.options(session_id=affinity) if affinity else handle).answer.remote(asked)
        try:
            async for message in answers:
                yield message
        finally:
            answers.cancel()

    return Starlette(routes=[Mount("/", app=Door(ask, options.max_body, options.timeout))])


def serve_on_ray(application: Any, options: ServerOptions) -> None:
    """Runs the application on the cluster of RAY_ADDRESS, or on a new one of this machine alone, until the process is
    told to end."""
    import ray
    from ray import serve

    ray.init(ignore_reinit_error=True)
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(application, name="offload-rt", blocking=True)


def _builder(
    model: str, config: EngineConfig, options: ServerOptions, store: Path | None, store_options: StoreOptions | None
) -> Callable[[], FastAPI]:
    """What each replica calls in its own process."""

    def build() -> FastAPI:
        llm = LLM(model, config)
        return make_app(_engine(llm, options, store, store_options), options)

    return build


def _engine(llm: LLM, options: ServerOptions, store: Path | None, store_options: StoreOptions | None) -> AsyncLLM:
    """An engine over the first folder of rows that no living replica has. Raises StoreError where none can be used."""
    if store is None:
        return AsyncLLM(llm, max_waiting=options.max_waiting)
    for number in range(MOST_FOLDERS):
        with suppress(StoreError):  # a living replica writes it
            folder = store / f"replica-{number}"
            return AsyncLLM(llm, max_waiting=options.max_waiting, store=folder, store_options=store_options)
    raise StoreError(
        f"none of {MOST_FOLDERS:,} folders for KV rows below {str(store)!r} can be opened: look at its rights"
    )
