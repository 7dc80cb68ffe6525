"""Answers that must be a call: their grammar."""

from __future__ import annotations

from typing import Any

from .conversation import Conversation
from .errors import refused


def forced_call(conversation: Conversation) -> dict[str, Any]:
    """The field of `SamplingParams` that makes an answer a call of one of the tools; nothing where it need not be."""
    if conversation.choice != "required":
        return {}
    raise refused("tool_choice: this server does not force calls yet; use auto", "tool_choice")
