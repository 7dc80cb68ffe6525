"""Every operation of torch that touches the device, on its way to a stream.

What is a view is made at once. Everything else gets its shape from tensors without memory, an output that holds poison,
and a place in the current stream, in which it runs on the host, on tensors over the same memory that keep none of it
alive. Host and device tensors do not mix, but for numbers without axes, which a launch carries.
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
HOST_INDICES = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
"""Operations whose indices may lie on the host: torch brings them over, and waits."""


@cache
def _composite(func: Any) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(func.name(), "CompositeImplicitAutograd"))


@cache
def _asks_values(func: Any) -> bool:
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of the arguments that are written."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, arg.name) for i, arg in arguments if arg.alias_info is not None and arg.alias_info.is_write)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of arguments or results."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, (tuple, list)):
        return [x for each in tree for x in tensors(each)]
    if isinstance(tree, dict):
        return [x for each in tree.values() for x in tensors(each)]
    return []


def replaced(tree: Any, change: Any) -> Any:
    """Arguments with every tensor `change`d."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(replaced(each, change) for each in tree)
    if isinstance(tree, dict):
        return {name: replaced(each, change) for name, each in tree.items()}
    return tree


def _signature(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tuple(tree.shape), tree.stride(), tree.is_cuda
    if isinstance(tree, (tuple, list)):
        return tuple(_signature(each) for each in tree)
    if isinstance(tree, dict):
        return tuple((name, _signature(each)) for name, each in tree.items())
    return type(tree), tree


class DeviceMode(TorchDispatchMode):
    """Sends operations to the simulator's streams; those of the host alone run as ever."""

    def __init__(self, sim: Simulator) -> None:
        super().__init__()
        self._sim = sim
        self._shapes: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        given = tensors(args) + tensors(named)
        device = named.get("device")
        on_device = any(x.is_cuda for x in given) or (device is not None and torch.device(device).type == "cuda")
        name = func.overloadpacket.__name__
        if not on_device:
            return self._on_host(func, name, args, named)
        if _composite(func):
            with self:
                return func.decompose(*args, **named)
        if (
            name in ("copy_", "_to_copy")
            and (copied := copy_between(self._sim, name, args, named)) is not NotImplemented
        ):
            return copied
        if func.is_view or name in LIKE_VIEWS:
            return self._view(func, name, args, named)
        if name in HOST_INDICES:
            args = self._indices_on_device(args)
        args, named = self._numbers_now(func, name, args, named)
        if _asks_values(func) and not (name in HOST_INDICES and not _masks(args)):
            return self._ask(func, name, args, named)
        return self._launch(func, name, args, named)

    def _on_host(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        pinned = named.pop("pin_memory", False)
        out = func(*args, **named)
        if not pinned:
            return out
        return self._sim.new_pinned(out) if name in EMPTY else self._sim.new_pinned(out).copy_(out)

    def _numbers_now(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Numbers of the host as they are at the launch. RuntimeError for other tensors of the host."""

        def now(x: torch.Tensor) -> torch.Tensor:
            if x.is_cuda or name in EMPTY:
                return x
            if x.dim():
                raise RuntimeError(f"{func}: expected all tensors to be on the same device, cuda:0 and cpu are mixed")
            return x.clone()

        if name.startswith("new_"):
            return args, named
        return replaced(args, now), replaced(named, now)

    def _indices_on_device(self, args: Any) -> Any:
        """Indices that lie on the host come over, and the host waits."""

        def brought(x: torch.Tensor) -> torch.Tensor:
            return x if x.is_cuda else copy_between(self._sim, "_to_copy", (x,), {"device": args[0].device})

        return (args[0], [None if x is None else brought(x) for x in args[1]], *args[2:])

    def _view(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        base = args[0]
        if name == "as_strided":
            size, stride = args[1], args[2]
            offset = args[3] if len(args) > 3 else named.get("storage_offset")
            return self._sim.part(base, base.dtype, size, stride, base.storage_offset() if offset is None else offset)
        host = self._sim.seen(base)
        out = func(host, *args[1:], **named)

        def same(x: torch.Tensor) -> torch.Tensor:
            first = base.storage_offset() * base.itemsize + x.storage_offset() * x.itemsize
            return self._sim.part(base, x.dtype, x.shape, x.stride(), first // x.itemsize)

        return replaced(out, same)

    def _launch(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        sim = self._sim
        written = [args[i] if i < len(args) else named[key] for i, key in _written(func)]
        outs: Any = written if written else self._outputs(func, args, named)
        if name in EMPTY:
            return outs
        if "device" in named:
            named["device"] = torch.device("cpu")
        call_args, call_named = replaced(args, sim.seen), replaced(named, sim.seen)
        device = next(x.device.index for x in tensors(outs) if x.is_cuda)
        if written:
            sim.queue_work(name, lambda: func(*call_args, **call_named), device)
            return written[0] if len(func._schema.returns) <= 1 else tuple(written)
        targets = [sim.seen(x) for x in tensors(outs)]

        def work() -> None:
            for target, found in zip(targets, tensors(func(*call_args, **call_named)), strict=True):
                target.copy_(found)

        sim.queue_work(name, work, device)
        return outs

    def _outputs(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Memory for what an operation returns."""
        key = (func, _signature(args), _signature(named))
        try:
            like = self._shapes.get(key)
        except TypeError:
            key, like = None, None
        if like is None:
            without = named | {"device": torch.device("meta")} if "device" in named else named
            like = func(*replaced(args, _without_memory), **replaced(without, _without_memory))
            if key is not None:
                self._shapes[key] = like
        device = named.get("device") or next(x.device for x in tensors(args) + tensors(named) if x.is_cuda)
        return replaced(like, lambda x: self._sim.new(x, torch.device(device)))

    def _ask(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        """The host waits for the stream and runs the operation, whose result depends on values."""
        sim = self._sim
        device = next(x.device for x in tensors(args) if x.is_cuda)
        sim.host_waits(name, device.index)
        found = func(*replaced(args, sim.seen), **replaced(named, sim.seen))

        def there(x: torch.Tensor) -> torch.Tensor:
            out = sim.new(x, device)
            target = sim.seen(out)
            sim.queue_work(name, lambda: target.copy_(x), device.index)
            return out

        return replaced(found, there)


def _masks(args: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
