"""Check that a GGUF file is complete, from its header."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from ..errors import ModelError

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of metadata values, by type."""
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 30


class _EarlyEndError(Exception):
    """The file ends within the header, or the header is damaged."""


def check_complete(path: Path) -> set[str]:
    """Check that a GGUF file is complete, and return the types of its tensors, such as "Q4_K".

    Raises:
        ModelError: The file is not a GGUF file, or ends before its last tensor does.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with path.open("rb") as file:
        try:
            tensors, start = _read_header(file)
        except _EarlyEndError:
            raise ModelError(f"'{path}' is damaged: the file ends early, within its header") from None
        size = path.stat().st_size
    ends = []
    for name, shape, kind, offset in tensors:
        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelError(f"'{path}': tensor {name} has the unknown type {kind}") from None
        count = 1
        for length in shape:
            count *= length
        ends.append((start + offset + count // per_block * block_bytes, name))
    short = [(end - size, name) for end, name in sorted(ends) if end > size]
    if short:
        last, name = short[-1]
        raise ModelError(f"'{path}' is damaged: the file ends early: tensor {name} needs {last:,} more bytes")
    return {GGMLQuantizationType(kind).name for _, _, kind, _ in tensors}


def _read_header(file: BinaryIO) -> tuple[list[tuple[str, tuple[int, ...], int, int]], int]:
    """Return name, shape, type and offset of each tensor, and the file position that offsets refer to."""
    if file.read(4) != b"GGUF":
        raise ModelError(f"'{file.name}' is not a GGUF file: it does not begin with GGUF")
    version, count, entries = _read(file, "<IQQ")
    if version not in (2, 3):
        raise ModelError(f"'{file.name}' has version {version} of the GGUF format; supported are 2 and 3")
    alignment = 32
    for _ in range(entries):
        key, kind = _text(file), _read(file, "<I")[0]
        if key == "general.alignment" and kind == 4:
            alignment = _read(file, "<I")[0] or 32
        else:
            _skip(file, kind)
    tensors = []
    for _ in range(count):
        name, dims = _text(file), _read(file, "<I")[0]
        if dims > 8:
            raise _EarlyEndError
        *shape, kind, offset = _read(file, f"<{dims}QIQ")
        tensors.append((name, tuple(shape), kind, offset))
    return tensors, -(-file.tell() // alignment) * alignment


def _read(file: BinaryIO, form: str) -> tuple[int, ...]:
    data = file.read(struct.calcsize(form))
    if len(data) < struct.calcsize(form):
        raise _EarlyEndError
    return struct.unpack(form, data)


def _text(file: BinaryIO) -> str:
    (length,) = _read(file, "<Q")
    if length > _LONGEST:
        raise _EarlyEndError
    return file.read(length).decode(errors="replace")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _ARRAY:
        inner, count = _read(file, "<IQ")
        if inner in _SIZES:
            file.seek(_SIZES[inner] * min(count, _LONGEST), 1)
            return
        for _ in range(count):
            _skip(file, inner)
    elif kind == _STRING:
        (length,) = _read(file, "<Q")
        file.seek(min(length, _LONGEST), 1)
    elif kind in _SIZES:
        file.seek(_SIZES[kind], 1)
    else:
        raise _EarlyEndError
