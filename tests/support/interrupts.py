"""Interrupt a call as Ctrl-C does."""

from __future__ import annotations

from typing import Any

import pytest


def interrupt_call(patches: pytest.MonkeyPatch, target: Any, name: str, number: int) -> None:
    """Raise KeyboardInterrupt in call number `number` (from 1) of `target.name`."""
    real, calls = getattr(target, name), 0

    def stop(*args: Any) -> Any:
        nonlocal calls
        if (calls := calls + 1) == number:
            raise KeyboardInterrupt
        return real(*args)

    patches.setattr(target, name, stop)
