"""Files that are read in one go, as strangers may have left them: anything may lie under their names."""

from __future__ import annotations

import json
import os
import stat
from errno import EFBIG, EINVAL
from pathlib import Path
from typing import Any

LARGEST = 1 << 28
"""Bytes of such a file; a larger one is not read."""


def read_small(path: Path, most: int = LARGEST) -> bytes:
    """The content of a file or a pipe of at most `most` bytes. Raises OSError, also for what never ends."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISCHR(status.st_mode) and not file.isatty():
            raise OSError(EINVAL, "it is a device, not a file")
        data = b"" if status.st_size > most else file.read(most + 1)
    if status.st_size > most or len(data) > most:
        raise OSError(EFBIG, f"it has more than {most:,} bytes")
    return data


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError, also where it has no end of brackets."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets within brackets without end") from None


def read_json(path: Path) -> Any:
    """What a JSON file says. Raises OSError and ValueError."""
    return parse_json(read_small(path))
