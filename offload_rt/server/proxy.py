"""Forward HTTP requests to replicas that run the application."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .connection import ClientGoneError, body_parts, until_disconnect
from .errors import RefusedError, error_response
from .log import logger
from .options import DELIVERY_SECONDS

SESSION_HEADER = "x-session-id"

PREFIX = 2048
"""Number of leading characters that determine the replica of a long prompt."""

MIN_PREFIX = 256
"""If a prompt has fewer than `PREFIX` characters, this many leading characters determine its replica.

Prompts that are even shorter may go to any replica.
"""

_FIELDS = ("system", "instructions", "messages", "prompt", "input")
"""Request fields that contain the prompt, for all protocols, in the order of a rendered chat template."""


def route_key(headers: Headers, body: bytes) -> str:
    """Return the routing key of a request, or "" if any replica may handle it.

    The key is the first of these that exists: the header `x-session-id`; the API key together with the field `session`
    or `prompt_cache_key`; a digest of the prompt's prefix.
    """
    if named := headers.get(SESSION_HEADER):
        return _digest("session", named)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(fields, dict):
        return ""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    for name, kind in (("session", "named"), ("prompt_cache_key", "cache")):
        if isinstance(value := fields.get(name), str):
            return _digest(kind, key, value)
    prefix = ""
    for text in _texts([fields.get(name) for name in _FIELDS]):
        prefix += text[: PREFIX - len(prefix)]
        if len(prefix) == PREFIX:
            break
    same = PREFIX if len(prefix) == PREFIX else MIN_PREFIX
    return _digest("prompt", prefix[:same]) if len(prefix) >= MIN_PREFIX else ""


def balance_by_load(queues: Sequence[int], max_ahead: int) -> list[int]:
    """Return the indices of the replicas, in the order to try them.

    `queues` lists the number of running requests of each replica. Replica 0, which the routing key selects, is tried
    first. However, if it has over `max_ahead` more requests than the least loaded replica, replicas are sorted by load.
    """
    order = list(range(len(queues)))
    if queues and queues[0] - min(queues) > max_ahead:
        order.sort(key=lambda i: queues[i])
    return order


def _texts(value: Any) -> Iterator[str]:
    # This is not recursive, because bodies may be deeply nested.
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case int() as token:
                yield f"{token} "
            case list() as items:
                left.extend(reversed(items))
            case Mapping() as fields:
                left.extend(fields[name] for name in ("content", "text", "role") if name in fields)


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


_PASSED = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
           "client", "server")  # fmt: skip
"""Fields of the ASGI scope that describe the request and can be serialized."""


@dataclass(frozen=True)
class ForwardedRequest:
    """A request in serializable form: its body, and the part of the ASGI scope that a replica needs."""

    scope: dict[str, Any]
    body: bytes


class Proxy:
    """ASGI application that forwards requests to replicas.

    Args:
        ask: Sends a request and its routing key to a replica, and yields the ASGI messages of the response. Closed if
            the client disconnects.
        max_body: Maximum size of a body in bytes. The proxy truncates larger bodies, and the replica then refuses them.
        timeout: Maximum duration of a request in seconds.
    """

    def __init__(
        self, ask: Callable[[ForwardedRequest, str], AsyncIterator[Message]], max_body: int, timeout: float
    ) -> None:
        self._ask, self._max_body, self._timeout = ask, max_body, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            # The replica should report a timeout first.
            async with asyncio.timeout(self._timeout + DELIVERY_SECONDS):
                body = bytearray()
                async for part in body_parts(receive):
                    body += part
                    if len(body) > self._max_body:
                        break
                forwarded = ForwardedRequest({name: scope[name] for name in _PASSED if name in scope}, bytes(body))
                key = route_key(Headers(scope=scope), forwarded.body)
                await until_disconnect(receive, self._respond(forwarded, key, receive, send))

    async def _respond(self, forwarded: ForwardedRequest, key: str, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with aclosing(self._ask(forwarded, key)) as messages:  # type: ignore[type-var]
                async for message in messages:
                    begun = True
                    await send(message)
        except Exception as error:
            logger.warning("a replica did not respond", extra={"fields": {"error": f"{type(error).__name__}: {error}"}})
            if begun:
                raise  # this aborts the connection, so that the client notices that the response is incomplete
            lost = RefusedError(
                503, "the replica has stopped: retry the request", code="replica_lost", headers={"Retry-After": "1"}
            )
            await error_response(lost, forwarded.scope["path"])(forwarded.scope, receive, send)


async def run_app(app: ASGIApp, forwarded: ForwardedRequest) -> AsyncIterator[Message]:
    """Run an application on a forwarded request, and yield the ASGI messages of the response.

    If the iterator is closed, this looks to the application as if the client had disconnected.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone, bodies = asyncio.Event(), [forwarded.body]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.put_nowait(message)

    async def run() -> None:
        await app(dict(forwarded.scope), receive, send)

    task = asyncio.ensure_future(run())
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            yield message
    finally:
        gone.set()
        await task
