"""Reader for the header of a GGUF file, which also checks that the file is complete."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import ModelError
from .source import truncated

_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size in bytes of metadata values, by GGUF value type."""
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 30


class _EarlyEndError(Exception):
    """The file ends within its header, or the header is damaged."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a GGUF file.

    Attributes:
        shape: Lengths of the axes in reverse order: `(in, out)` for a matrix.
        kind: GGUF type, such as "Q4_K".
        start: Offset in bytes of the tensor's data in the file.
        size: Size in bytes of the tensor's data.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    start: int
    size: int


@dataclass(frozen=True)
class GGUFHeader:
    """The parts of a GGUF header that importers need."""

    architecture: str
    tensors: tuple[GGUFTensor, ...]


def read_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file, after checking that the file is complete.

    Raises:
        ModelError: The file is not a GGUF file, or ends before the end of its last tensor.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with path.open("rb") as file:
        try:
            architecture, tensors, start = _read_header(file)
        except _EarlyEndError:
            raise ModelError(f"'{path}' is damaged, or truncated within its header; copy it again") from None
        size = path.stat().st_size
    found = []
    for name, shape, kind, offset in tensors:
        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelError(f"'{path}': tensor {name} has the unknown type {kind}") from None
        count = 1
        for length in shape:
            count *= length
        if count % per_block or (shape and shape[0] % per_block):
            raise ModelError(f"'{path}' is damaged: tensor {name} has {shape[0]} columns in blocks of {per_block}")
        kind_name = GGMLQuantizationType(kind).name
        found.append(GGUFTensor(name, shape, kind_name, start + offset, count // per_block * block_bytes))
    last = max(found, key=lambda tensor: tensor.start + tensor.size, default=None)
    if last is not None and (missing := last.start + last.size - size) > 0:
        raise truncated(path, missing)
    return GGUFHeader(architecture, tuple(found))


def _read_header(file: BinaryIO) -> tuple[str, list[tuple[str, tuple[int, ...], int, int]], int]:
    """Return the architecture, the tensors (name, shape, type, offset), and the offset at which tensor data starts."""
    if file.read(4) != b"GGUF":
        raise ModelError(f"'{file.name}' is not a GGUF file: it does not begin with GGUF")
    version, count, entries = _read(file, "<IQQ")
    if version not in (2, 3):
        raise ModelError(f"'{file.name}' has version {version} of the GGUF format; supported are 2 and 3")
    alignment, architecture = 32, ""
    for _ in range(entries):
        key, kind = _text(file), _read(file, "<I")[0]
        if key == "general.alignment" and kind == 4:
            alignment = _read(file, "<I")[0] or 32
        elif key == "general.architecture" and kind == _STRING:
            architecture = _text(file)
        else:
            _skip(file, kind)
    tensors = []
    for _ in range(count):
        name, dims = _text(file), _read(file, "<I")[0]
        if dims > 8:
            raise _EarlyEndError
        *shape, kind, offset = _read(file, f"<{dims}QIQ")
        tensors.append((name, tuple(shape), kind, offset))
    return architecture, tensors, -(-file.tell() // alignment) * alignment


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
