"""Check session names. The command line imports this module, so it imports no large packages."""

from __future__ import annotations

from ..errors import InputError

LONGEST_NAME = 200


def check_name(name: object) -> None:
    try:
        possible = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and bool(name.encode())
    except UnicodeEncodeError:  # a lone surrogate
        possible = False
    if not possible:
        raise InputError(f"session name {name!r:.80} must be a text of 1 to {LONGEST_NAME} characters")
