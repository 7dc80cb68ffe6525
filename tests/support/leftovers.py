"""Search files for tokens and text that should have been deleted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

RUN = 4
"""Number of consecutive token ids that count as a leftover."""


def runs(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + RUN]) for i in range(len(tokens) - RUN + 1)}


def byte_patterns(run: tuple[int, ...]) -> list[bytes]:
    """Return the encodings of token ids as int64, int32, hexadecimal text and JSON."""
    packed = [np.asarray(run, dtype).tobytes() for dtype in ("<i8", "<i4")]
    texts = [json.dumps(run).strip("[]"), json.dumps(run, separators=(",", ":")).strip("[]")]
    return [*packed, *(data.hex().encode() for data in packed), *(text.encode() for text in texts)]


def contains(pattern: bytes, data: bytes) -> bool:
    """Return whether `data` contains `pattern`. JSON numbers must match as a whole (7 is not in 78)."""
    whole = rb"(?<!\d)" + re.escape(pattern) + rb"(?!\d)" if b"," in pattern else re.escape(pattern)
    return pattern in data and re.search(whole, data) is not None


def find_leftovers(
    folder: Path, deleted: Sequence[int], remaining: Iterable[Sequence[int]], texts: Iterable[str] = ()
) -> dict[Path, bytes]:
    """Return the files whose content or name contains deleted data, with the matching bytes.

    Deleted data are `texts`, and runs of consecutive tokens from `deleted` that do not occur in `remaining`.
    """
    wanted = runs(deleted) - {run for tokens in remaining for run in runs(tokens)}
    patterns = [spelling for run in wanted for spelling in byte_patterns(run)]
    for text in texts:
        patterns += [text.encode(), json.dumps(text).strip('"').encode()]
    found: dict[Path, bytes] = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            data = name.encode("utf-8", "surrogateescape")
            if path.is_file() and not path.is_symlink():
                data += b"\n" + path.read_bytes()
            if (pattern := next((one for one in patterns if contains(one, data)), None)) is not None:
                found[path] = pattern
    return found
