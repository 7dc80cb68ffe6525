"""Names and sizes of the tensors in the safetensors files of a checkpoint, from their headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .safetensors_files import read_header, weight_files
from .source import ModelSource


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        kind: Its dtype in the notation of safetensors, such as "BF16".
        size: Its bytes.
        file: The file that holds it, None on the hub.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    size: int
    file: Path | None


def stored_tensors(source: ModelSource) -> Iterator[StoredTensor]:
    """Yield the tensors of a checkpoint. Only headers are read.

    Raises:
        OSError: A file cannot be read.
        ValueError, KeyError, TypeError, AttributeError: A header is damaged.
    """
    if source.folder is None:
        from huggingface_hub import get_safetensors_metadata

        hub = source.hub
        for file in get_safetensors_metadata(
            source.place, revision=hub.revision, token=hub.token
        ).files_metadata.values():
            for name, info in file.tensors.items():
                size = info.data_offsets[1] - info.data_offsets[0]
                yield StoredTensor(name, tuple(info.shape), info.dtype, size, None)
        return
    for path in weight_files(source.folder):
        for name, entry in read_header(path).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                yield StoredTensor(name, tuple(entry["shape"]), entry["dtype"], last - first, path)
