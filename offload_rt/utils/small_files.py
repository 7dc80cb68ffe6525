"""Read small files from untrusted folders, up to a size limit."""

from __future__ import annotations

import json
import os
import stat
from errno import EFBIG, EINVAL
from pathlib import Path
from typing import Any

from ..errors import ModelError

LARGEST = 1 << 28  # maximum size in bytes


def read_small(path: Path, most: int = LARGEST) -> bytes:
    """Return the content of a file or pipe. Raise OSError if `path` is a device or has more than `most` bytes."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) and not file.isatty():
            raise OSError(EINVAL, "it is a device, not a file")
        data = b"" if status.st_size > most else file.read(most + 1)
    if status.st_size > most or len(data) > most:
        raise OSError(EFBIG, f"it has more than {most:,} bytes")
    return data


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raise ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    return parse_json(read_small(path))


def foreign_file(path: Path, expected: str) -> ModelError | None:
    """Return an error if a weight file is empty, a Git LFS pointer or plain text. Otherwise, return None.

    `expected` names the expected format, such as "a GGUF file".
    """
    with path.open("rb") as file:
        start = file.read(64)
    cure = "download or copy it again"
    if not start:
        return ModelError(f"'{path}' is empty; expected {expected}: {cure}")
    if start.startswith(b"version https://git-lfs"):
        return ModelError(f"'{path}' is a Git LFS pointer, not {expected}: `git lfs pull` downloads the file")
    text = start.decode("utf-8", "replace")
    if len(start) >= 8 and all(character.isprintable() or character.isspace() for character in text):
        line = " ".join(text.split())[:32]
        return ModelError(f"'{path}' is a text that begins with {line!r}; expected {expected}: {cure}")
    return None


def incomplete_file(path: Path, missing: int) -> ModelError:
    return ModelError(f"'{path}' is truncated: {missing:,} bytes are missing; download or copy it again")
