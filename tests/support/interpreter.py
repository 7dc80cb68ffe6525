"""Triton's interpreter, sped up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest


@contextmanager
def language_patched_once() -> Iterator[None]:
    """The interpreter puts its own operations into a kernel's module at every launch and call, and takes them out
    again; that is a third of its time, so here it is done once. Does nothing where Triton is not installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    patch_language, done = interpreter._patch_lang, {}

    def patched(function: Any) -> Any:
        if function not in done:
            done[function] = patch_language(function)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patched)
        yield
    for scope in reversed(done.values()):
        scope.restore()
