"""Which of several replicas a request should go to: the one that has what it begins with, unless that one has more
to do than the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers

SESSION_HEADER = "x-session-id"

BEGINNING = 2048
"""Characters of a prompt that must be the same for two requests to be sent to one replica."""

LEAST = 256
"""The same for a prompt that is shorter; what is shorter than this is as soon computed again."""

_FIELDS = ("system", "instructions", "messages", "prompt", "input")
"""Of all protocols, in the order in which a template puts them."""


def affinity(headers: Headers, body: bytes) -> str:
    """What the requests that should go to one replica have in common: the header `x-session-id`, else the session that
    the body names (each key's own), else how the prompt begins. Empty where any replica will do."""
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
    """The order in which replicas are tried whose `queues` requests are under way, the one that should have the request
    first: as they stand, unless the first has over `most_ahead` requests more than the least busy one, which then
    comes first."""
    order = list(range(len(queues)))
    if queues and queues[0] - min(queues) > most_ahead:
        order.sort(key=lambda i: queues[i])
    return order


def _texts(value: Any) -> Iterator[str]:
    """The strings within a value, and the ids of a prompt of tokens, without recursion: bodies may be deep."""
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
