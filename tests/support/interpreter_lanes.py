"""Run all programs of a launch at once in Triton's interpreter: arrays get a leading axis for the programs.

Values that depend on the program are `Lanes`. If programs take different branches, they are split into groups, and each
group runs the kernel from the start. Stores before the branch are then repeated with the same values. Atomic operations
run at the end of the kernel, so that they are not repeated, and their results cannot be used.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest


class Diverged(BaseException):
    """Raised if programs take different branches. It is a BaseException because the interpreter wraps every Exception.

    Attributes:
        first: Mask of the programs that take the first branch
    """

    def __init__(self, first: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.first = first


class OneByOne(BaseException):
    """Raised for operations that support only one program at a time."""


class Lanes(np.ndarray):  # type: ignore[type-arg]
    """The values of all P programs, with shape `[P, ...]`. Scalars have the shape `[P, 1]`."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        if method != "__call__":
            raise OneByOne
        return getattr(ufunc, method)(*aligned(*inputs), **named).view(Lanes)

    def __array_function__(self, function: Any, types: Any, args: Any, named: Any) -> Any:
        if function not in FUNCTIONS:
            raise OneByOne
        return FUNCTIONS[function](*args, **named).view(Lanes)

    def reshape(self, *shape: Any, **named: Any) -> Any:
        shape = shape[0] if isinstance(shape[0], (tuple, list)) else shape
        return np.asarray(self).reshape(len(self), *shape).view(Lanes)

    def flatten(self, *order: Any) -> Any:
        return self.reshape(-1)


