"""Progress bars on stderr, shown only for work that takes more than two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PATIENCE_SECONDS = 2.0


class Progress:
    """Makes progress bars; `enabled=False`, or a stderr that is no terminal, shows none. A bar vanishes when its work
    is done."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    @contextmanager
    def prefill(self, layers: int) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the number of layers done."""
        with self._bar("prefill", layers) as show:
            yield show

    @contextmanager
    def items(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Yields a function to call after each of `total` items."""
        done = 0
        with self._bar(what, total) as show:

            def advance() -> None:
                nonlocal done
                done += 1
                show(done)

            yield advance

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
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

        def show(done: int) -> None:
            nonlocal shown
            bar.update(task, completed=done)
            if not shown and done < total and time.monotonic() - began > PATIENCE_SECONDS:
                shown = True
                bar.start()
            if done == total:
                bar.stop()

        try:
            yield show
        finally:
            bar.stop()
