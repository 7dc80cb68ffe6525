"""Load the C code for another instruction set level."""

from __future__ import annotations

from offload_rt.kernels import native, team
from offload_rt.models.linear import dense
from offload_rt.utils import native_code, native_libraries

_CACHED = (
    dense.torch_multiplies_bfloat16,
    team._library,
    native_libraries._origin,
    native_code._warn_once,
)


def unload() -> None:
    """Clear all caches of loaded C code, so that the next call loads the code for the current level."""
    native.unload()
    for function in _CACHED:
        function.cache_clear()
