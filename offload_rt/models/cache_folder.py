"""The folder of cached per-model results, such as fingerprints and calibrations."""

from __future__ import annotations

import os
from pathlib import Path

from ..utils.native_code import user_cache


def cache_folder() -> Path:
    """Return `$OFFLOAD_RT_CACHE` if set, else `$XDG_CACHE_HOME/offload-rt` or `~/.cache/offload-rt`."""
    if own := os.environ.get("OFFLOAD_RT_CACHE"):
        return Path(own)
    return user_cache()
