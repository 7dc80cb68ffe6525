"""Ctrl-C that cannot be lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Whether Ctrl-C was pressed. Python raises KeyboardInterrupt wherever the main thread happens to be; in a
    destructor or a weak reference's callback (imports and caches run many) it is printed and dropped. The mark made
    here stays."""

    def __init__(self) -> None:
        self._pressed = False

    def check(self) -> None:
        """Raises the KeyboardInterrupt that was lost, if any."""
        if self._pressed:
            raise KeyboardInterrupt

    def _press(self, signal_number: int, frame: FrameType | None) -> None:
        self._pressed = True
        raise KeyboardInterrupt


@contextmanager
def watched() -> Iterator[Interrupts]:
    """Watches Ctrl-C inside the block; `check` is to be called often. Does nothing in a thread that gets no signals."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts._press)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
