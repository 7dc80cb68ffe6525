"""Reclaiming host memory for a request that finds no room: what lies there without being used, such as idle sessions,
is taken away, one thing after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import PoolFullError
from ..utils.units import format_size

T = TypeVar("T")

NAMED = 8
"""An error names at most so many holdings."""


@dataclass(frozen=True)
class Holding:
    """Who holds how much host memory, and why it cannot be reclaimed, for an error message. Chunks that several hold
    count for each."""

    name: str
    bytes: int
    reason: str


class Reclaimable(Protocol):
    """Something that holds memory between requests."""

    def reclaim(self) -> bool:
        """Takes some of it out of memory, such that nothing is lost; returns False where nothing can leave."""
        ...

    def holdings(self) -> list[Holding]:
        """What is held now."""
        ...


def retry_after_reclaim(action: Callable[[], T], reclaimables: Iterable[Reclaimable]) -> T:
    """Returns what `action` returns. Where there is no room for it, memory of `reclaimables` is reclaimed, one thing
    after the other, until there is. `action` must change nothing when it raises. Raises PoolFullError, which says what
    stays in memory, when nothing more can be reclaimed."""
    while True:
        try:
            return action()
        except PoolFullError as error:
            stores = tuple(reclaimables)
            if any(one.reclaim() for one in stores):
                continue
            holdings = sorted((own for one in stores for own in one.holdings()), key=lambda own: -own.bytes)
            if not holdings:
                raise
            raise type(error)(f"{error}; {_described(holdings)}") from error


def _described(holdings: list[Holding]) -> str:
    total = sum(one.bytes for one in holdings)
    named = ", ".join(f"{one.name!r} {format_size(one.bytes)} ({one.reason})" for one in holdings[:NAMED])
    others = f" and {len(holdings) - NAMED} more" if len(holdings) > NAMED else ""
    return f"sessions hold {format_size(total)} of it: {named}{others}; close some, or let them answer first"
