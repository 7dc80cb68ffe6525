"""Choose how a quantised checkpoint is loaded: converted once to a packed one in the cache, or by transformers."""

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
from .fingerprint import file_identity
from .folder_import import FolderImport
from .gguf_import import GGUFImport
from .importers import IMPORTERS
from .linear import packing
from .packed_cache import cached_folder, is_complete, packed_home
from .packed_checkpoint import CannotPackError
from .source import ModelSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VERSION = 2
_log = logging.getLogger(__name__)


class Conversion(Protocol):
    """The conversion of a quantised checkpoint to a packed one."""

    @property
    def source(self) -> ModelSource:
        """The checkpoint."""

    def files(self) -> list[Path]:
        """Return the files that the result depends on, downloaded if they are on the hub. Raise ModelError."""

    def formats(self, skeleton: PreTrainedModel) -> dict[str, PackedFormat]:
        """Return the formats of the weights that stay packed, by the name of the module. Only headers are read.

        Args:
            skeleton: The model on the meta device.

        Raises:
            CannotPackError: Transformers must load this checkpoint.
            ModelError: The checkpoint is damaged.
        """

    def write(self, folder: Path) -> None:
        """Write the packed checkpoint to an empty folder. Raise the errors of `formats`."""


def conversion_of(source: ModelSource, device: torch.device, quantize: Quantize) -> Conversion | None:
    """Return the conversion of a checkpoint that stays packed on `device`, or None.

    Raises:
        ConfigError: `quantize` does not fit the checkpoint.
        ModelError: The configuration is damaged or not supported.
    """
    if source.gguf is not None and quantize in ("int4", "int8"):
        raise ConfigError(f"quantize={quantize!r} is for 16-bit checkpoints, and {source} is quantised already")
    if quantize != "auto" or device.type != "cpu":
        return None
    if source.gguf is not None:
        return GGUFImport(source)
    config = read_config(source)
    return FolderImport(source, config) if packing(config) in IMPORTERS else None


def _folder(conversion: Conversion) -> Path:
    """Return the folder of the result."""
    files = [file_identity(path) for path in conversion.files()]
    key = hashlib.sha256(repr((_VERSION, version("transformers"), files)).encode()).hexdigest()[:32]
    return packed_home() / key


def ready_source(conversion: Conversion) -> ModelSource | None:
    """Return the packed checkpoint if it exists already."""
    folder = _folder(conversion)
    return replace(conversion.source, place=str(folder), gguf=None) if is_complete(folder) else None


def packed_source(conversion: Conversion) -> ModelSource:
    """Return the packed checkpoint, or the original source if transformers must load it.

    The first call converts the checkpoint, in a time of about 10 seconds per GB.

    Raises:
        ModelError: The checkpoint is damaged, or no model that is supported.
    """
    source, folder = conversion.source, _folder(conversion)
    refused = folder.with_suffix(".refused")  # so that later starts do not try again
    if refused.exists():
        return source
    try:
        cached_folder(folder, source.location, conversion.write)
    except CannotPackError as error:
        _log.info("the weights of %s are dequantised: %s", source, error)
        refused.touch()
        return source
    except OSError as error:
        _log.warning("the weights of %s are loaded by transformers, because they cannot be cached: %s", source, error)
        return source
    return replace(source, place=str(folder), gguf=None)
