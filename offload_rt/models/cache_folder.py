"""Where results that are made once for a model are kept."""

from __future__ import annotations

import os
from pathlib import Path

from ..utils.native_code import user_cache


def cache_folder() -> Path:
    """`$OFFLOAD_RT_CACHE`, else `user_cache`: `$XDG_CACHE_HOME/offload-rt` or `~/.cache/offload-rt`."""
    if own := os.environ.get("OFFLOAD_RT_CACHE"):
        return Path(own)
    return user_cache()
