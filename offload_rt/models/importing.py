"""Choose how to load a quantised checkpoint: with transformers, or as a packed checkpoint in a cache folder."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..config import Quantize
from ..errors import ConfigError
from ..kernels.packed_format import PackedFormat
from .checkpoint import read_config
from .checkpoint_cache import file_identity
from .folder_import import FolderImport
from .gguf_import import GGUFImport
from .importers import IMPORTERS
from .linear import packing
from .packed_cache import cached_folder, is_complete, packed_cache_folder
from .packed_checkpoint import CannotPackError
from .source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERSION = 3
_log = logging.getLogger(__name__)


class Conversion(Protocol):
    """Converts one quantised checkpoint to a packed checkpoint: a folder with weights in this package's format."""

    @property
    def source(self) -> ModelSource: ...

    @property
    def interleaved(self) -> bool: ...

    def files(self) -> list[Path]:
        """Return the files that determine the result.

        If they are on the hub, download them. Raise ModelError if this fails.
        """

    def formats(self, skeleton: PreTrainedModel) -> dict[str, PackedFormat]:
        """Return the format of each weight that stays packed, by module name. Only file headers are read.

        `skeleton` is the model on the meta device. Raise CannotPackError if the checkpoint must be loaded by
        transformers.
        """

    def write(self, folder: Path) -> None: ...


def conversion_of(source: ModelSource, quantize: Quantize, device: torch.device) -> Conversion | None:
    """Return the conversion of `source` to a packed checkpoint for `device`.

    The result is None if transformers must load the checkpoint.

    Raises:
        ConfigError: `quantize` does not fit the checkpoint.
        ModelError: The configuration is damaged or not supported.
    """
    if source.gguf is not None and quantize in ("int4", "int8"):
        raise ConfigError(f"quantize={quantize!r} is for 16-bit checkpoints, and {source} is quantised already")
    if quantize != "auto":
        return None
    interleaved = device.type == "cpu"
    if source.gguf is not None:
        return GGUFImport(source, interleaved)
    config = read_config(source)
    return FolderImport(source, interleaved, config) if packing(config) in IMPORTERS else None


def _folder(conversion: Conversion) -> Path:
    files = [file_identity(path) for path in conversion.files()]
    identity = _VERSION, version("transformers"), conversion.interleaved, files
    key = hashlib.sha256(repr(identity).encode()).hexdigest()[:32]
    return packed_cache_folder() / key


def converted_source(conversion: Conversion) -> ModelSource | None:
    folder = _folder(conversion)
    return replace(conversion.source, name_or_path=str(folder), gguf=None) if is_complete(folder) else None


def packed_source(conversion: Conversion) -> ModelSource:
    """Return the packed checkpoint, or the original checkpoint if transformers must load it.

    The first call converts the checkpoint, which takes about 15 seconds per GB.

    Raises:
        ModelError: The checkpoint is damaged, or its model is not supported.
    """
    source, folder = conversion.source, _folder(conversion)
    # mark the checkpoint, so that later starts do not try to convert it again
    refusal_marker = folder.with_suffix(".refused")
    if refusal_marker.exists():
        return source
    try:
        cached_folder(folder, source.location, conversion.write)
    except CannotPackError as error:
        _log.info("the weights of %s are dequantised: %s", source, error)
        refusal_marker.touch()
        return source
    except OSError as error:
        _log.warning("the weights of %s are loaded by transformers, because they cannot be cached: %s", source, error)
        return source
    return replace(source, name_or_path=str(folder), gguf=None)
