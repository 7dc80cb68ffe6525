"""Cache of small results that are computed from the files of a checkpoint, such as its fingerprint."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from ..utils.atomic_files import write_atomic
from ..utils.native_code import cache_folder
from ..utils.private_files import make_private_folder
from ..utils.small_files import read_json, read_small
from .source import ModelSource
from .stored_tensors import INDEX

SETTLED_SECONDS = 2.0
"""Results are cached only if all files are at least this many seconds old.

A change to a newer file might not change its timestamps, because some file systems store them in whole seconds.
"""

LARGEST = 1 << 20  # maximum size of a cached result in bytes

_log = logging.getLogger(__name__)
T = TypeVar("T")


class CheckpointCache:
    """Caches results on disk. A cached result is valid as long as files, arguments and library versions are the same.

    Create the object before reading the files. If a file changes afterwards, the cache is not used. Results of hub
    checkpoints and of checkpoints with remote code are not cached.
    """

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._files = _identities(source)

    def lookup(
        self,
        name: str,
        arguments: object,
        compute: Callable[[], T],
        parse: Callable[[str], T],
        dump: Callable[[T], str] = str,
    ) -> T:
        """Return the cached result if there is a valid one. Otherwise, compute the result and cache it.

        Args:
            name: Name of the result, for example "fingerprints".
            arguments: All inputs of the result other than the checkpoint files, as JSON types.
            compute: Computes the result.
            parse: Converts cached text back to the result. If the text is damaged, it raises LookupError, TypeError,
                ValueError or AttributeError.
            dump: Converts the result to text of at most `LARGEST` bytes.
        """
        if self._files is None or self._files != _identities(self._source):
            return compute()
        versions = [version(package) for package in ("offload-rt", "transformers", "torch")]
        key = json.dumps([versions, self._files, arguments], sort_keys=True, default=str)
        entry = cache_folder() / name / hashlib.sha256(key.encode()).hexdigest()
        try:
            return parse(read_small(entry, LARGEST).decode())
        except (OSError, LookupError, TypeError, ValueError, AttributeError):
            result = compute()
        if self._files == _identities(self._source) and _settled(self._files):
            try:
                make_private_folder(entry.parent)
                write_atomic(entry, dump(result).encode())
            except OSError as error:
                _log.warning("%s could not be cached, so the next load computes it again: %s", name, error)
        return result


def _identities(source: ModelSource) -> list[tuple[Any, ...]] | None:
    """Return the `file_identity` of each file that may contain weights.

    Return None if the files are not known, or if remote code or a PEFT adapter may change the weights.
    """
    folder = source.folder
    if folder is None or source.hub.trust_remote_code or (folder / "adapter_config.json").exists():
        return None
    try:
        if source.gguf is not None:
            paths = {folder / source.gguf}
        else:
            paths = {path for path in folder.iterdir() if path.is_file()}
            if (index := folder / INDEX).exists():  # the index may refer to files in other folders
                paths |= {folder / shard for shard in read_json(index)["weight_map"].values()}
        return [file_identity(path) for path in sorted(paths)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # Reading the weights will report the error.


def file_identity(path: Path) -> tuple[Any, ...]:
    """Return properties of a file such that any change to the file changes at least one of them. Raises OSError."""
    status = path.stat()
    # Copying or restoring a file can preserve its mtime, but not its ctime.
    return path.name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settled(files: list[tuple[Any, ...]]) -> bool:
    newest = max(int(changed) for identity in files for changed in identity[-2:])
    return newest < time.time_ns() - SETTLED_SECONDS * 1e9
