"""Progress bars on stderr for work that takes more than two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PATIENCE_SECONDS = 2.0


class _Show(Protocol):
    """Update a bar to `done` of `total`. `total` is passed if it was unknown when the bar was made."""

    def __call__(self, done: int, total: int | None = None, /) -> None: ...


class Progress:
    """Make progress bars that disappear when their work is done.

    No bar is shown if `enabled` is False or stderr is not a terminal.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    @contextmanager
    def prefill(self, layers: int) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the number of finished layers."""
        with self._bar("prefill", layers) as show:
            yield show

    @contextmanager
    def items(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Yield a function to call after each of `total` items."""
        done = 0
        with self._bar(what, total) as show:

            def advance() -> None:
                nonlocal done
                done += 1
                show(done)

            yield advance

    @contextmanager
    def counted(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yield a function to call with the finished and the total amount."""
        with self._bar(what, None) as show:
            yield show

    @contextmanager
    def _bar(self, what: str, total: int | None) -> Iterator[_Show]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        bar = Bar(*columns, console=console, transient=True, disable=not (self._enabled and console.is_terminal))
        task = bar.add_task(what, total=total)
        began, shown = time.monotonic(), False

        def show(done: int, total: int | None = total) -> None:
            nonlocal shown
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
