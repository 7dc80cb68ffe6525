"""Reliable handling of Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Remembers whether Ctrl-C was pressed.

    Python drops a KeyboardInterrupt that is raised in a destructor or a weak reference callback.
    """

    def __init__(self) -> None:
        self._pressed = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._pressed:
            raise KeyboardInterrupt

    def _press(self, signal_number: int, frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt


@contextmanager
def watched() -> Iterator[Interrupts]:
    """Record Ctrl-C inside the block, which should call `check` often.

    No effect outside the main thread, because only the main thread receives signals.
    """
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts._press)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
