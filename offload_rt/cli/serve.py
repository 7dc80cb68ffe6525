"""`offload-rt serve`: HTTP server with the OpenAI and Anthropic protocols and a web page."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig, StoreOptions
from ..errors import ConfigError
from ..server.options import ServerOptions
from ..utils.config_fields import option_of
from .common import add_command
from .flags import (
    Groups,
    add_engine_flags,
    add_option,
    add_store_flags,
    engine_config,
    given_options,
    group_of,
    store_options,
)  # fmt: skip

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM

DOCUMENTS = "server"
"""Folder of conversations and responses in the store."""

KEY_VARIABLE = "OFFLOAD_RT_API_KEY"
"""Environment variable for an API key. Unlike a flag, it does not appear in process listings."""


def run(args: argparse.Namespace) -> int:
    """Serve the OpenAI and Anthropic protocols and a web page over HTTP. By default, only local clients can connect
    (see --host)."""
    options, config, store = _options(args), engine_config(args, progress=True), store_options(args)
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if not importlib.util.find_spec(name)]:
        raise ConfigError(f"serve needs {', '.join(missing)}: pip install 'offload-rt[serve]'")
    if args.ray is not None:
        return _run_on_ray(args, options, config, store)
    from ..server.run import bound, serve

    def make_engine() -> AsyncLLM:
        from ..async_llm import AsyncLLM
        from ..llm import LLM

        llm = LLM(args.model, config)
        return AsyncLLM(llm, max_waiting=options.max_waiting, store=args.store, store_options=store)

    serve(make_engine, options, bound(options))
    return 0


def _run_on_ray(args: argparse.Namespace, options: ServerOptions, config: EngineConfig, store: StoreOptions) -> int:
    if not importlib.util.find_spec("ray"):
        raise ConfigError("--ray needs ray: pip install 'offload-rt[ray]'")
    from ..server.ray_app import Cluster, ray_app, serve_on_ray

    folder = Path(args.store).expanduser().resolve() if args.store else None
    cluster = Cluster(args.ray, args.ray_max, gpus=0 if config.device == "cpu" else 1)
    serve_on_ray(ray_app(args.model, config, options, folder, store, cluster), options)
    return 0


def _options(args: argparse.Namespace) -> ServerOptions:
    given = given_options(args, ServerOptions, "server_")
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    if from_environment := os.environ.get(KEY_VARIABLE):
        given["api_keys"] = (*given.get("api_keys", ()), from_environment)
    documents = Path(args.store).expanduser().resolve() / DOCUMENTS if args.store else None
    return ServerOptions(documents=documents, **given)


def add(commands: Any) -> None:
    parser = add_command(commands, "serve", run)
    groups: Groups = {}
    for field in fields(ServerOptions):
        if "option" in field.metadata:
            group = group_of(parser, groups, option_of(field).group or "server")
            add_option(group, ServerOptions, field, prefix="server_")
    add = groups["server"].add_argument
    add("--ray", type=int, metavar="N", help="N replicas on a Ray cluster (RAY_ADDRESS, or a new local one)")
    add("--ray-max", type=int, metavar="N", help="with --ray: maximum number of replicas for autoscaling")
    add_store_flags(parser, required=False)
    add_engine_flags(parser)
