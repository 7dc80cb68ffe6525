"""Read the header of a GGUF file, and check that the file is complete.

transformers uses this reader (`fast_gguf`), because `gguf.GGUFReader` takes about ten seconds for a large vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ModelError
from ..utils.extras import install_command
from ..utils.small_files import foreign_file, incomplete_file

_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""numpy dtypes of numeric metadata values, by GGUF value type."""
_STRING, _ARRAY = 8, 9
_MAX_BYTES = 1 << 30
_REQUIRED = ("block_count", "embedding_length")  # metadata that transformers reads for every architecture
_PATCHING = threading.RLock()
"""Held while functions of the module `gguf` are replaced, because all threads share the module."""


class _EarlyEndError(Exception):
    pass


class GGUFField(NamedTuple):
    """A metadata value. It has those attributes of `gguf.ReaderField` that transformers reads.

    Attributes:
        types: The GGUF value type. For arrays, the array type and the type of the elements.
        parts: The elements of an array, or a sequence with just the single value. A string is stored as bytes, and a
            number as an array with one element.
    """

    types: list[int]
    parts: Sequence[Any]

    @property
    def data(self) -> range:
        return range(len(self.parts))


@dataclass(frozen=True)
class GGUFTensor:
    path: Path
    name: str
    shape: tuple[int, ...]  # lengths of the axes in reverse order: `(in, out)` for a matrix
    kind: str  # GGUF type, such as "Q4_K"
    start: int  # byte offset of the data in the file
    size: int  # in bytes

    @property
    def tensor_type(self) -> Any:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType[self.kind]

    @property
    def data(self) -> npt.NDArray[Any]:
        """The elements, memory-mapped from the file: numbers, or bytes for quantised types."""
        dtype = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
        mapped = np.memmap(self.path, np.uint8, "r", self.start, (self.size,))
        return mapped.view(dtype.get(self.kind, np.uint8)).reshape(*self.shape[:0:-1], -1)


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a GGUF file. It has those attributes of `gguf.GGUFReader` that transformers uses."""

    fields: dict[str, GGUFField]
    tensors: tuple[GGUFTensor, ...]

    @property
    def architecture(self) -> str:
        field = self.fields.get("general.architecture")
        return "" if field is None or field.types != [_STRING] else bytes(field.parts[0]).decode(errors="replace")

    def check(self, name: object) -> None:
        """Raise ModelError if tensors or required metadata are missing. The message begins with `name`."""
        if not self.tensors:
            raise ModelError(f"{name} has no tensors, only metadata; expected a GGUF file with the weights of a model")
        required = ["general.architecture", *(f"{self.architecture}.{key}" for key in _REQUIRED if self.architecture)]
        if absent := next((key for key in required if key not in self.fields), None):
            raise ModelError(
                f"{name} is not a language model, or is damaged: its header lacks {absent}; download it again"
            )


def require_gguf(name: object) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"reading {name} needs the package gguf: {install_command('gguf')}")


@contextmanager
def fast_gguf() -> Iterator[None]:
    """Within the `with` block, make transformers read GGUF files with `read_header`."""
    import gguf

    with _PATCHING, ExitStack() as stack:
        # transformers requests the same name map for each module of a model, which would take five seconds in total
        for name, replacement in (
            ("GGUFReader", lambda path: read_header(Path(path))),
            ("get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        ):
            stack.callback(setattr, gguf, name, getattr(gguf, name))
            setattr(gguf, name, replacement)
        yield


def read_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file.

    Raises:
        ModelError: The file is not a GGUF file, or ends before the end of its last tensor.
    """
    if (foreign := foreign_file(path, "a GGUF file")) is not None:
        raise foreign
    with path.open("rb") as file:
        try:
            fields, tensors, start = _read_header(file)
        except _EarlyEndError:
            raise ModelError(
                f"'{path}' is damaged, or truncated within its header; download or copy it again"
            ) from None
    described = tuple(_tensor(path, name, shape, kind, start + offset) for name, shape, kind, offset in tensors)
    missing = max((tensor.start + tensor.size for tensor in described), default=0) - path.stat().st_size
    if missing > 0:
        raise incomplete_file(path, missing)
    return GGUFHeader(fields, described)


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ModelError(f"'{path}': tensor {name} has the unknown type {kind}") from None
    if shape and shape[0] % block:
        raise ModelError(f"'{path}' is damaged: tensor {name} has {shape[0]} columns in blocks of {block}")
    size = math.prod(shape) // block * block_bytes
    return GGUFTensor(path, name, shape, GGMLQuantizationType(kind).name, start, size)


def _read_header(file: BinaryIO) -> tuple[dict[str, GGUFField], list[tuple[str, tuple[int, ...], int, int]], int]:
    """Return the metadata, the tensors (name, shape, type, offset), and the offset of the first tensor's data."""
    if file.read(4) != b"GGUF":
        raise ModelError(
            f"'{file.name}' is not a GGUF file: it does not begin with GGUF; pass a GGUF file, or a folder with "
            "config.json and *.safetensors"
        )
    version, count, entries = _unpack(file, "<IQQ")
    if version not in (2, 3):
        raise ModelError(f"'{file.name}' has version {version} of the GGUF format; supported are 2 and 3")
    fields, tensors = {}, []
    for _ in range(entries):
        key = _string(file).decode(errors="replace")
        fields[key] = _field(file, *_unpack(file, "<I"))
    for _ in range(count):
        name, dims = _string(file).decode(errors="replace"), _unpack(file, "<I")[0]
        if dims > 8:
            raise _EarlyEndError
        *shape, kind, offset = _unpack(file, f"<{dims}QIQ")
        tensors.append((name, tuple(shape), kind, offset))
    declared = fields.get("general.alignment")
    alignment = int(declared.parts[0][0]) if declared is not None and declared.types == [4] else 0
    return fields, tensors, -(-file.tell() // (alignment or 32)) * (alignment or 32)


def _field(file: BinaryIO, kind: int) -> GGUFField:
    if kind == _STRING:
        return GGUFField([kind], [_string(file)])
    if kind in _NUMBERS:
        return GGUFField([kind], [_numbers(file, kind, 1)])
    if kind != _ARRAY:
        raise _EarlyEndError
    inner, count = _unpack(file, "<IQ")
    if inner == _STRING:
        return GGUFField([kind, inner], [_string(file) for _ in range(count)])
    if inner not in _NUMBERS:
        raise _EarlyEndError
    return GGUFField([kind, inner], list(_numbers(file, inner, count)[:, None]))


def _numbers(file: BinaryIO, kind: int, count: int) -> npt.NDArray[Any]:
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(_bytes(file, count * dtype.itemsize), dtype)


def _string(file: BinaryIO) -> bytes:
    return _bytes(file, int.from_bytes(_bytes(file, 8), "little"))


def _unpack(file: BinaryIO, format_string: str) -> tuple[int, ...]:
    return struct.unpack(format_string, _bytes(file, struct.calcsize(format_string)))


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = b"" if count > _MAX_BYTES else file.read(count)
    if len(data) < count:
        raise _EarlyEndError
    return data
