"""Names and sizes of the tensors in a checkpoint's safetensors files, read from the file headers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelError
from ..utils.small_files import foreign_file, incomplete_file, read_json
from .source import ModelSource

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element, by dtype in the notation of safetensors."""

_PACKED_PART = {"gptq": ".qweight", "awq": ".qweight"}
"""Name suffix of packed weights, by quantisation method."""


_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors raised while a damaged or unreadable header is read."""


class StoredTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str  # dtype in the notation of safetensors, such as "BF16"
    size: int  # in bytes
    file: Path | None  # None for a checkpoint on the hub


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: those in the index, otherwise model.safetensors, otherwise
    all.
    """
    if (index := folder / INDEX).exists():
        return sorted({folder / str(name) for name in read_json(index)["weight_map"].values()})
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def stored_tensors(source: ModelSource) -> Iterator[StoredTensor]:
    """Yield the tensors of a checkpoint. Only file headers are read.

    Raises:
        OSError: A file cannot be read.
        ValueError, KeyError, TypeError, AttributeError: A header is damaged.
    """
    if source.folder is None:
        from huggingface_hub import get_safetensors_metadata

        hub = source.hub
        for file in get_safetensors_metadata(
            source.name_or_path, revision=hub.revision, token=hub.token
        ).files_metadata.values():
            for name, info in file.tensors.items():
                size = info.data_offsets[1] - info.data_offsets[0]
                yield StoredTensor(name, tuple(info.shape), info.dtype, size, None)
        return
    for path in weight_files(source.folder):
        for name, entry in _header(path).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield StoredTensor(name, tuple(entry["shape"]), str(entry["dtype"]), last - first, path)


def readable_tensors(source: ModelSource) -> list[StoredTensor]:
    """Return the tensors of a checkpoint. Raise ModelError if a file cannot be read or a header is damaged."""
    try:
        return list(stored_tensors(source))
    except _DAMAGE as error:
        raise ModelError(f"cannot read the sizes of the weights of {source}: {error}") from error


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, path.stat().st_size):
            raise ValueError(f"it states {length:,} bytes of header, and the file has {path.stat().st_size:,}")
        header: dict[str, Any] = json.loads(file.read(length))
        return header


def check_complete(path: Path) -> Path:
    """Check the safetensors file `path`, and return `path`. Raise ModelError if the file is damaged or incomplete."""
    try:
        if (foreign := foreign_file(path, "a safetensors file")) is None:
            missing = _missing_bytes(path)
    except FileNotFoundError:
        raise ModelError(
            f"'{path}' does not exist, but the index of the checkpoint names it: download the missing file"
        ) from None
    except _DAMAGE as error:
        raise ModelError(f"'{path}' is damaged: its header cannot be read ({error}); download it again") from error
    if foreign is not None:
        raise foreign
    if missing > 0:
        raise incomplete_file(path, missing)
    if missing < 0:
        raise ModelError(f"'{path}' has {-missing:,} bytes more than its header states: download or copy it again")
    return path


def _missing_bytes(path: Path) -> int:
    """Return how many bytes of a safetensors file are missing according to its header (negative if it has too many)."""
    end, header = 0, _header(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if entry["dtype"] not in _BITS:
            raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
        if (last - first) * 8 != math.prod(entry["shape"]) * _BITS[entry["dtype"]]:
            raise ValueError(f"{name} has {last - first:,} bytes, which is not the size of {entry['shape']} elements")
        end = max(end, last)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    return start + end - path.stat().st_size


def check_weights(source: ModelSource) -> None:
    """Raise ModelError if a local folder has no safetensors files, or if one is incomplete.

    Only file headers are read.
    """
    folder = source.folder
    if folder is None or source.gguf is not None:
        return
    if any(folder.glob("*.safetensors")):
        try:
            files = weight_files(folder)
        except _DAMAGE as error:
            raise ModelError(
                f"'{folder / INDEX}' is damaged ({error}); expected an object with the file of each weight in "
                "'weight_map': download it again"
            ) from error
        for file in files:
            check_complete(file)
        _check_packed(folder, source)
        return
    pickled = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    what = "only pickled weights, which are never loaded because they can run code" if pickled else "no weights"
    raise ModelError(f"{source} has {what}; expected *.safetensors, as written by save_pretrained")


def _check_packed(folder: Path, source: ModelSource) -> None:
    stated = read_json(folder / "config.json").get("quantization_config")
    method = None if stated is None else stated.get("quant_method")
    part = _PACKED_PART.get(str(method))
    if part is not None and not any(tensor.name.endswith(part) for tensor in stored_tensors(source)):
        raise ModelError(
            f"config.json of {source} states {method} weights, and its files have none (*{part}): remove "
            "quantization_config from config.json, or download the packed files"
        )
