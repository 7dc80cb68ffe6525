"""Middleware for all requests: adds a request id, writes a log record, and checks the host, API key and body size."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .connection import ClientGoneError, body_parts
from .errors import RefusedError, as_http_error, error_response, shutting_down
from .log import log_request
from .options import LOCAL_HOSTS, ServerOptions
from .protocol import MAX_HEAD_BYTES

REQUEST_ID = "x-request-id"

IGNORED_FIELDS = "x-ignored-fields"
"""Response header that lists those fields of the request that are unknown and were therefore ignored."""

GONE = 499
"""Status that is logged if the client disconnects before the response begins (as in nginx)."""

MAX_BODIES = 16
"""Limit on the total size of all incomplete bodies, as a multiple of `max_body`.

Above it, requests are refused with 503.
"""

logger = logging.getLogger(__name__)


class RequestMiddleware:
    """ASGI middleware that checks and logs each request, and adds the header `x-request-id` to each response.

    Args:
        open_paths: Paths that can be used without an API key.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, open_paths: Sequence[str]) -> None:
        self._app, self._options, self._open_paths = app, options, open_paths
        self._receiving = 0
        """Total size in bytes of the incomplete bodies of all requests."""
        self._digests = [_digest(key) for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        deadline = asyncio.get_running_loop().time() + self._options.timeout
        state.update(request_id=request_id, owner="", notes={}, deadline=deadline)
        status = GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID] = request_id
                if ignored := state["notes"].get("ignored_fields"):
                    headers[IGNORED_FIELDS] = ", ".join(ignored)
            await send(message)

        try:
            await self._pass(scope, receive, noted)
        except asyncio.CancelledError:  # the server is stopping, and the grace period is over
            if status == GONE:
                await error_response(shutting_down(), scope["path"])(scope, receive, noted)
        except Exception as error:
            logger.exception("a request failed")
            if status == GONE:
                await error_response(as_http_error(error), scope["path"])(scope, receive, noted)
        finally:
            log_request(scope, status, time.perf_counter() - begun)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            if scope["path"] not in self._open_paths and scope["method"] != "OPTIONS":
                scope["state"]["owner"] = self._authenticate(headers)
            body = await self._body(headers, receive, scope["state"]["deadline"])
        except RefusedError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    def _check_host(self, headers: Headers) -> None:
        """If the server is local, raise RefusedError for Host headers with an unknown name.

        This prevents DNS rebinding: a web page from another host makes its own host name resolve to this machine.
        """
        name = _host_name(headers.get("host", ""))
        known = (*LOCAL_HOSTS, *self._options.allowed_hosts)
        if self._options.local and name and name not in known:
            raise RefusedError(
                403, f"the host name {name!r} is not allowed: use localhost, or start the server with --allowed-host"
            )

    def _authenticate(self, headers: Headers) -> str:
        if not self._digests:
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", ""))
        # Compare with all keys in constant time, so that the response time reveals nothing about the keys.
        if sum(hmac.compare_digest(given, known) for known in self._digests) == 0:
            raise RefusedError(
                401,
                "missing or invalid API key: send 'Authorization: Bearer KEY' (or 'x-api-key: KEY')",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return given.hex()

    async def _body(self, headers: Headers, receive: Receive, deadline: float) -> bytes | None:
        limit, parts, size = self._options.max_body, [], 0
        announced = headers.get("content-length", "")
        if sum(len(name) + len(value) + len(": \r\n") for name, value in headers.raw) > MAX_HEAD_BYTES:
            raise RefusedError(431, "the headers of the request are too large", headers={"Connection": "close"})
        if announced and "transfer-encoding" in headers:  # prevents request smuggling via a proxy
            both = "a request has either Content-Length or Transfer-Encoding, not both"
            raise RefusedError(400, both, headers={"Connection": "close"})
        too_large = RefusedError(413, f"the request is larger than this server's limit of {limit:,} bytes (--max-body)")
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise too_large
        try:
            async with asyncio.timeout_at(deadline):
                async for part in body_parts(receive):
                    parts.append(part)
                    size += len(part)
                    self._receiving += len(part)
                    if size > limit:
                        raise too_large
                    if self._receiving > MAX_BODIES * limit:
                        raise RefusedError(503, "too many requests are being received", headers={"Retry-After": "2"})
            return b"".join(parts)
        except ClientGoneError:
            return None
        except TimeoutError:
            raise RefusedError(408, "the body of the request did not arrive in time") from None
        finally:
            self._receiving -= size


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
