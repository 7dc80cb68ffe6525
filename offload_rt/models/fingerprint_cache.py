"""Keep the fingerprint of a checkpoint in the user's cache, so that only the first load digests its weights."""

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
"""Age from which on a file's times tell it from a later version. File systems count time in ticks, some of a second."""

_log = logging.getLogger(__name__)


class FingerprintCache:
    """The fingerprint of one checkpoint. Make it before the weights are read.

    An entry is named by a digest of everything that decides about the weights: name, device, inode, size, and both
    times of each file of the checkpoint, the configuration, the shape and dtype of each weight, and the versions of
    what reads them. It is used and written only if no file has changed since this object was made. Checkpoints on the
    hub and those that run code of their own are digested each time.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._files = _identities(location)

    def fingerprint(self, model: Any) -> str:
        """Return `fingerprint(model)`, from the cache if it is there. `model` was read from the checkpoint."""
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
    """Return name, device, inode, size, mtime and ctime of the files that the weights may come from. Return None if
    they are unknown, or if code of the checkpoint may change what is read."""
    folder = location.folder
    if folder is None or location.hub.trust_remote_code or (folder / "adapter_config.json").exists():
        return None
    try:
        if location.gguf is not None:
            paths = {folder / location.gguf}
        else:
            paths = {path for path in folder.iterdir() if path.is_file()}
            if (index := folder / _INDEX).exists():  # may name files of other folders
                paths |= {folder / shard for shard in read_json(index)["weight_map"].values()}
        return [_identity(path) for path in sorted(paths)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # whatever is wrong, reading the weights reports it


def _identity(path: Path) -> tuple[Any, ...]:
    status = path.stat()
    # Whoever copies or restores a file can set its mtime, but not its ctime.
    return path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settled(files: list[tuple[Any, ...]]) -> bool:
    """Return whether a change of a file from now on would change its times."""
    newest = max(int(changed) for each in files for changed in each[-2:])
    return newest < time.time_ns() - _SETTLED_SECONDS * 1e9


def _key(model: Any, files: list[tuple[Any, ...]]) -> str:
    """Return the name of the entry of a model that was read from `files`."""
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
