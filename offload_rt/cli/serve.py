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
from .engine_flags import add_engine_flags, engine_config
from .option_flags import add_option, given_options
from .store_flags import add_store_flags, store_options

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
    given = given_options(args, [field.name for field in fields(ServerOptions)], "server_")
    keys = given.pop("api_keys", ())
    if from_environment := os.environ.get(KEY_VARIABLE):
        keys = (*keys, from_environment)
    given |= {name: tuple(given[name]) for name in ("cors_origins", "allowed_hosts") if name in given}
    documents = Path(args.store).expanduser().resolve() / DOCUMENTS if args.store else None
    return ServerOptions(api_keys=tuple(keys), documents=documents, **given)


def add(commands: Any) -> None:
    parser = add_command(commands, "serve", run)
    groups: dict[str, Any] = {}
    for field in fields(ServerOptions):
        if "option" in field.metadata:
            title = option_of(field).group or "server"
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            add_option(groups[title], ServerOptions, field, prefix="server_")
    several = (
        ("--api-key", "api_keys", "KEY", f"require this API key; may be repeated; also from {KEY_VARIABLE}"),
        ("--cors-origin", "cors_origins", "URL", "allow browser requests from this origin; may be repeated"),
        (
            "--allowed-host",
            "allowed_hosts",
            "NAME",
            "additional host name that a local server accepts; may be repeated",
        ),
    )
    for flag, name, metavar, help in several:
        groups["server"].add_argument(flag, dest=f"server_{name}", action="append", metavar=metavar, help=help)
    groups["server"].add_argument(
        "--ray", type=int, metavar="N", help="N replicas on a Ray cluster (RAY_ADDRESS, or a new local one)"
    )
    groups["server"].add_argument(
        "--ray-max", type=int, metavar="N", help="with --ray: maximum number of replicas for autoscaling"
    )
    add_store_flags(parser, required=False)
    add_engine_flags(parser)
