"""Prefix-aware routing: requests with a common prefix go to one replica unless it has more load than the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers

SESSION_HEADER = "x-session-id"

BEGINNING = 2048
"""Length in characters of the common prefix by which long prompts are routed."""

LEAST = 256
"""Length of the common prefix for shorter prompts. Prompts below this length are routed to any replica."""

_FIELDS = ("system", "instructions", "messages", "prompt", "input")
"""Prompt fields of all protocols, in the order of a chat template."""


def affinity(headers: Headers, body: bytes) -> str:
    """Return the routing key of a request, or "" if any replica may handle it.

    The key is made from the header `x-session-id`, else from the API key and the `session` of the body, else from the
    beginning of the prompt.
    """
    if named := headers.get(SESSION_HEADER):
        return _digest("session", named)
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(asked, dict):
        return ""
    if isinstance(session := asked.get("session"), str):
        key = headers.get("authorization") or headers.get("x-api-key") or ""
        return _digest("named", key, session)
    beginning = ""
    for text in _texts([asked.get(name) for name in _FIELDS]):
        beginning += text[: BEGINNING - len(beginning)]
        if len(beginning) == BEGINNING:
            break
    same = BEGINNING if len(beginning) == BEGINNING else LEAST
    return _digest("prompt", beginning[:same]) if len(beginning) >= LEAST else ""


def give_way(queues: Sequence[int], most_ahead: int) -> list[int]:
    """Return the order in which replicas are tried, given their numbers of running requests.

    The order is unchanged unless the first replica has more than `most_ahead` requests more than the least loaded one.
    Then the replicas are sorted by load.
    """
    order = list(range(len(queues)))
    if queues and queues[0] - min(queues) > most_ahead:
        order.sort(key=lambda i: queues[i])
    return order


def _texts(value: Any) -> Iterator[str]:
    """Yield the strings and token ids of a JSON value in order."""
    # Without recursion, because bodies may be deeply nested.
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case int() as token:
                yield f"{token} "
            case list() as items:
                left.extend(reversed(items))
            case Mapping() as fields:
                left.extend(fields[name] for name in ("content", "text", "role") if name in fields)


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
