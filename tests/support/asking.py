"""Detect operations that synchronize the host with the device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ASKING = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")


class AskedError(Exception):
    """Raised if the host reads a value of the device."""


class NobodyAsks(TorchDispatchMode):
    """Raise on operations that read device values, for a number on the host or for the shape of a result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ASKING:
            raise AskedError(str(func))
        return func(*args, **(kwargs or {}))
