"""Cache checkpoint fingerprints on disk, so that only the first load digests the weights."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..utils.private_files import make_private_folder, open_private
from ..utils.small_files import read_json, read_small
from .cache_folder import cache_folder
from .fingerprint import VERSION, fingerprint
from .location import Location

_INDEX = "model.safetensors.index.json"
_SETTLED_SECONDS = 2.0
"""Minimum age of a file before its fingerprint is cached. File systems have a time resolution of up to one second or
more, so a later change of a younger file could leave its times unchanged."""

_log = logging.getLogger(__name__)


class FingerprintCache:
    """Cached fingerprint of one checkpoint. Create the object before the weights are read.

    The key of an entry is a digest of everything that determines the weights: name, device, inode, size, mtime and
    ctime of each checkpoint file, the configuration, the shape and dtype of each weight, and the versions of the
    libraries that read them. An entry is read or written only if no file has changed since this object was created.
    Hub checkpoints and checkpoints with remote code are digested on every load.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._files = _identities(location)

    def fingerprint(self, model: Any) -> str:
        """Return `fingerprint(model)`, from the cache if possible. `model` must have been read from the checkpoint."""
        if self._files is None or self._files != _identities(self._location):
            return fingerprint(model)
        entry = cache_folder() / "fingerprints" / _key(model, self._files)
        if (known := _read(entry)) is not None:
            return known
        found = fingerprint(model)
        if self._files == _identities(self._location) and _settled(self._files):
            _write(entry, found)
        return found


def _identities(location: Location) -> list[tuple[Any, ...]] | None:
    """Return name, device, inode, size, mtime and ctime of each file that may contain weights.

    Return None if the files cannot be determined, or if remote code or a PEFT adapter may change the weights.
    """
    folder = location.folder
    if folder is None or location.hub.trust_remote_code or (folder / "adapter_config.json").exists():
        return None
    try:
        if location.gguf is not None:
            paths = {folder / location.gguf}
        else:
            paths = {path for path in folder.iterdir() if path.is_file()}
            if (index := folder / _INDEX).exists():  # may refer to files in other folders
                paths |= {folder / shard for shard in read_json(index)["weight_map"].values()}
        return [_identity(path) for path in sorted(paths)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # reading the weights reports the error


def _identity(path: Path) -> tuple[Any, ...]:
    status = path.stat()
    # Copying or restoring a file can preserve its mtime, but not its ctime.
    return path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settled(files: list[tuple[Any, ...]]) -> bool:
    """Return whether all files are old enough that a later change would alter their times."""
    newest = max(int(changed) for each in files for changed in each[-2:])
    return newest < time.time_ns() - _SETTLED_SECONDS * 1e9


def _key(model: Any, files: list[tuple[Any, ...]]) -> str:
    """Return the cache key of a model that was read from `files`."""
    named = [*model.named_parameters(), *model.named_buffers()]
    said = {
        "versions": [VERSION, *(version(package) for package in ("offload-rt", "transformers", "torch"))],
        "files": files,
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": model.config.to_dict(),
        "weights": [(name, type(each).__name__, list(each.shape), str(each.dtype)) for name, each in named],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _read(entry: Path) -> str | None:
    try:
        text = read_small(entry, 100).decode()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch("[0-9a-f]{64}", text) else None


def _write(entry: Path, text: str) -> None:
    temporary = entry.with_name(f"{entry.name}.{secrets.token_hex(8)}.tmp")
    try:
        make_private_folder(entry.parent)
        try:
            with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
                file.write(text)
            os.replace(temporary, entry)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("the model's fingerprint could not be cached, so the next load computes it again: %s", error)
