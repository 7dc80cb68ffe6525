"""C code of this package, compiled on first use for the processor that it runs on and kept in the user's cache folder.

There is no compiler everywhere: where none is found, or it fails, callers take another path.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_log = logging.getLogger(__name__)

_TELLING = (b"model name", b"flags", b"CPU implementer", b"CPU part", b"Features")
"""What lines of /proc/cpuinfo begin with that tell one processor from another: of x86, and of ARM."""


def load_library(source: Path, flags: Sequence[str], without: str) -> ctypes.CDLL | None:
    """The library that `source` compiles to with `flags`; None where it cannot be, and then the log says that what the
    code is for happens `without` it."""
    given = os.environ.get("CC", "").strip() or "cc"
    named, *options = [given] if shutil.which(given) else given.split()
    compiler = shutil.which(named)
    if compiler is None:
        _log.info("%s: there is no compiler %s", without, named)
        return None
    command = [compiler, *options, *flags, "-shared", "-fPIC"]
    described = " ".join(command).encode() + source.read_bytes() + _processor()
    cache = user_cache() / "native"
    path = cache / f"{source.stem}-{hashlib.sha256(described).hexdigest()[:16]}.so"
    try:
        if not path.exists():
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                built = Path(folder) / path.name
                subprocess.run([*command, str(source), "-o", str(built)], check=True, capture_output=True, timeout=120)
                with built.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(built, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        _log.info("%s: %s", without, error)
        return None


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/offload-rt`, else `~/.cache/offload-rt`; for a user who has no home folder, one that goes with
    the process."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload-rt"
    except RuntimeError:
        return Path(_passing().name)


@functools.cache
def _passing() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="offload-rt-")


def _processor() -> bytes:
    """What tells this processor from others that share the cache folder."""
    described = Path("/proc/cpuinfo")
    if not described.exists():
        return b""
    lines = described.read_bytes().split(b"\n")
    return b"".join(line for line in lines if line.startswith(_TELLING))
