"""Run the application on a Ray Serve cluster: one proxy deployment, and replicas with one engine each.

Consistent hashing routes requests with the same `x-session-id`, session or prompt prefix to the same replica, unless
the load of that replica is much higher than that of others. All replicas share a folder of conversations. Each replica
has its own KV folder, and a replica that takes its place reuses this folder.
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

from ..async_llm import AsyncLLM
from ..config import EngineConfig
from ..errors import ConfigError, StoreError
from ..llm import LLM
from ..storage.options import StoreOptions
from .app import make_app
from .options import ServerOptions
from .proxy import ForwardedRequest, Proxy, run_app

ROUTER = "offload_rt.server.ray_router.BalancedRouter"

ENGINE, PROXY = "engine", "proxy"

MAX_ONGOING = {ENGINE: 64, PROXY: 10_000}
"""For each deployment, the maximum number of running requests per replica. In the proxy, requests only wait."""

MAX_FOLDERS = 1000
"""Number of KV folders that a replica tries when it looks for a free one. It must exceed the number of replicas."""


SCALING = {"target_ongoing_requests": 8, "upscale_delay_s": 10, "downscale_delay_s": 300}
"""Autoscaling options. If there are more than `target_ongoing_requests` per replica, replicas are added.

Delays are in seconds.
"""


@dataclass(frozen=True)
class Cluster:
    """Number of replicas and the resources of each. Raises ConfigError for invalid values.

    Attributes:
        replicas: Number of replicas. If `max_replicas` is set, this is the minimum.
        max_replicas: Maximum number of replicas. None disables autoscaling.
        gpus: Number of GPUs that Ray reserves for each replica, in addition to one CPU.
    """

    replicas: int = 2
    max_replicas: int | None = None
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.replicas < 1 or (self.max_replicas is not None and self.max_replicas < self.replicas):
            most = "" if self.max_replicas is None else f" to {self.max_replicas}"
            raise ConfigError(f"{self.replicas}{most} replicas: --ray must be at least 1, and --ray-max at least --ray")

    @property
    def size(self) -> dict[str, Any]:
        if self.max_replicas is None:
            return {"num_replicas": self.replicas}
        return {"autoscaling_config": SCALING | {"min_replicas": self.replicas, "max_replicas": self.max_replicas}}


class Replica:
    """Ray deployment class that has one engine and runs the application on forwarded requests."""

    def __init__(self, build: Callable[[], FastAPI]) -> None:
        self._app = build()

    async def answer(self, forwarded: ForwardedRequest) -> AsyncIterator[Message]:
        async for message in run_app(self._app, forwarded):
            yield message

    async def __del__(self) -> None:
        """Save the sessions. Ray Serve awaits this method when it stops the replica."""
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
    """Return the application for `ray.serve.run`. All nodes of the cluster must have access to the folder `store`."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    cluster = cluster or Cluster()
    engines = serve.deployment(
        Replica,
        name=ENGINE,
        max_ongoing_requests=MAX_ONGOING[ENGINE],
        ray_actor_options={"num_cpus": 1, "num_gpus": cluster.gpus},
        graceful_shutdown_timeout_s=options.grace,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **cluster.size,
    )
    proxy = serve.deployment(
        serve.ingress(lambda: _proxy(options))(),
        name=PROXY,
        max_ongoing_requests=MAX_ONGOING[PROXY],
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.grace,
    )
    return proxy.bind(
        engines.bind(lambda: make_app(_engine(LLM(model, config), options, store, store_options), options))
    )


def _proxy(options: ServerOptions) -> Starlette:
    from ray import serve

    handle = serve.get_deployment_handle(ENGINE).options(stream=True)

    async def ask(forwarded: ForwardedRequest, route_key: str) -> AsyncIterator[Message]:
        # If a request has no session id, Serve's router chooses any replica.
        answers = (handle.options(session_id=route_key) if route_key else handle).answer.remote(forwarded)
        try:
            async for message in answers:
                yield message
        finally:
            answers.cancel()

    return Starlette(routes=[Mount("/", app=Proxy(ask, options.max_body, options.timeout))])


def serve_on_ray(application: Any, options: ServerOptions) -> None:
    """Run the application until the process is stopped.

    The environment variable RAY_ADDRESS selects the cluster. If it is not set, a local cluster is started.
    """
    import ray
    from ray import serve

    ray.init(ignore_reinit_error=True)
    serve.start(http_options={"host": options.host, "port": options.port})
    serve.run(application, name="offload-rt", blocking=True)


def _engine(llm: LLM, options: ServerOptions, store: Path | None, store_options: StoreOptions | None) -> AsyncLLM:
    if store is None:
        return AsyncLLM(llm, max_waiting=options.max_waiting)
    for number in range(MAX_FOLDERS):
        with suppress(StoreError):  # a running replica has locked this folder
            folder = store / f"replica-{number}"
            return AsyncLLM(llm, max_waiting=options.max_waiting, store=folder, store_options=store_options)
    raise StoreError(f"cannot open any of {MAX_FOLDERS:,} KV folders below {str(store)!r}: check its permissions")
