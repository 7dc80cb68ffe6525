"""What a session needs of its store: an interface, and the lock of the pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from .deletion import Removed
from .history import History
from .session_kv import SessionKV


class WithKV(Protocol):
    """An object with the KV of a session."""

    kv: SessionKV


T = TypeVar("T")
P = ParamSpec("P")
S = TypeVar("S", bound=WithKV)


class Siblings(Protocol[S]):
    """Interface to the session store, with the operations that a session needs."""

    def exists(self, name: str) -> bool:
        """Return whether a session `name` is open or stored."""
        ...

    def enter(self, history: History) -> S:
        """Open a session with this history, register it in the store, and return it."""
        ...

    def forget(self, name: str) -> Removed:
        """Delete a stored session and all blocks without another owner."""
        ...

    def left(self, session: S) -> None:
        """Remove a closed session from the open sessions of the store."""
        ...


def in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a method to hold the lock of the session's pool while it runs."""

    @wraps(method)
    def locked(session: S, /, *args: P.args, **named: P.kwargs) -> T:
        with session.kv.runner.pool.lock:
            return method(session, *args, **named)

    return locked
