"""Log to stderr, as text or as JSON lines. Prompts and responses are logged only with `--log-prompts`."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from typing import Any

from starlette.types import Scope

from .options import LogFormat

MAX_KINDS = 100
"""Maximum number of different messages that are counted separately from each other."""

QUIET_PATHS = ("/health", "/metrics", "/v1/load")
"""Paths that clients poll. Successful requests for them are logged at level DEBUG."""

logger = logging.getLogger("offload_rt.server")


class JsonLines(logging.Formatter):
    """Formats records as JSON, including the fields in `extra={"fields": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True, default=str)


class TextLines(logging.Formatter):
    """Formats records for a terminal: the time and `extra["text"]`.

    If a record has no such text, its message and its `fields` are shown.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, "fields", {}))
        fields.pop("id", None)
        shown = " ".join(f"{name}={value!s}" for name, value in fields.items())
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        said = getattr(record, "text", f"{record.getMessage()} {shown}")
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{said}"
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        # Some values come from clients, so remove control characters before they reach the terminal.
        return "".join(c if c.isprintable() else " " for c in line).rstrip() + trace


class Repetitions(logging.Filter):
    """Drops repetitive records. In each interval, at most `limit` identical warnings, errors or refused requests pass.

    The first record of the next interval gets a field `suppressed` with the number of dropped records for each message.
    """

    def __init__(self, limit: int = 20, seconds: float = 10.0) -> None:
        super().__init__()
        self._limit, self._seconds, self._end = limit, seconds, 0.0
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        fields = getattr(record, "fields", {})
        status = fields.get("status", 0)
        if (now := time.monotonic()) >= self._end:
            dropped = {kind: count - self._limit for kind, count in self._counts.items() if count > self._limit}
            if dropped:
                record.fields = fields | {"suppressed": dropped}
            self._counts, self._end = Counter(), now + self._seconds
        if record.levelno < logging.WARNING and status < 400:
            return True
        kind = f"{record.msg!s:.80}" + (f" {status}" if status else "")
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = "other"
        self._counts[kind] += 1
        return self._counts[kind] <= self._limit


def log_to_stderr(log_format: LogFormat = "auto") -> None:
    handler = logging.StreamHandler()
    text = handler.stream.isatty() if log_format == "auto" else log_format == "text"
    handler.setFormatter(TextLines() if text else JsonLines())
    handler.addFilter(Repetitions())
    for name in ("offload_rt", "uvicorn", "asyncio"):
        chosen = logging.getLogger(name)
        chosen.handlers, chosen.propagate = [handler], False
        chosen.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True  # `log_request` logs requests instead


def log_request(scope: Scope, status: int, seconds: float) -> None:
    notes = scope["state"]["notes"]
    fields = {
        "id": scope["state"]["request_id"],
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 4),
        **notes,
    }
    level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
    logger.log(logging.ERROR if status >= 500 else level, "request", extra={"fields": fields})
