"""Who gives way to a request that finds no room: what lies in memory without being used, such as idle sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..config import format_size
from ..errors import PoolFullError

T = TypeVar("T")

NAMED = 8
"""Most that an error names."""


@dataclass(frozen=True)
class Held:
    """Who holds how much host memory, and why it stays, for people. Chunks that several hold count for each."""

    name: str
    bytes: int
    reason: str


class Holder(Protocol):
    """Who holds memory between requests."""

    def reclaim(self) -> bool:
        """Something of it leaves memory, and nothing is lost by that; False where nothing can."""
        ...

    def held(self) -> list[Held]:
        """What it holds now."""
        ...


def retry_after_reclaim(action: Callable[[], T], holders: Iterable[Holder]) -> T:
    """What `action` returns; where there is no room for it, `holders` give way, one thing after the other, until there
    is. `action` must change nothing when it raises. Raises PoolFullError, which says who stays, when nobody can."""
    while True:
        try:
            return action()
        except PoolFullError as error:
            if any(holder.reclaim() for holder in holders):
                continue
            held = sorted((one for holder in holders for one in holder.held()), key=lambda one: -one.bytes)
            if not held:
                raise
            raise type(error)(f"{error}; {_told(held)}") from error


def _told(held: list[Held]) -> str:
    total = sum(one.bytes for one in held)
    named = ", ".join(f"{one.name!r} {format_size(one.bytes)} ({one.reason})" for one in held[:NAMED])
    others = f" and {len(held) - NAMED} more" if len(held) > NAMED else ""
    return f"sessions hold {format_size(total)} of it: {named}{others}; close some, or let them answer first"
