"""Sees whether the host asks the device for a value."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

ASKING = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")


class AskedError(Exception):
    """The host asked for a value."""


class NobodyAsks(TorchDispatchMode):
    """Operations whose result depends on values, in shape or as a number of the host, raise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ASKING:
            raise AskedError(str(func))
        return func(*args, **(kwargs or {}))
