"""Names and sizes of the tensors in the safetensors files of a checkpoint, read from the headers of the files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelError
from ..utils.small_files import incomplete_file, read_json
from .source import ModelSource

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20


class StoredTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str  # dtype in the notation of safetensors, such as "BF16"
    size: int  # in bytes
    file: Path | None  # None for a checkpoint on the hub


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that transformers reads: those in the index, else model.safetensors, else all."""
    if (index := folder / INDEX).exists():
        return sorted({folder / str(name) for name in read_json(index)["weight_map"].values()})
    single = folder / "model.safetensors"
    return [single] if single.exists() else sorted(folder.glob("*.safetensors"))


def stored_tensors(source: ModelSource) -> Iterator[StoredTensor]:
    """Yield the tensors of a checkpoint. Only the headers of files are read.

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
                yield StoredTensor(name, tuple(entry["shape"]), entry["dtype"], last - first, path)


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_HEADER_LIMIT, path.stat().st_size):
            raise ValueError(f"{path.name} is damaged: its header has a length of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
        return header


def check_complete(path: Path) -> Path:
    """Return `path`, after checking that this safetensors file is complete.

    Raise ModelError if the file is damaged, or ends before the end of its last tensor.
    """
    try:
        ends = [entry["data_offsets"][1] for name, entry in _header(path).items() if name != "__metadata__"]
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        missing = start + max(ends, default=0) - path.stat().st_size
    except FileNotFoundError:
        raise ModelError(f"'{path}' does not exist, but the index of the checkpoint names it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"'{path}' is damaged: its header cannot be read ({error})") from error
    if missing > 0:
        raise incomplete_file(path, missing)
    return path


def check_weights(source: ModelSource) -> None:
    """Raise ModelError if a local folder has no safetensors files, or an incomplete one. Only headers are read."""
    folder = source.folder
    if folder is None or source.gguf is not None:
        return
    if any(folder.glob("*.safetensors")):
        try:
            files = weight_files(folder)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"'{folder / INDEX}' is damaged: {error}") from error
        for file in files:
            check_complete(file)
        return
    pickled = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    what = "only pickled weights, which are never loaded because they can run code" if pickled else "no weights"
    raise ModelError(f"{source} has {what}; expected *.safetensors, as written by save_pretrained")
