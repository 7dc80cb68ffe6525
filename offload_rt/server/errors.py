"""Refusals: one exception, and the shapes in which OpenAI's and Anthropic's clients expect it.

A request that cannot be answered as it is gets 4xx and says what to change; 5xx is a fault of ours, whose text stays in
the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import (
    DiskError,
    EngineError,
    LogitsError,
    MemoryLimitError,
    OffloadError,
    QueueFullError,
    SessionBusyError,
    StoreError,
)

ANTHROPIC = "/v1/messages"
"""Paths that begin so speak Anthropic's protocol."""

RETRY_AFTER = "5"
"""Seconds after which a client that found the queue full may come again."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}  # fmt: skip


class RefusedError(Exception):
    """A request is answered with `status` and `message`. `param` is the field that is wrong, `code` a word for
    programs, `headers` go with the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The error's type, by OpenAI's and Anthropic's names (they agree but for bad input)."""
        return _KINDS.get(self.status, "invalid_request_error")


def refused(message: str, param: str | None = None, code: str | None = None) -> RefusedError:
    """A refusal of bad input: 400."""
    return RefusedError(400, message, param=param, code=code)


def ending() -> RefusedError:
    """Return the refusal of a request that the end of the server cuts off."""
    return RefusedError(503, "the server is shutting down", headers={"Retry-After": "30"})


def refusal(error: BaseException) -> RefusedError:
    """What a client is told of any exception."""
    if isinstance(error, RefusedError):
        return error
    if isinstance(error, QueueFullError):
        return RefusedError(429, str(error), code="queue_full", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, SessionBusyError):
        message = "this conversation is being answered or deleted: ask again when that has ended"
        return RefusedError(409, message, param="session", code="session_busy", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, MemoryLimitError):
        return refused(str(error), code="pool_full")
    if isinstance(error, LogitsError):
        return RefusedError(500, str(error))
    if isinstance(error, OffloadError) and not isinstance(error, (StoreError, DiskError, EngineError)):
        return refused(str(error))
    if isinstance(error, (RequestValidationError, ValidationError)):  # of pydantic: made of what a client sent
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return RefusedError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, TimeoutError):
        return RefusedError(408, "the answer took longer than the server allows: ask for less, or raise --timeout")
    return RefusedError(500, "internal error: the server's log says more")


def error_body(error: RefusedError, path: str) -> dict[str, Any]:
    """The JSON of an error, in the protocol of `path`."""
    if path.startswith(ANTHROPIC):
        return {"type": "error", "error": {"type": error.kind, "message": error.message}}
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: RefusedError, path: str) -> Response:
    """The HTTP answer of an error. What it quotes may hold half a surrogate pair, which UTF-8 has not: hence ASCII."""
    content = json.dumps(error_body(error, path), ensure_ascii=True)
    return Response(content, error.status, error.headers, "application/json")


def _invalid(found: Sequence[Mapping[str, Any]]) -> RefusedError:
    """The first of the things that are wrong with a body."""
    first = found[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return refused(f"the body is no JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if not where:
        return refused("the body must be a JSON object, with Content-Type: application/json")
    param = ".".join(where)
    return refused(f"{param}: {str(first['msg']).removeprefix('Value error, ')}", param)
