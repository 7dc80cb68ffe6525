"""Failed requests: what their callers are told, and which request of a batch is to blame."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from ..errors import EngineError, OffloadError
from .request import Request

logger = logging.getLogger(__name__)


def failure(request: Request, error: Exception) -> OffloadError:
    """Return what the caller of `request` is told: `error` itself if it is an OffloadError, else an EngineError that
    names it as its cause. The traceback of the latter is logged here, once."""
    if isinstance(error, OffloadError):
        return error
    logger.error("request %s failed", request.prompt.id, exc_info=error)
    told = EngineError(
        f"request {request.prompt.id} failed with {type(error).__name__}: {error}. Other requests are not affected. "
        "The traceback is in the log"
    )
    told.__cause__ = error
    return told


class Suspects:
    """The requests of a decode step that failed: any of them can be the cause. Each is computed in a step of its own
    until it has passed the position at which it failed, or has failed alone."""

    def __init__(self) -> None:
        self._positions: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def add(self, request: Request) -> None:
        """Suspect a request that still has the sequences of the failed step."""
        self._positions[request] = request.sequences[0].position

    def groups(self, running: Seq[Request]) -> list[list[Request]]:
        """Return which of the `running` requests to decode together."""
        if any(request in self._positions for request in running):
            return [[request] for request in running]
        return [list(running)] if running else []

    def decoded(self, request: Request) -> None:
        """Take note that `request` was decoded without an error."""
        failed_at = self._positions.get(request)
        if failed_at is not None and request.sequences and request.sequences[0].position > failed_at:
            del self._positions[request]
