"""Make Triton's interpreter four times as fast by caching values that it otherwise recomputes in every operation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import interpreter_lanes
from .interpreter_launch import install_launcher
from .interpreter_operators import install_operators

ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
"""Relative rounding error of softmax weights by dtype. Outputs may differ by this fraction of the largest |v|."""


def is_compiled(device: torch.device) -> bool:
    return device.type == "cuda" and "TRITON_INTERPRET" not in os.environ


@contextmanager
def fast_interpreter() -> Iterator[None]:
    """Speed up interpreted kernels during the block. Has no effect if Triton is not installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch, _patch_language_once(interpreter, patch):
        _cache_types(interpreter, patch)
        _skip_no_ops(patch)
        install_operators(interpreter, patch)
        interpreter_lanes.install(interpreter, patch)
        install_launcher(interpreter, patch)
        yield


@contextmanager
def _patch_language_once(interpreter: Any, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patch a kernel's module only once, instead of at every launch and call."""
    patch_language, done = interpreter._patch_lang, {}

    def patched(function: Any) -> Any:
        if function not in done:
            done[function] = patch_language(function)
        return SimpleNamespace(restore=lambda: None)

    patch.setattr(interpreter, "_patch_lang", patched)
    yield
    for scope in reversed(done.values()):
        scope.restore()


def _cache_types(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Cache block types, shapes, constant tensors and numpy types, which never change."""
    from triton import language as tl
    from triton.language.semantic import TritonSemantic

    make_type, numpy_type, same = tl.block_type.__init__, interpreter._get_np_dtype, tl.dtype.__eq__
    types: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, np.dtype[Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self)
        self.__dict__ = types[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        known = vars(type)
        if "wrapped" not in known:
            sizes = type.shape if type.is_block() else ()
            known["wrapped"] = tl.constexpr(int(np.prod(sizes))), tl.tuple([tl.constexpr(size) for size in sizes])
        self.numel, self.shape = known["wrapped"]

    def get_np_dtype(type: Any) -> np.dtype[Any]:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    make_number = TritonSemantic.scalar_constant
    numbers: dict[Any, Any] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = value, type(value), dtype.name
        if key not in numbers:
            numbers[key] = make_number(self, value, dtype)
        return numbers[key]

    patch.setattr(TritonSemantic, "scalar_constant", scalar_constant)
    patch.setattr(tl.block_type, "__init__", block_type)
    patch.setattr(tl.tensor, "__init__", tensor)
    patch.setattr(interpreter, "_get_np_dtype", get_np_dtype)
    patch.setattr(tl.dtype, "__eq__", lambda self, other: self is other or same(self, other))


def _skip_no_ops(patch: pytest.MonkeyPatch) -> None:
    """Skip casts and broadcasts that have no effect, and check for integer overflow with one numpy operation."""
    from triton import language as tl
    from triton.language.semantic import TritonSemantic

    broadcast, checked = TritonSemantic.broadcast_impl_value, TritonSemantic.binary_op_type_checking_impl

    def cast_unless_equal(
        self: Any,
        lhs: Any,
        rhs: Any,
        pointer: Any = False,
        rhs_pointer: Any = False,
        arithmetic: Any = True,
        division: Any = False,
    ) -> Any:
        if type(lhs) is type(rhs) is tl.tensor and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr() and not division:
            return self.broadcast_impl_value(lhs, rhs)
        return checked(self, lhs, rhs, pointer, rhs_pointer, arithmetic, division)

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def refuse_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        a, b, limits = lhs.handle.data, rhs.handle.data, np.iinfo(lhs.handle.data.dtype)
        if a.dtype.itemsize < 8:
            wide = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__](a, b, dtype=np.int64)
            wide = np.asarray(wide)
            assert limits.min <= wide.min() and wide.max() <= limits.max, f"overflow of {a.dtype} in {operation}"

    patch.setattr(TritonSemantic, "binary_op_type_checking_impl", cast_unless_equal)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unless_equal)
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", refuse_overflow)
