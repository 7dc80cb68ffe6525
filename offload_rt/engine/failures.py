"""Errors of failed requests, and isolation of the request in a batch that caused an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from ..errors import EngineError, OffloadError
from .request import Request

logger = logging.getLogger(__name__)


def failure(request: Request, error: Exception) -> OffloadError:
    """Return the error to report for `request`: `error` if it is an OffloadError, else an EngineError caused by it.

    The traceback of an unexpected error is logged here.
    """
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
    """Requests of a failed decode step. Any of them may be the cause.

    Each is decoded in a separate step until it has passed the position of the failure or has failed alone.
    """

    def __init__(self) -> None:
        self._positions: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def add(self, request: Request) -> None:
        """Suspect a request that still has the sequences of the failed step."""
        self._positions[request] = request.sequences[0].position

    def groups(self, running: Seq[Request]) -> list[list[Request]]:
        """Split the `running` requests into groups to decode together."""
        if any(request in self._positions for request in running):
            return [[request] for request in running]
        return [list(running)] if running else []

    def decoded(self, request: Request) -> None:
        """Clear the suspicion of `request` if it has passed the position at which the step failed."""
        failed_at = self._positions.get(request)
        if failed_at is not None and request.sequences and request.sequences[0].position > failed_at:
            del self._positions[request]
