"""Answers that follow a schema."""

from __future__ import annotations

from typing import Any

from .errors import refused
from .openai_requests import ResponseFormat


def structured_outputs(asked: ResponseFormat | None) -> dict[str, Any]:
    """The field of `SamplingParams` that makes an answer follow the format; nothing where any text will do."""
    if asked is None or asked.type == "text":
        return {}
    raise refused(f"response_format: this server does not make answers follow {asked.type!r} yet", "response_format")
