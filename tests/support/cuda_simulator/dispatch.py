"""Queue torch operations on device tensors in the simulator's streams.

Views are created immediately. Every other operation allocates a poisoned output, whose shape is computed with meta
tensors, and is queued in the current stream. It runs later on the host, on host views that do not keep memory alive.
Except for host scalars, host and device tensors cannot be mixed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .copies import copy_between

if TYPE_CHECKING:
    from .simulator import Simulator

aten = torch.ops.aten

EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
LIKE_VIEWS = ("_unsafe_view", "lift_fresh", "detach", "alias")
SHAPES: dict[Any, Any] = {}
"""Cached results as meta tensors, by operation and argument signature. All simulators share the cache."""


def _histogram(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    return aten.histc(x.float(), *args, **named).to(x.dtype)


def _grouped(x: torch.Tensor, weight: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    return x.new_empty(len(x), weight.shape[-1]) if x.is_meta else aten._grouped_mm(x, weight, *args, **named)


STAND_INS: dict[Any, Any] = {aten.histc.default: _histogram, aten._grouped_mm.default: _grouped}
"""Replacements for operations that support more dtypes on CUDA than on a CPU or on meta tensors."""

HOST_INDICES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Operations whose indices may be on the host. torch copies them to the device and waits."""


@cache
def _composite(func: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd"))


@cache
def _depends_on_values(func: Any) -> bool:
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


def find_tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    if isinstance(tree, (tuple, list, dict)):
        for each in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(each, torch.Tensor):  # without a call, because most arguments are tensors or numbers
                found.append(each)
            elif isinstance(each, (tuple, list, dict)):
                found += find_tensors(each)
    return found


def map_tensors(tree: Any, change: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([map_tensors(x, change) if isinstance(x, _NESTED) else x for x in tree])
    if isinstance(tree, dict):
        return {name: map_tensors(x, change) if isinstance(x, _NESTED) else x for name, x in tree.items()}
    return tree


_NESTED = (torch.Tensor, tuple, list, dict)


def _signature(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape), tree.stride(), tree.is_cuda
    if isinstance(tree, (tuple, list)):
        return tuple(_signature(each) for each in tree)
    if isinstance(tree, dict):
        return tuple((name, _signature(each)) for name, each in tree.items())
    return type(tree), tree


class DeviceMode(TorchDispatchMode):
    """Dispatch mode that queues device operations in the simulator's streams. Host operations run as usual."""

    def __init__(self, sim: Simulator) -> None:
        super().__init__()
        self._sim = sim

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        tensors = find_tensors(args) + find_tensors(named)
        device = named.get("device")
        on_device = any(x.is_cuda for x in tensors) or (device is not None and torch.device(device).type == "cuda")
        name = func.overloadpacket.__name__
        if not on_device:
            return self._on_host(func, name, args, named)
        if _composite(func):
            with self:
                return func.decompose(*args, **named)
        if (
            name in ("copy_", "_to_copy")
            and (result := copy_between(self._sim, name, args, named)) is not NotImplemented
        ):
            return result
        if func.is_view or name in LIKE_VIEWS:
            return self._view(func, name, args, named)
        if name in HOST_INDICES:
            args = self._indices_on_device(args)
        args, named = self._copy_host_scalars(func, name, args, named)
        if _depends_on_values(func) and not (name in HOST_INDICES and not _has_masks(args)):
            return self._run_synchronously(func, name, args, named)
        return self._launch(func, name, args, named)

    def _on_host(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        pinned = named.pop("pin_memory", False)
        out = func(*args, **named)
        if not pinned:
            return out
        return self._sim.new_pinned(out) if name in EMPTY else self._sim.new_pinned(out).copy_(out)

    def _copy_host_scalars(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Copy host scalars when the operation is queued. Raise RuntimeError for other host tensors."""

        def copy_scalar(x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda or name in EMPTY:
                return x
            if x.dim():
                raise RuntimeError(f"{func}: expected all tensors to be on the same device, cuda:0 and cpu are mixed")
            return x.clone()

        if name.startswith("new_"):
            return args, named
        return map_tensors(args, copy_scalar), map_tensors(named, copy_scalar)

    def _indices_on_device(self, args: Any) -> Any:
        def copy_to_device(x: torch.Tensor) -> torch.Tensor:
            return x if x.is_cuda else copy_between(self._sim, "_to_copy", (x,), {"device": args[0].device})

        return (args[0], [None if x is None else copy_to_device(x) for x in args[1]], *args[2:])

    def _view(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        base = args[0]
        if name == "as_strided":
            size, stride = args[1], args[2]
            offset = args[3] if len(args) > 3 else named.get("storage_offset")
            return self._sim.part(base, base.dtype, size, stride, base.storage_offset() if offset is None else offset)
        host = self._sim.host_view(base)
        out = func(host, *args[1:], **named)

        def device_view(x: torch.Tensor) -> torch.Tensor:
            first = base.storage_offset() * base.itemsize + x.storage_offset() * x.itemsize
            return self._sim.part(base, x.dtype, x.shape, x.stride(), first // x.itemsize)

        return map_tensors(out, device_view)

    def _launch(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        sim = self._sim
        written = [args[i] if i < len(args) else named[key] for i, key in _written_arguments(func)]
        outs: Any = written if written else self._outputs(func, args, named)
        if name in EMPTY:
            return outs
        if "device" in named:
            named["device"] = torch.device("cpu")
        call_args, call_named = map_tensors(args, sim.host_view), map_tensors(named, sim.host_view)
        run = STAND_INS.get(func, func)
        device = next(x.device.index for x in find_tensors(outs) if x.is_cuda)
        if written:
            sim.queue_work(name, lambda: run(*call_args, **call_named), device)
            return written[0] if len(func._schema.returns) <= 1 else tuple(written)
        targets = [sim.host_view(x) for x in find_tensors(outs)]

        def work() -> None:
            for target, found in zip(targets, find_tensors(run(*call_args, **call_named)), strict=True):
                target.copy_(found)

        sim.queue_work(name, work, device)
        return outs

    def _outputs(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        key = (func, _signature(args), _signature(named))
        try:
            like = SHAPES.get(key)
        except TypeError:
            key, like = None, None
        if like is None:
            without = named | {"device": torch.device("meta")} if "device" in named else named
            like = STAND_INS.get(func, func)(*map_tensors(args, _as_meta), **map_tensors(without, _as_meta))
            if key is not None:
                SHAPES[key] = like
        device = named.get("device") or next(x.device for x in find_tensors(args) + find_tensors(named) if x.is_cuda)
        return map_tensors(like, lambda x: self._sim.new(x, torch.device(device)))

    def _run_synchronously(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        """Wait for the device and run an operation whose results depend on values in their number or shape."""
        sim = self._sim
        device = next(x.device for x in find_tensors(args) if x.is_cuda)
        sim.host_waits(name, device.index)
        found = func(*map_tensors(args, sim.host_view), **map_tensors(named, sim.host_view))

        def copy_to_device(x: torch.Tensor) -> torch.Tensor:
            out = sim.new(x, device)
            target = sim.host_view(out)
            sim.queue_work(name, lambda: target.copy_(x), device.index)
            return out

        return map_tensors(found, copy_to_device)


def _has_masks(args: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _as_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
