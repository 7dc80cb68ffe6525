"""The log: one JSON object a line, on stderr. Sizes, times and ids; prompts and answers only with `--log-prompts`."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from typing import Any

from starlette.types import Scope

MOST_KINDS = 100
"""Kinds of repeated messages that are counted apart."""

logger = logging.getLogger("offload_rt.server")


class JsonLines(logging.Formatter):
    """Records as JSON, with what `extra={"fields": ...}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        said: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=True, default=str)


class Repetitions(logging.Filter):
    """Pass the first `most` warnings, errors and refused requests of a kind per interval. The first record after the
    interval carries how many were dropped, in its field `suppressed`."""

    def __init__(self, most: int = 20, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds, self._end = most, seconds, 0.0
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        fields = getattr(record, "fields", {})
        status = fields.get("status", 0)
        if (now := time.monotonic()) >= self._end:
            dropped = {kind: count - self._most for kind, count in self._counts.items() if count > self._most}
            if dropped:
                record.fields = fields | {"suppressed": dropped}
            self._counts, self._end = Counter(), now + self._seconds
        if record.levelno < logging.WARNING and status < 400:
            return True
        kind = f"{record.msg!s:.80}" + (f" {status}" if status else "")
        if kind not in self._counts and len(self._counts) >= MOST_KINDS:
            kind = "other"
        self._counts[kind] += 1
        return self._counts[kind] <= self._most


def log_to_stderr() -> None:
    """Sends what this package and uvicorn log to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    handler.addFilter(Repetitions())
    for name in ("offload_rt", "uvicorn", "asyncio"):
        chosen = logging.getLogger(name)
        chosen.handlers, chosen.propagate = [handler], False
        chosen.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True  # a line a request of our own says more


def log_request(scope: Scope, status: int, seconds: float) -> None:
    """One line for one request: what it was, how it ended, what it cost."""
    notes = scope["state"]["notes"]
    fields = {
        "id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        **notes,
    }
    level = (
        logging.ERROR
        if status >= 500
        else logging.DEBUG
        if scope["path"] in ("/health", "/metrics", "/v1/load")
        else logging.INFO
    )
    logger.log(level, "request", extra={"fields": fields})
