"""The log: one JSON object a line, on stderr. Sizes, times and ids; prompts and answers only with `--log-prompts`."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.types import Scope

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


def log_to_stderr() -> None:
    """Sends what this package and uvicorn log to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    for name in ("offload_rt", "uvicorn"):
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
