"""Show the progress of long operations: with bars on stderr after two seconds, or by calling an observer function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PATIENCE_SECONDS = 2.0


Observer = Callable[[str, int, int | None], None]
"""A function with the arguments (task, finished amount, total amount). The total amount is None if it is not known."""

_observer: ContextVar[Observer | None] = ContextVar("_observer", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Return a context manager that passes all progress to `observer`, even if no bar would be shown."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def report(task: str, done: int = 0, total: int | None = None) -> None:
    if (observer := _observer.get()) is not None:
        observer(task, done, total)


class Show(Protocol):
    def __call__(self, done: int, total: int | None = None, /) -> None: ...


class Progress:
    """Creates progress bars. A bar disappears when its operation is done.

    No bar is shown if `enabled` is False, if stderr is not a terminal, or if there is an observer.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    @contextmanager
    def items(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Yield a function that advances the bar `what` by one. Call it after each of `total` items."""
        done = 0
        with self.bar(what, total) as show:

            def advance() -> None:
                nonlocal done
                done += 1
                show(done)

            yield advance

    @contextmanager
    def bar(self, what: str, total: int | None = None) -> Iterator[Show]:
        """Yield a function that sets the finished amount of the bar `what`, and optionally a new total."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        shown_here = self._enabled and console.is_terminal and _observer.get() is None
        bar = Bar(*columns, console=console, transient=True, disable=not shown_here)
        task = bar.add_task(what, total=total)
        began, shown = time.monotonic(), False

        def show(done: int, total: int | None = total) -> None:
            nonlocal shown
            report(what, done, total)
            bar.update(task, completed=done, total=total)
            if not shown and done != total and time.monotonic() - began > PATIENCE_SECONDS:
                shown = True
                bar.start()
            if done == total:
                bar.stop()

        try:
            yield show
        finally:
            bar.stop()
