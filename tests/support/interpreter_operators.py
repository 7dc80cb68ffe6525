"""Run each operator, load and store of Triton's interpreter as a single numpy operation.

The interpreter makes about thirty calls per operator to determine types and shapes. If the operands have the same type
or are signed integers, numpy gives the same result directly. The interpreter handles all other cases, including errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .interpreter_lanes import Lanes, shape_of

SIGNED = {"int8": 1, "int16": 2, "int32": 4, "int64": 8}
"""Sizes of the signed integer types in bytes. The result of an operation has the wider type."""

FLOATS = ("fp16", "fp32", "fp64")
"""Types that numpy supports. It has no bfloat16."""


class Operators:
    def __init__(self, interpreter: Any) -> None:
        from triton import language as tl

        self.tl, self.interpreter, self.tensor = tl, interpreter, tl.tensor
        self.builder, self.semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
        self.types: dict[tuple[str, tuple[int, ...]], Any] = {}
        self.filled: dict[tuple[float, str, tuple[int, ...]], Any] = {}
        self.constants: dict[tuple[Any, str], np.ndarray[Any, Any]] = {}
        self.numpy_types = {
            one.name: interpreter._get_np_dtype(one)
            for one in (tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.float16, tl.float32, tl.float64)
        }
        self.limits = {name: (np.iinfo(name).min, np.iinfo(name).max) for name in SIGNED}

    def result(self, data: np.ndarray[Any, Any], dtype: Any, block: bool) -> Any:
        """Return `data` as a block if `block` is true, and as a scalar otherwise."""
        kind = dtype
        if block:
            shape = shape_of(data)
            kind = self.types.get((dtype.name, shape))
            if kind is None:
                kind = self.types[dtype.name, shape] = self.tl.block_type(dtype, list(shape))
        return self.tensor(self.handle(data, dtype), kind)

    def handle(self, data: np.ndarray[Any, Any], dtype: Any) -> Any:
        """Create a handle without its constructor, which would check the value range."""
        made = object.__new__(self.interpreter.TensorHandle)
        made.data, made.dtype, made.attr = data, dtype, {}
        return made

    def operands(self, lhs: Any, rhs: Any) -> tuple[Any, Any, Any, bool] | None:
        """Return both arrays cast to the result's type, this type, and whether the result is a block.

        Return None if Triton must determine the type.
        """
        name = lhs.dtype.name
        if type(rhs) is self.tensor:
            block, other = lhs.type.is_block() or rhs.type.is_block(), rhs.dtype.name
            if name == other and (name in SIGNED or name in FLOATS):
                return lhs.handle.data, rhs.handle.data, lhs.dtype, block
            if name in SIGNED and other in SIGNED:
                dtype = lhs.dtype if SIGNED[name] > SIGNED[other] else rhs.dtype
                to = self.numpy_types[dtype.name]
                return lhs.handle.data.astype(to), rhs.handle.data.astype(to), dtype, block
            return None
        whole = type(rhs) is int and name in SIGNED and self.limits[name][0] <= rhs <= self.limits[name][1]
        if whole or (type(rhs) is float and name == "fp32"):
            return lhs.handle.data, self.constant(rhs, name), lhs.dtype, lhs.type.is_block()
        return None

    def constant(self, value: float, name: str) -> np.ndarray[Any, Any]:
        if (value, name) not in self.constants:
            self.constants[value, name] = np.array([value], dtype=self.numpy_types[name])
        return self.constants[value, name]

    def arithmetic(self, name: str, original: Callable[..., Any], compute: np.ufunc) -> Callable[..., Any]:
        """Return an operator that raises an error if an integer overflows."""

        def operator(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
            found = self.operands(lhs, rhs)
            if found is None:
                return original(lhs, rhs, _semantic=self.semantic)
            a, b, dtype, block = found
            try:
                if dtype.name not in SIGNED or dtype.name == "int64":
                    return self.result(compute(a, b), dtype, block)
                wide = compute(a, b, dtype=np.int64)
            except ValueError:  # the shapes do not match: let Triton report the error
                return original(lhs, rhs, _semantic=self.semantic)
            least, most = self.limits[dtype.name]
            values = np.asarray(wide)
            assert least <= values.min() and values.max() <= most, f"overflow of {dtype.name} in {name}"
            return self.result(wide.astype(self.numpy_types[dtype.name]), dtype, block)

        return operator

    def sum(self, original: Callable[..., Any]) -> Callable[..., Any]:
        of_numbers = self.arithmetic("__add__", original, np.add)

        def operator(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
            pointer = lhs.dtype
            if not pointer.is_ptr():
                return of_numbers(lhs, rhs)
            if type(rhs) is int:
                offset, block = np.array([rhs], dtype=np.int64), lhs.type.is_block()
            elif type(rhs) is self.tensor and rhs.dtype.name in SIGNED:
                offset, block = rhs.handle.data, lhs.type.is_block() or rhs.type.is_block()
            else:
                return original(lhs, rhs, _semantic=self.semantic)
            size = max(1, lhs.handle.get_element_ty().primitive_bitwidth // 8)
            try:
                return self.result(lhs.handle.data + size * offset.astype(np.uint64), pointer, block)
            except ValueError:
                return original(lhs, rhs, _semantic=self.semantic)

        return operator

    def comparison(self, original: Callable[..., Any], compute: np.ufunc) -> Callable[..., Any]:

        def operator(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
            found = self.operands(lhs, rhs)
            try:
                if found is not None:
                    return self.result(compute(found[0], found[1]), self.tl.int1, found[3])
            except ValueError:
                pass
            return original(lhs, rhs, _semantic=self.semantic)

        return operator

    def logic(self, original: Callable[..., Any], compute: np.ufunc) -> Callable[..., Any]:
        def operator(lhs: Any, rhs: Any, _semantic: Any = None) -> Any:
            if type(rhs) is self.tensor and lhs.dtype.name == rhs.dtype.name == "int1":
                try:
                    data = compute(lhs.handle.data, rhs.handle.data)
                    return self.result(data, lhs.dtype, lhs.type.is_block() or rhs.type.is_block())
                except ValueError:
                    pass
            return original(lhs, rhs, _semantic=self.semantic)

        return operator

    def index(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def operator(block: Any, at: Any, _semantic: Any = None) -> Any:
            plain = type(at) is tuple and all(one is None or one == slice(None) for one in at)
            if plain and block.type.is_block():
                data = block.handle.data
                return self.result(data[(slice(None), *at) if isinstance(data, Lanes) else at], block.dtype, True)
            return original(block, at, _semantic=self.semantic)

        return operator

    def cast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def operator(value: Any, dtype: Any, *rest: Any, **named: Any) -> Any:
            name, to = value.dtype.name, getattr(dtype, "name", None)
            known = (name in SIGNED and (to in SIGNED or to in FLOATS)) or (name in FLOATS and to in FLOATS)
            if known and not rest and not named:
                data = value.handle.data
                data = data if name == to else data.astype(self.numpy_types[to])
                return self.result(data, dtype, value.type.is_block())
            return original(value, dtype, *rest, **named | {"_semantic": self.semantic})

        return operator

    def load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def operator(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            element = getattr(pointer.dtype, "element_ty", None)
            block = pointer.type.is_block()
            known = element is not None and (element.name in SIGNED or element.name in FLOATS)
            if not known or named or not self._masks(mask, block) or (mask is None and other is not None):
                return original(pointer, mask, other, **named, _semantic=self.semantic)
            shape = shape_of(pointer.handle.data)
            instead = self._masked_values(other, element, shape)
            try:
                seen = self._fitted_mask(mask, shape)
            except ValueError:
                seen = None
            if seen is None or instead is None:
                return original(pointer, mask, other, _semantic=self.semantic)
            found = self.builder.create_masked_load(pointer.handle, seen, instead, None, None, False)
            return self.result(found.data, element, block)

        return operator

    def store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def operator(pointer: Any, value: Any, mask: Any = None, **named: Any) -> Any:
            element, block = getattr(pointer.dtype, "element_ty", None), pointer.type.is_block()
            known = type(value) is self.tensor and element is not None and element.name == value.dtype.name
            if not known or named or element.name not in self.numpy_types or element.name == "int1" or not block:
                return original(pointer, value, mask, **named, _semantic=self.semantic)
            shape = shape_of(pointer.handle.data)
            try:
                seen = self._fitted_mask(mask, shape) if self._masks(mask, block) else None
                data = np.broadcast_to(value.handle.data, shape)
            except ValueError:
                seen = None
            if seen is None or pointer.dtype.is_const():
                return original(pointer, value, mask, _semantic=self.semantic)
            self.builder.create_masked_store(pointer.handle, self.handle(data, element), seen, None, None)
            return None

        return operator

    def _masks(self, mask: Any, block: bool) -> bool:
        """Return whether `mask` is None or fits the pointers."""
        return mask is None or (
            type(mask) is self.tensor and mask.dtype.name == "int1" and (block or not mask.type.is_block())
        )

    def _fitted_mask(self, mask: Any, shape: tuple[int, ...]) -> Any:
        if mask is None:
            return self._filled(True, self.tl.int1, shape)
        data = mask.handle.data
        return mask.handle if shape_of(data) == shape else self.handle(np.broadcast_to(data, shape), self.tl.int1)

    def _masked_values(self, other: Any, element: Any, shape: tuple[int, ...]) -> Any:
        """Return the values for masked elements, or None if Triton must convert them."""
        if other is None or (type(other) is int and other == 0) or (type(other) is float and element.name in FLOATS):
            return self._filled(other or 0, element, shape)
        return None

    def _filled(self, value: float, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return a cached array filled with `value`. Callers must not write to it."""
        key = value, dtype.name, shape
        if key not in self.filled:
            self.filled[key] = self.handle(np.full(shape, value, dtype=self.numpy_types[dtype.name]), dtype)
        return self.filled[key]


def install_operators(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Replace the operators of `tl.tensor`. Call this before the interpreter wraps them."""
    operators = Operators(interpreter)
    tensor, tl = operators.tensor, operators.tl
    patch.setattr(tensor, "__add__", operators.sum(tensor.__add__))
    for name, compute in {
        "__radd__": np.add,
        "__sub__": np.subtract,
        "__mul__": np.multiply,
        "__rmul__": np.multiply,
    }.items():
        patch.setattr(tensor, name, operators.arithmetic(name, getattr(tensor, name), compute))
    for name, compare in {
        "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
        "__eq__": np.equal, "__ne__": np.not_equal,
    }.items():  # fmt: skip
        patch.setattr(tensor, name, operators.comparison(getattr(tensor, name), compare))
    for name, join in {"__and__": np.bitwise_and, "__or__": np.bitwise_or}.items():
        patch.setattr(tensor, name, operators.logic(getattr(tensor, name), join))
    patch.setattr(tensor, "__getitem__", operators.index(tensor.__getitem__))
    patch.setattr(tensor, "to", operators.cast(tensor.to))
    patch.setattr(tl, "load", operators.load(tl.load))
    patch.setattr(tl, "store", operators.store(tl.store))
