"""Paths in home folders."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError


def expand_user(path: str | Path) -> Path:
    """Replace a leading "~" or "~USER" by the home folder. Raise InputError if the folder is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{str(path)!r}: the home folder of this user is not known; write the whole path") from None
