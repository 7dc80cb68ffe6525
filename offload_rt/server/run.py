"""Start and stop the server. After SIGTERM or Ctrl-C, running requests may finish, and a second signal cancels them."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import ConfigError
from ..utils.progress import observed
from .errors import RefusedError, error_body
from .log import log_to_stderr, logger
from .options import ServerOptions
from .page import PAGE_PATHS, page_file
from .protocol import make_server

if TYPE_CHECKING:
    from fastapi import FastAPI

RETRY_AFTER = 2
"""Value of the Retry-After header, in seconds, while the model is loading."""


LOG_SECONDS = 5.0


class Loading:
    """ASGI application that responds to requests while `make` creates the real application in a thread.

    Until that is done, it serves the chat page, and all other requests get 503 with the progress. Afterwards, it
    forwards all requests. If `make` fails, it sets `error` to the exception and calls `on_failure`.
    """

    def __init__(self, make: Callable[[], FastAPI], url: str = "") -> None:
        self._make, self._url = make, url
        self._made: FastAPI | None = None
        self._app: ASGIApp | None = None
        self.error: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._state: dict[str, Any] = {}
        """The current loading task, and how much of it is done."""
        self._logged = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _loading_response(scope, self._state)(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        loop, loaded = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._load, args=(loop, loaded), name="offload-rt loading", daemon=True).start()
        await send({"type": "lifespan.startup.complete"})
        ended, waiting = asyncio.ensure_future(receive()), asyncio.ensure_future(loaded.wait())
        await asyncio.wait({ended, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._made is not None:
            async with self._made.router.lifespan_context(self._made):
                self._app = self._made
                await ended
        elif self.error is not None:
            self.on_failure()
            await ended
        await send({"type": "lifespan.shutdown.complete"})

    def _load(self, loop: asyncio.AbstractEventLoop, loaded: asyncio.Event) -> None:
        begun = time.perf_counter()
        try:
            with observed(self._show_progress):
                self._made = self._make()
            fields = {"seconds": round(time.perf_counter() - begun, 2), "url": self._url}
            text = f"ready at {self._url} after {fields['seconds']} s (Ctrl-C stops the server)"
            logger.info("loaded", extra={"fields": fields, "text": text})
        except BaseException as error:
            self.error = error
        try:
            loop.call_soon_threadsafe(loaded.set)
        except RuntimeError:  # the server has already stopped
            return

    def _show_progress(self, task: str, done: int, total: int | None) -> None:
        begins, now = task != self._state.get("task"), time.monotonic()
        self._state = {"task": task} | ({} if total is None else {"done": done, "total": total})
        if begins or now - self._logged > LOG_SECONDS:
            self._logged = now
            logger.info("loading", extra={"fields": self._state})


def _loading_response(scope: Scope, state: dict[str, Any]) -> Response:
    if scope["path"] in PAGE_PATHS and scope["method"] == "GET":
        return page_file(scope["path"])
    headers = {"Retry-After": str(RETRY_AFTER)}
    error = RefusedError(503, "the model is being loaded: retry later", code="loading")
    return JSONResponse({"status": "loading"} | state | error_body(error, scope["path"]), 503, headers)


def bind_socket(options: ServerOptions) -> socket.socket:
    """Return a socket bound to the server's address. This happens before the model is loaded. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only for sockets that name their protocol. Without TCP_NODELAY, each response waits for
    # the acknowledgement of its head, which Linux delays by 40 ms.
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((options.host, options.port))
    except OSError as error:
        found.close()
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {reason}; choose another address or port"
        ) from error
    return found


def serve(make_app: Callable[[], FastAPI], options: ServerOptions, listener: socket.socket) -> None:
    """Serve on `listener` until the process is stopped. Running requests then have `options.grace` seconds to finish.

    `make_app` runs in a thread, and requests get 503 until it returns. If it fails, the server stops and this function
    raises the exception.
    """
    log_to_stderr(options.log_format)

    def make() -> FastAPI:
        # Garbage collection would take a quarter of the start-up time without finding any garbage. `freeze` then
        # exempts the objects of the loaded model from later collections.
        gc.disable()
        try:
            return make_app()
        finally:
            gc.freeze()
            gc.enable()

    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    loading = Loading(make, url)
    logger.info("listening", extra={"fields": {"url": url}})
    server = make_server(loading, options)
    loading.on_failure = lambda: setattr(server, "should_exit", True)
    server.run(sockets=[listener])
    if loading.error is not None:
        raise loading.error
