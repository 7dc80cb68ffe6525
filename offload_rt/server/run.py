"""Start and shutdown of the server. SIGTERM or Ctrl-C lets running requests finish; a second one does not."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .loading import Loading
from .log import log_to_stderr, logger
from .options import ServerOptions
from .protocol import make_server

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..async_llm import AsyncLLM


def bound(options: ServerOptions) -> socket.socket:
    """Return a bound socket, so that address errors appear before the model is loaded. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    found = socket.socket(family)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((options.host, options.port))
    except OSError as error:
        found.close()
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}") from error
    return found


def serve(make_engine: Callable[[], AsyncLLM], options: ServerOptions, listener: socket.socket) -> None:
    """Serve on `listener` until the process is stopped. Running requests then have `options.grace` seconds.

    `make_engine` runs in a separate thread. Requests get 503 until it returns. Its exceptions are raised here.
    """
    log_to_stderr()

    def make() -> FastAPI:
        with nothing_collected():
            from .app import make_app

            return make_app(make_engine(), options)

    loading = Loading(make)
    host, port = listener.getsockname()[:2]
    logger.info("listening", extra={"fields": {"url": f"http://{host}:{port}"}})
    server = make_server(loading, options)

    def end() -> None:
        server.should_exit = True

    loading.on_failure = end
    server.run(sockets=[listener])
    if loading.error is not None:
        raise loading.error


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Disable garbage collection during imports and model loading, then freeze the existing objects.

    Collection would take a quarter of the start-up time and find no garbage.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
