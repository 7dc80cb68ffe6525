"""HTTP connections. Their number is limited, and so is the time that clients take to send or read."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import RefusedError, error_body
from .log import logger
from .options import DELIVERY_SECONDS, ServerOptions

KEEP_ALIVE_SECONDS = 30
MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a request head. h11 checks incomplete heads, and `RequestMiddleware` checks complete ones."""
MAX_CONNECTIONS = 4096
MIN_CONNECTIONS = 16
LISTEN_QUEUE = 2048
REFUSED_SECONDS = 2.0
"""If a connection is refused, its client has this many seconds to read the response."""


def _refusal(status: HTTPStatus, message: str) -> bytes:
    body = json.dumps(error_body(RefusedError(status, message), "")).encode()
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\nretry-after: 1\r\nconnection: close\r\n"
    return head.encode() + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


FULL = _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
LATE = _refusal(HTTPStatus.REQUEST_TIMEOUT, "the head of the request did not arrive in time")


class Connections:
    """Open connections of one server, ordered by the time when each last received data.

    At the limit, a new connection replaces the one whose client has been silent for longest. Connections that have
    never had a complete request are replaced first. If all clients are waiting for responses, the new connection is
    refused.
    """

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.limit = options.max_connections or default_connections()
        self.open: dict[LimitedProtocol, None] = {}
        self.refused: set[LimitedProtocol] = set()

    def mark_active(self, connection: LimitedProtocol) -> None:
        self.open.pop(connection, None)
        self.open[connection] = None

    def admit(self, connection: LimitedProtocol) -> bool:
        """Add a connection. At the limit, close another connection first. Return False if none can be closed."""
        if len(self.open) >= self.limit:
            waiting = [other for other in self.open if other.awaits_client]
            # Prefer clients that have never completed a request.
            silent = min(waiting, key=lambda other: other.cycle is not None, default=None)
            if silent is None:
                return False
            silent.abort("replaced by a new connection")
        self.open[connection] = None
        return True


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol with three timers that limit how long a client may occupy a connection.

    * The head timer limits the time until a request head is complete. It starts with the connection, or with the first
      byte of a further request.
    * The request timer limits the time until the response is sent.
    * The stall timer runs while the buffer is full because the client does not read.
    """

    def __init__(self, limits: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._head: asyncio.TimerHandle | None = None
        self._request: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._timed: object = None
        """The request-response cycle of uvicorn for which the request timer runs."""

    @property
    def awaits_client(self) -> bool:
        """Whether the server is waiting for data from the client, rather than the client for a response."""
        if self.transport.get_write_buffer_size():  # the response is complete but has not been sent yet
            return False
        return self.cycle is None or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._limits.admit(self):
            self._set_timers()
            return
        logger.warning("connection refused: too many are open")
        transport.write(FULL)
        if len(self._limits.refused) > self._limits.limit // 4:
            transport.close()
            return
        # Sending data to a closed socket would reset the connection, and the response could be lost.
        self._limits.refused.add(self)
        with suppress(OSError):  # the client has reset the connection
            transport.write_eof()
        self._head = self.loop.call_later(REFUSED_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.open.pop(self, None)
        self._limits.refused.discard(self)
        for timer in (self._head, self._request, self._stall):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()  # if the connection breaks, uvicorn leaves the timer running
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self in self._limits.refused:
            return
        if self in self._limits.open:
            self._limits.mark_active(self)
        super().data_received(data)
        self._set_timers()

    def handle_events(self) -> None:
        super().handle_events()
        self._set_timers()

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP with 400. If a response has already begun, abort the connection."""
        if self.cycle is not None:
            self.cycle.disconnected = not self.cycle.response_complete
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.abort("invalid HTTP")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            seconds = min(self._limits.options.send_timeout, self._limits.options.timeout)
            self._stall = self.loop.call_later(seconds, self.abort, "the client does not read")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def abort(self, reason: str) -> None:
        """Close the connection, discard unsent data and cancel the running request, if any."""
        if self in self._limits.open:
            self._limits.open.pop(self)
            path = self.scope["path"] if self.cycle is not None and not self.cycle.response_complete else None
            logger.warning("connection aborted: %s", reason, extra={"fields": {"path": path}})
        # close() would wait for a client that does not read.
        self.transport.abort()

    def _set_timers(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not self._timed:
            self._timed = self.cycle
            if self._request is not None:
                self._request.cancel()
            seconds = self._limits.options.timeout + DELIVERY_SECONDS
            self._request = self.loop.call_later(seconds, self._end_request)
        # After a response the keep-alive timer runs until the next byte arrives.
        incomplete = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if incomplete and self._head is None:
            self._head = self.loop.call_later(self._limits.options.head_timeout, self._end_head)
        elif not incomplete and self._head is not None:
            self._head.cancel()
            self._head = None

    def _end_request(self) -> None:
        unsent = self.transport.get_write_buffer_size() > 0
        if unsent or not self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY:
            self.abort("the request took longer than --timeout")

    def _end_head(self) -> None:
        logger.warning("connection closed: the head of a request did not arrive in time")
        if self.conn.trailing_data[0]:
            self.transport.write(LATE)
        self.transport.close()
        if self.transport.get_write_buffer_size():  # the client does not read: close() would wait for it
            self.transport.abort()


def default_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The other half is for stores and models.
    half = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft // 2
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, half))


class LimitedServer(uvicorn.Server):
    """uvicorn's server with a longer listen queue."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # asyncio uses one parameter both for the queue length and for the number of connections that it accepts at
        # once.
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(LISTEN_QUEUE)


def make_server(app: ASGIApp, options: ServerOptions) -> LimitedServer:
    connections = Connections(options)
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(LimitedProtocol, connections)),
        ws="none",  # these limits do not apply to WebSocket connections
        # asyncio accepts up to twice this many connections before it reads from the first one. If this exceeded the
        # limit on connections, some would be closed before their requests are read.
        backlog=max(1, min(100, connections.limit // 4)),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(options.grace)),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    return LimitedServer(config)
