"""Headers of safetensors files, and checks that the files of a checkpoint are complete. No heavy imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError

_HEADER_LIMIT = 100 << 20
"""Longest header in bytes that the safetensors library accepts."""

_INDEX = "model.safetensors.index.json"


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: dtype, shape and offsets by tensor.

    Raises:
        OSError, ValueError: The file cannot be read, or its header is damaged.
    """
    return _read_header(path)[0]


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header and the position of the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, path.stat().st_size):
            raise ValueError(f"{path.name} is damaged: its header has a length of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
        return header, 8 + length


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: those of the index, model.safetensors, or all."""
    if named := _indexed(folder):
        return sorted(folder / name for name in named)
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))


def check_files(folder: Path) -> None:
    """Raise ModelError if a safetensors file of a checkpoint is missing, damaged or truncated."""
    absent = [path.name for path in weight_files(folder) if not path.is_file()]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise ModelError(f"'{folder}' lacks {absent[0]}{more}, which {_INDEX} names: the download is incomplete")
    for path in weight_files(folder):
        check_complete(path)


def check_complete(path: Path) -> Path:
    """Return `path`. Raise ModelError if this safetensors file is damaged or truncated."""
    cure = "copy or download it again"
    try:
        header, start = _read_header(path)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        missing = int(start + max(ends, default=0) - path.stat().st_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"'{path}' is damaged: its header cannot be read ({error}); {cure}") from error
    if missing > 0:
        raise ModelError(f"'{path}' is truncated: {missing:,} bytes are missing; {cure}")
    return path


def _indexed(folder: Path) -> set[str]:
    """Return the files that the index of a sharded checkpoint names. The loader reports a damaged index."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        return {str(name) for name in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
