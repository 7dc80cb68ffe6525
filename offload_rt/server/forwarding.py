"""HTTP requests that one process takes and another answers: a door that reads a request whole and passes on what is
answered as it comes, and the other end, which runs the application. Between them are Ray Serve's calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .affinity import affinity
from .log import logger
from .options import DELIVERY_SECONDS

_PASSED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
           "client", "server")  # fmt: skip
"""What of a scope is plain data and says what was asked."""


@dataclass(frozen=True)
class Asked:
    """A request: its scope, without what is this process's alone, and its body."""

    scope: dict[str, Any]
    body: bytes


class Door:
    """An application that answers by `ask(asked, affinity)`: messages as they come. Closing that iterator ends the
    request, which happens where the client leaves. Bodies are read up to `max_body` bytes and a little: the other end
    refuses what is longer."""

    def __init__(self, ask: Callable[[Asked, str], AsyncIterator[Message]], max_body: int, timeout: float) -> None:
        self._ask, self._max_body, self._timeout = ask, max_body, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. If the response is not sent after `timeout` seconds, and a little to deliver the error of
        the replica, the request is cancelled."""
        async with asyncio.timeout(self._timeout + DELIVERY_SECONDS):
            await self._forward(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._read(receive)
        if body is None:
            return
        asked = Asked({name: scope[name] for name in _PASSED if name in scope}, body)
        answering = asyncio.ensure_future(self._answer(asked, affinity(Headers(scope=scope), body), send))
        left = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # the time may be up
            for task in (left, answering):
                task.cancel()
            await asyncio.wait({answering})
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise error

    async def _read(self, receive: Receive) -> bytes | None:
        parts, size = [], 0
        while size <= self._max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body", False):
                break
        return b"".join(parts)

    async def _answer(self, asked: Asked, key: str, send: Send) -> None:
        begun = False
        try:
            async with aclosing(self._ask(asked, key)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    begun = True
                    await send(message)
        except Exception as error:
            logger.warning("no answer from a replica", extra={"fields": {"error": f"{type(error).__name__}: {error}"}})
            if begun:
                raise  # the connection breaks off, so that nobody takes half an answer for a whole one
            await _say_lost(send)


class Behind:
    """The other end: runs the application for one request after another, or many at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        """What the application sends. Closing the iterator tells it that the client has left."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        gone, bodies = asyncio.Event(), [asked.body]

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.put_nowait(message)

        task = asyncio.ensure_future(self._run(asked, receive, send))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            gone.set()
            await task

    async def _run(self, asked: Asked, receive: Receive, send: Send) -> None:
        await self._app(dict(asked.scope), receive, send)


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _say_lost(send: Send) -> None:
    """Nothing was answered yet, so that the client may ask again."""
    error = {"message": "the replica that was to answer is gone: ask again", "type": "overloaded_error"}
    body = json.dumps({"error": error | {"param": None, "code": "replica_lost"}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"1")]})
    await send({"type": "http.response.body", "body": body})
