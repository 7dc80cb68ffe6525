"""Reclaim host memory that is held but not used, such as that of idle sessions, for a request that needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..errors import PoolFullError
from ..utils.units import format_size

T = TypeVar("T")

NAMED = 8  # holdings listed in an error message


@dataclass(frozen=True)
class Holding:
    """Host memory that cannot be reclaimed, and why, for error messages. Shared blocks count for each holder."""

    name: str
    bytes: int
    reason: str


class Reclaimable(Protocol):
    """An object that holds memory between requests."""

    def reclaim(self) -> bool:
        """Free some memory without losing data. Return False if none can be freed."""
        ...

    def holdings(self) -> list[Holding]:
        """Return the memory that is held."""
        ...


def retry_after_reclaim(action: Callable[[], T], reclaimables: Iterable[Reclaimable]) -> T:
    """Call `action` and return its result. While it raises PoolFullError, reclaim memory and try again.

    `action` must not change anything if it raises. If nothing more can be reclaimed, raise PoolFullError with the
    holders of memory.
    """
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
