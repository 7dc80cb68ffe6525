"""Runs the application until it is told to end: SIGTERM or Ctrl-C let answers finish, a second one does not."""

from __future__ import annotations

import socket

import uvicorn

from ..async_llm import AsyncLLM
from ..errors import ConfigError
from .app import make_app
from .log import log_to_stderr, logger
from .options import ServerOptions


def bound(options: ServerOptions) -> socket.socket:
    """A socket on the address of the options, bound before a model is loaded. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((options.host, options.port))
    except OSError as error:
        found.close()
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}") from error
    return found


def serve(engine: AsyncLLM, options: ServerOptions, listener: socket.socket) -> None:
    """Answers on `listener` until the process is told to end; then answers under way have `options.grace` seconds."""
    log_to_stderr()
    config = uvicorn.Config(
        make_app(engine, options),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(options.grace)),
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 << 10,
    )
    host, port = listener.getsockname()[:2]
    logger.info("serving", extra={"fields": {"model": engine.llm.name, "url": f"http://{host}:{port}"}})
    uvicorn.Server(config).run(sockets=[listener])
