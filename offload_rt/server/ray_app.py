"""The same application on a Ray Serve cluster: replicas, each with an engine of its own, behind one proxy.

Requests with one `x-session-id` go to one replica (Serve's ConsistentHashRouter) while it has room; then to the next.
What was said lies in a folder that all replicas share, so that any of them can go on with any conversation; KV rows lie
in a folder of each replica, which the one that takes a dead one's place takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from ..async_llm import AsyncLLM
from ..config import EngineConfig, StoreOptions
from ..errors import StoreError
from ..llm import LLM
from .app import make_app
from .options import ServerOptions

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"

MOST_FOLDERS = 1000
"""Of replicas' KV rows; a store with more is not one that is locked."""


@dataclass(frozen=True)
class Cluster:
    """replicas: engines that run. max_ongoing: requests of one replica at a time; further ones go to the next. cpus,
    gpus: that Ray keeps for each replica."""

    replicas: int = 2
    max_ongoing: int = 64
    cpus: float = 1
    gpus: float = 0


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
    build = _builder(model, config, options, store, store_options)
    deployment = serve.deployment(
        serve.ingress(build)(),
        name="offload-rt",
        num_replicas=cluster.replicas,
        max_ongoing_requests=cluster.max_ongoing,
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        graceful_shutdown_timeout_s=options.grace,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    return deployment.bind()


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