def shape_of(data: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return data.shape[1:] if isinstance(data, Lanes) else data.shape


def aligned(*arguments: Any) -> list[Any]:
    """Return arrays that numpy can broadcast. All `Lanes` get as many axes as the argument with the most axes."""
    rank = max(len(shape_of(x)) for x in arguments if isinstance(x, np.ndarray))
    return [_with_rank(x, rank) if isinstance(x, Lanes) else x for x in arguments]


def _with_rank(x: Lanes, rank: int) -> np.ndarray[Any, Any]:
    plain = x.view(np.ndarray)
    return plain if x.ndim > rank else plain.reshape(len(x), *(1,) * (rank + 1 - x.ndim), *x.shape[1:])


def broadcast(*arguments: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    if len({(x.shape, type(x)) for x in arguments}) == 1:
        return [np.asarray(x) for x in arguments]
    return list(np.broadcast_arrays(*aligned(*arguments)))


def _reduced(function: Any) -> Any:
    def reduce(x: Lanes, axis: int | None = None, keepdims: bool = False) -> Any:
        plain = np.asarray(x)
        if axis is None:
            plain, axis = plain.reshape(len(x), -1), 0
        return function(plain, axis=axis + 1 if axis >= 0 else axis, keepdims=keepdims)

    return reduce


def _moved(function: Any) -> Any:
    def move(x: Lanes, axis: int) -> Any:
        return function(np.asarray(x), axis=axis + 1 if axis >= 0 else axis)

    return move


def _stack(parts: Any, axis: int) -> Any:
    return np.stack(broadcast(*parts), axis=axis)


def _broadcast_to(x: Lanes, shape: Any) -> Any:
    return np.broadcast_to(_with_rank(x, len(shape)), (len(x), *shape))


def _transpose(x: Lanes, axes: Any = None) -> Any:
    axes = range(x.ndim - 1)[::-1] if axes is None else axes
    return np.transpose(np.asarray(x), (0, *(axis + 1 for axis in axes)))


FUNCTIONS: dict[Any, Any] = {
    np.where: lambda *arguments: np.where(*aligned(*arguments)),
    np.broadcast_to: _broadcast_to,
    np.transpose: _transpose,
    np.stack: _stack,
    np.zeros_like: lambda x, **named: np.zeros_like(np.asarray(x), **named),
    np.ones_like: lambda x, **named: np.ones_like(np.asarray(x), **named),
    **{one: _moved(one) for one in (np.expand_dims, np.cumsum)},
    **{one: _reduced(one) for one in (np.sum, np.max, np.min, np.nanmax, np.nanmin, np.argmax, np.argmin)},
}
"""Replacements for the numpy functions that the interpreter calls."""


def _common_value(values: Lanes) -> Any:
    """Return the value that all programs have in common. Raises Diverged if their values differ."""
    first = values.reshape(-1).view(np.ndarray)[:, 0]
    if not (alike := first == first[0]).all():
        raise Diverged(alike)
    return first[0]


def run_programs(builder: Any, function: Any, arguments: dict[str, Any], program_ids: np.ndarray[Any, Any]) -> None:
    """Run the programs `program_ids`, int32 `[P, 3]`, in groups that take the same branches.

    Raises OneByOne if an operation does not support several programs.
    """
    indices = (column if (column == column[0]).all() else column[:, None].view(Lanes) for column in program_ids.T)
    builder.grid_idx = tuple(x if isinstance(x, Lanes) else int(x[0]) for x in indices)
    builder.atomics = []
    try:
        function(**arguments)
    except Diverged as parted:
        for group in (parted.first, ~parted.first):
            run_programs(builder, function, arguments, program_ids[group])
    else:
        for run in builder.atomics:
            run()


def lane_range(*arguments: Any) -> Iterable[Any]:
    """Replacement for `range` in kernels. The start may differ between programs, but not the number of steps."""
    if not any(hasattr(x, "handle") and isinstance(x.handle.data, Lanes) for x in arguments):
        return builtins.range(*arguments)
    return _lane_range(*(arguments if len(arguments) > 1 else (0, *arguments)))


def _lane_range(start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
    begin, end, by = (x.handle.data if hasattr(x, "handle") else np.array([x]) for x in (start, stop, step))
    for i in builtins.range(int(_common_value((end.astype(np.int64) - begin + by - 1) // by))):
        yield start + step * i


def install(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    builder, handle, tl = interpreter.InterpreterBuilder, interpreter.TensorHandle, interpreter.tl
    load, store, splat = builder.create_masked_load, builder.create_masked_store, builder.create_splat
    atomic, histogram = builder.create_atomic_rmw, builder.create_histogram
    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    interface, to_tensor = interpreter.ReduceScanOpInterface, interpreter.ReduceScanOpInterface.to_tensor

    def lanes_of(*handles: Any) -> bool:
        return any(isinstance(one.data, Lanes) for one in handles if one is not None)

    def broadcast_handles(*handles: Any) -> list[Any]:
        return [handle(x, one.dtype) for x, one in zip(broadcast(*(h.data for h in handles)), handles, strict=True)]

    def create_masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        if not lanes_of(pointers, mask, other):
            return load(self, pointers, mask, other, *rest)
        arguments = broadcast_handles(*(one for one in (pointers, mask, other) if one is not None))
        found = load(self, *arguments, *(() if len(arguments) == 3 else (None,)), *rest)
        return handle(found.data.view(Lanes), found.dtype)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if lanes_of(pointers, value, mask):
            pointers, value, mask = broadcast_handles(pointers, value, mask)
        return store(self, pointers, value, mask, *rest)

    def create_atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if not lanes_of(pointers, value, mask):
            if any(isinstance(at, Lanes) for at in self.grid_idx):  # the same operands in all programs
                raise OneByOne
            return atomic(self, operation, pointers, value, mask, *rest)
        # the interpreter reads them as if they were contiguous
        operands = [handle(np.ascontiguousarray(x.data), x.dtype) for x in broadcast_handles(pointers, value, mask)]
        self.atomics.append(lambda: atomic(self, operation, *operands, *rest))
        return object.__new__(handle)  # without data, so that its use is an error

    def create_histogram(self: Any, values: Any, bins: int, mask: Any) -> Any:
        if mask is None or not lanes_of(values, mask):
            return histogram(self, values, bins, mask)
        data, seen = broadcast(values.data, mask.data)
        counts = [np.bincount(own[mine.astype(bool)], minlength=bins) for own, mine in zip(data, seen, strict=True)]
        return handle(np.stack(counts).astype(np.int32).view(Lanes), tl.int32)

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        if not lanes_of(value):
            return splat(self, kind, value)
        return handle(np.broadcast_to(value.data, [int(size) for size in kind.shape]), value.dtype.scalar)

    def create_get_program_id(self: Any, axis: int) -> Any:
        at = self.grid_idx[axis]
        return handle(at if isinstance(at, Lanes) else np.array([at], dtype=np.int32), tl.int32)

    def one_by_one(original: Any) -> Any:
        def checked(self: Any, *arguments: Any) -> Any:
            if any(isinstance(at, Lanes) for at in interpreter.interpreter_builder.grid_idx):
                raise OneByOne
            return original(self, *arguments)

        return checked

    def reduced_to_tensor(self: Any, found: Any, dtype: Any) -> Any:
        if not isinstance(found, Lanes):
            return to_tensor(self, found, dtype)
        data = found.astype(interpreter._get_np_dtype(dtype))
        if data.ndim == 1:
            return tl.tensor(handle(data.reshape(1), dtype.scalar), dtype)
        return tl.tensor(handle(data, dtype.scalar), tl.block_type(dtype, list(data.shape[1:])))

    def converted(value: Any, *arguments: Any) -> Any:
        found = convert(value, *arguments)
        return found.view(Lanes) if isinstance(value, Lanes) else found

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        plain_bool, plain_index = tensor.__bool__, tensor.__index__

        def choose(self: Any) -> bool:
            data = self.handle.data
            one_each = isinstance(data, Lanes) and shape_of(data) == (1,)
            return bool(_common_value(data.astype(bool))) if one_each else plain_bool(self)

        def index(self: Any) -> int:
            data = self.handle.data
            return int(_common_value(data)) if isinstance(data, Lanes) else plain_index(self)

        scope.set_attr(tensor, "__bool__", choose)
        scope.set_attr(tensor, "__index__", index)

    patch.setattr(builder, "create_masked_load", create_masked_load)
    patch.setattr(builder, "create_masked_store", create_masked_store)
    patch.setattr(builder, "create_splat", create_splat)
    patch.setattr(builder, "create_atomic_rmw", create_atomic_rmw)
    patch.setattr(builder, "create_histogram", create_histogram)
    patch.setattr(builder, "create_get_program_id", create_get_program_id)
    for name in ("create_atomic_cas", "create_unsplat"):
        patch.setattr(builder, name, one_by_one(getattr(builder, name)))
    patch.setattr(interface, "to_tensor", reduced_to_tensor)
    patch.setattr(interpreter.ReduceOps, "generic_reduce", one_by_one(interpreter.ReduceOps.generic_reduce))
    patch.setattr(interpreter.ScanOps, "generic_scan", one_by_one(interpreter.ScanOps.generic_scan))
    patch.setattr(interpreter, "_convert_float", converted)
    patch.setattr(interpreter, "_patch_lang_tensor", patched_tensor)
