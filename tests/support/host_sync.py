"""Detect operations that make the host wait for the device."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

READS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim", "equal")
"""Operations that return a device value to the host, or whose result shape depends on a device value."""


class HostSyncError(Exception):
    pass


class NoHostSync(TorchDispatchMode):
    """Dispatch mode that raises HostSyncError for operations that read device values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise HostSyncError(str(func))
        return func(*args, **(kwargs or {}))
