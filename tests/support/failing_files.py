"""Simulate a failing file system: calls on files in a folder raise OSError."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("open", "pwrite", "preadv", "fsync", "replace", "link", "mkdir", "utime", "unlink", "fdopen", "ftruncate")
"""Functions of `os` that are counted and may fail. Python's `open` and writes to its files are counted too."""


class FailingFiles:
    """Replaces file operations so that call number `at` on a file in `folder` raises OSError with `code`.

    If `after` is true, all later calls raise it too. `calls` lists the names of all calls in order.
    """

    def __init__(self, folder: Path, at: int, code: int, after: bool) -> None:
        self._folder, self._at, self._code, self._after = str(folder), at, code, after
        self.calls: list[str] = []
        self._mutex = threading.Lock()

    def count(self, name: str, target: Any) -> None:
        if not self._below(target):
            return
        with self._mutex:
            self.calls.append(name)
            number = len(self.calls) - 1
        if number == self._at or (self._after and number > self._at >= 0):
            raise OSError(self._code, os.strerror(self._code))

    def _below(self, target: Any) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        except (OSError, TypeError):
            return False
        return str(path).startswith(self._folder)

    @contextmanager
    def installed(self) -> Iterator[FailingFiles]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            patch.setattr(io, "open", self._opened(io.open))
            yield self

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(target: Any, *args: Any, **named: Any) -> Any:
            self.count(name, target)
            return real(target, *args, **named)

        return counted

    def _opened(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(target: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
            self.count("io.open", target)
            file = real(target, mode, *args, **named)
            return _FailingWriter(file, self, target) if "w" in mode and self._below(target) else file

        return opened


class _FailingWriter:
    """A file object that writes data in two halves, so that a write may fail between them."""

    def __init__(self, file: Any, files: FailingFiles, target: Any) -> None:
        self._file, self._files, self._target = file, files, target

    def __enter__(self) -> _FailingWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._files.count("write", self._target)
        return half + int(self._file.write(data[half:]))


ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS)
