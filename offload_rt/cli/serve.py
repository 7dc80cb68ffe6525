"""`offload-rt serve`: HTTP server with the OpenAI and Anthropic protocols and a web page."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import shutil
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import EngineConfig
from ..errors import ConfigError, StoreError, StoreInUseError
from ..server.options import ServerOptions
from ..storage.options import StoreOptions
from ..utils.config_fields import option_of
from ..utils.extras import install_command
from .common import add_command, check_before_loading, check_store, default_store
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
    from fastapi import FastAPI

    from ..async_llm import AsyncLLM
    from ..llm import LLM

DEFAULT_LIMIT = 32 << 30
"""Default size limit in bytes of the default store."""

_log = logging.getLogger("offload_rt.server")

KEY_VARIABLE = "OFFLOAD_RT_API_KEY"
"""Environment variable for an API key. Unlike the value of a flag, its value does not appear in process listings."""


def run(args: argparse.Namespace) -> int:
    """Serve the OpenAI and Anthropic protocols and a web page over HTTP. By default, only local clients can connect
    (see --host)."""
    options, config = _options(args), engine_config(args, progress=True)
    if options.max_engines > 1 and config.device_memory is not None:
        raise ConfigError(
            f"--max-engines {options.max_engines} and --device-memory cannot be combined, because device memory is "
            "planned for one policy: remove one of them"
        )
    store = _store(args)
    if missing := [name for name in ("fastapi", "uvicorn", "prometheus_client") if not importlib.util.find_spec(name)]:
        raise ConfigError(f"serve needs {', '.join(missing)}: {install_command('serve')}")
    if args.ray is not None:
        return _run_on_ray(args, options, config, store)
    from ..server.run import bind_socket, serve

    check_before_loading(args.model, config, text=False)

    def make_app() -> FastAPI:
        from ..utils.progress import report

        report("importing torch and transformers")
        from ..llm import LLM
        from ..server.app import make_app

        engine, documents = _engine(LLM(args.model, config), options.max_waiting, store)
        return make_app(engine, replace(options, documents=documents))

    serve(make_app, options, bind_socket(options))
    return 0


@dataclass(frozen=True)
class _Store:
    folder: Path | None  # None if nothing is stored on disk
    options: StoreOptions
    chosen: bool  # whether the user has set `--store` or `--no-store`

    @property
    def documents(self) -> Path | None:
        from ..storage.folder import SERVER_FOLDER

        return None if self.folder is None else self.folder / SERVER_FOLDER


def _store(args: argparse.Namespace) -> _Store:
    options = store_options(args)
    if args.no_store:
        if args.store:
            raise ConfigError("--store and --no-store cannot be combined: remove one of them")
        return _Store(None, options, True)
    if args.store:
        return _Store(check_store(args.store).resolve(), options, True)
    folder = default_store()
    if options.limit is None:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        options = replace(options, limit=min(DEFAULT_LIMIT, shutil.disk_usage(there).total // 10))
    return _Store(folder, options, False)


def _engine(llm: LLM, max_waiting: int, store: _Store) -> tuple[AsyncLLM, Path | None]:
    """Return the engine, and the folder for stored conversations and responses.

    If another process writes to the default store, the store is opened read-only. If the default store cannot be used
    at all, the server starts without a store.
    """
    from ..async_llm import AsyncLLM

    open_engine = partial(AsyncLLM, llm, max_waiting=max_waiting, store_options=store.options)
    try:
        return open_engine(store=store.folder), store.documents
    except StoreInUseError as error:
        if store.chosen:
            raise
        _log.warning("the default store is opened read-only, and sessions are not available: %s", error)
        return open_engine(store=store.folder, read_only=True), None
    except (ConfigError, StoreError) as error:
        if store.chosen:
            raise
        _log.warning("nothing is stored on disk: %s", error)
        return open_engine(), None


def _run_on_ray(args: argparse.Namespace, options: ServerOptions, config: EngineConfig, store: _Store) -> int:
    if not importlib.util.find_spec("ray"):
        raise ConfigError(f"--ray needs ray: {install_command('ray')}")
    from ..server.ray_app import Cluster, ray_app, serve_on_ray

    # Replicas on several machines need a folder that all of them can access, so there is no default.
    folder = store.folder if store.chosen else None
    options = replace(options, documents=store.documents if store.chosen else None)
    cluster = Cluster(args.ray, args.ray_max, gpus=0 if config.device == "cpu" else 1)
    serve_on_ray(ray_app(args.model, config, options, folder, store.options, cluster), options)
    return 0


def _options(args: argparse.Namespace) -> ServerOptions:
    given = given_options(args, ServerOptions, "server_")
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    if from_environment := os.environ.get(KEY_VARIABLE):
        given["api_keys"] = (*given.get("api_keys", ()), from_environment)
    return ServerOptions(**given)


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
    add_store_flags(parser, "offload-rt/store in the user's data directory")
    add_engine_flags(parser)
