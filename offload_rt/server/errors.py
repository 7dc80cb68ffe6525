"""HTTP errors in the formats of OpenAI and Anthropic.

Messages of client errors (4xx) say what to change. The details of internal errors (5xx) are only logged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

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
"""Path prefix of Anthropic's protocol."""

RETRY_AFTER = "5"
"""Value of the Retry-After header, in seconds, if the queue is full or the session is busy."""

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
    """An error that is sent to the client as an HTTP response.

    Args:
        param: Name of the invalid request field, or None.
        code: Machine-readable error code, or None.
    """

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
        return _KINDS.get(self.status, "invalid_request_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> RefusedError:
    return RefusedError(400, message, param=param, code=code)


def shutting_down() -> RefusedError:
    return RefusedError(503, "the server is shutting down", headers={"Retry-After": "30"})


def as_http_error(error: BaseException) -> RefusedError:
    # Import this late, so that the server can listen before FastAPI has been imported.
    from fastapi.exceptions import RequestValidationError
    from pydantic import ValidationError

    if isinstance(error, RefusedError):
        return error
    if isinstance(error, QueueFullError):
        return RefusedError(429, str(error), code="queue_full", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, SessionBusyError):
        message = "this conversation is in use by another request: retry when it has finished"
        return RefusedError(409, message, param="session", code="session_busy", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, MemoryLimitError):
        return bad_request(str(error), code="pool_full")
    if isinstance(error, LogitsError):
        return RefusedError(500, str(error))
    if isinstance(error, OffloadError) and not isinstance(error, (StoreError, DiskError, EngineError)):
        return bad_request(str(error))
    if isinstance(error, (RequestValidationError, ValidationError)):  # the body does not match the schema
        return _invalid(error.errors())
    if isinstance(error, HTTPException):
        return RefusedError(error.status_code, str(error.detail), headers=error.headers)
    if isinstance(error, TimeoutError):
        message = "the request exceeded the time limit: reduce max_tokens, or raise --timeout"
        # By default, the clients of OpenAI and Anthropic retry after status 408, which would take as long again.
        return RefusedError(408, message, headers={"x-should-retry": "false"})
    return RefusedError(500, "internal error: see the server's log")


def error_body(error: RefusedError, path: str) -> dict[str, Any]:
    if path.startswith(ANTHROPIC):
        return {"type": "error", "error": {"type": error.kind, "message": error.message}}
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: RefusedError, path: str) -> Response:
    # ASCII, because text quoted from a request may contain lone surrogates, which UTF-8 cannot encode.
    content = json.dumps(error_body(error, path), ensure_ascii=True)
    return Response(content, error.status, error.headers, "application/json")


def _invalid(found: Sequence[Mapping[str, Any]]) -> RefusedError:
    first = found[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if not where:
        return bad_request("the body must be a JSON object, with Content-Type: application/json")
    param = ".".join(where)
    return bad_request(f"{param}: {str(first['msg']).removeprefix('Value error, ')}", param)
