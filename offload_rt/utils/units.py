"""Parsing and formatting of sizes ("200GiB") and durations ("7d")."""

from __future__ import annotations

import math
import re
from operator import index

from ..errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}

_LARGEST = 1 << 63

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_size(size: int | str, name: str = "size") -> int:
    """Return the number of bytes for an int or a string such as "200GiB", "1.5GB" or "512M".

    K, M, G and T are binary units, like KiB, MiB, GiB and TiB. Raises ConfigError if the size is less than one byte.
    """
    given = size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?(?:i?B)?|B)\s*", size, re.IGNORECASE)
        unit = next((u for u in _UNITS if match and u.lower() == match[2].lower()), None)
        if match is None or unit is None:
            raise ConfigError(f"{name}={size!r} is not a size; use bytes, or a number with a unit such as '200GiB'")
        number = float(match[1]) * _UNITS[unit]
        size = int(number) if number < _LARGEST else 0
    try:
        size, truth = index(size), isinstance(size, bool)
    except (TypeError, ValueError, RuntimeError):
        truth = True
    if truth:
        raise ConfigError(f"{name}={size!r:.80} is not a size; use bytes, or a string such as '200GiB'")
    if not 0 < size < _LARGEST:
        raise ConfigError(f"{name}={given!r:.80} must be at least one byte and below 2^63 bytes")
    return size


def parse_duration(duration: float | str, name: str = "duration") -> float:
    """Return the number of seconds for a number or a string such as "90s", "30m", "12h", "7d" or "2w".

    Raises ConfigError if it is not positive.
    """
    if isinstance(duration, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)\s*", duration, re.IGNORECASE)
        if match is None:
            raise ConfigError(
                f"{name}={duration!r} is not a duration; use seconds, or a number with a unit such as '7d'"
            )
        duration = float(match[1]) * _SECONDS[match[2].lower()]
    try:
        seconds = math.nan if isinstance(duration, bool) else float(duration)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ConfigError(f"{name}={duration!r:.80} is not a duration; use seconds, or a string such as '7d'") from None
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name}={duration!r:.80} must be positive and finite")
    return seconds


def format_duration(seconds: float) -> str:
    """Format `seconds` in the largest unit that makes the number at least 2: "45 s", "90 min", "36 h", "12 d"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_size(size: float) -> str:
    """Format `size` bytes with three digits, in the largest binary unit that makes the number at least 1: "1.46
    GiB".
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:.0f} TiB"
