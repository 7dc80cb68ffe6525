"""Send HTTP responses as JSON or server-sent events, and cancel the work of clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import RefusedError, as_http_error, error_body, shutting_down
from .options import DELIVERY_SECONDS

T = TypeVar("T")

PATIENCE = 1.0
"""Time to wait for the first event before the status is sent, in seconds. Errors until then get an error status."""

SILENCE = 10.0
"""After this many seconds without an event, a comment is sent so that proxies keep the connection open."""

logger = logging.getLogger(__name__)


class ClientGoneError(Exception):
    pass


async def run_for_client(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. Raise ClientGoneError if the client disconnects, and TimeoutError at the request's deadline."""
    async with asyncio.timeout_at(request.state.deadline + DELIVERY_SECONDS / 2):
        return await until_disconnect(request.receive, work)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. If the client disconnects, cancel `work` and raise ClientGoneError."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_parts(receive: Receive) -> AsyncGenerator[bytes, None]:
    """Yield the parts of a request's body as they arrive. Raises ClientGoneError if the client disconnects."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        more = message.get("more_body", False)
        yield message.get("body", b"")


def json_response(content: Any) -> Response:
    # ASCII, because text quoted from a request may contain lone surrogates, which UTF-8 cannot encode.
    return Response(json.dumps(content, ensure_ascii=True, separators=(",", ":")), media_type="application/json")


def event(data: dict[str, Any] | str, name: str | None = None) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {text}\n\n".encode()


class EventStream(Response):
    """A response that streams server-sent events. Use `stream_response` to create it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], first: asyncio.Future[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._next = events, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await until_disconnect(receive, self._send(scope, send))
        except ClientGoneError:
            scope["state"]["notes"]["client"] = "gone"
        except asyncio.CancelledError:  # the grace period of the shutdown is over
            await _send_error_event(scope, send, shutting_down())
        finally:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
            await self._events.aclose()

    async def _send(self, scope: Scope, send: Send) -> None:
        try:
            while True:
                done, _ = await asyncio.wait({self._next}, timeout=SILENCE)
                chunk = self._next.result() if done else b": waiting\n\n"
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if done:
                    self._next = asyncio.ensure_future(anext(self._events))
        except StopAsyncIteration:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:
            failure = as_http_error(error)
            if failure.status >= 500:
                logger.error("a streamed response failed", exc_info=error)
            await _send_error_event(scope, send, failure)


async def _send_error_event(scope: Scope, send: Send, error: RefusedError) -> None:
    scope["state"]["notes"]["error"] = error.message
    name = "error" if scope["path"].startswith("/v1/messages") else None
    await send({"type": "http.response.body", "body": event(error_body(error, scope["path"]), name)})


async def stream_response(request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
    """Return a response that streams `events`.

    Errors within the first `PATIENCE` seconds are raised, so that the response gets an error status. Later errors are
    sent as events.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await run_for_client(request, asyncio.wait({first}, timeout=PATIENCE))
        if first.done():
            first.result()
    except BaseException as error:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        if isinstance(error, StopAsyncIteration):
            raise RefusedError(500, "internal error: see the server's log") from error
        raise
    return EventStream(events, first)
