"""Where results that are made once for a model are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$OFFLOAD_RT_CACHE`, else `$XDG_CACHE_HOME/offload-rt`, else `~/.cache/offload-rt`."""
    if own := os.environ.get("OFFLOAD_RT_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offload-rt"
