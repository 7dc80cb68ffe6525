"""Launch interpreted Triton kernels without copies and signature checks.

The interpreter copies the storage of every argument, even of CPU tensors, and inspects the kernel's signature. For tiny
tensors, this takes longer than the kernel itself.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from .interpreter_lanes import OneByOne, lane_range, run_programs


class Launcher:
    """Runs interpreted kernels whose arguments are all CPU tensors or numbers. Triton runs all other kernels."""

    def __init__(self, interpreter: Any, patch: pytest.MonkeyPatch) -> None:
        self.interpreter, self.patch, self.original = interpreter, patch, interpreter.InterpretedFunction.run
        self._kernels: dict[Any, tuple[Any, frozenset[str], tuple[str, ...], dict[str, Any]]] = {}
        self._integers: dict[tuple[type, int], Any] = {}
        self._pointers: dict[torch.dtype, Any] = {}
        self._one_by_one: set[Any] = set()

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if warmup:
            return
        known = all(x.is_cpu if isinstance(x, torch.Tensor) else _is_number(x) for x in (*args, *named.values()))
        if not known or kernel.pre_run_hooks:
            self.original(kernel, *args, grid=grid, warmup=warmup, **named)
            return
        function, constants, names, defaults = self._kernel(kernel)
        arguments = {name: x for name, x in named.items() if name in names}
        arguments = defaults | dict(zip(names, args, strict=False)) | arguments
        assert len(arguments) == len(names) >= len(args), f"{kernel.__name__} needs {names}, and got {[*arguments]}"
        arguments = {name: x if name in constants else self._converted(x) for name, x in arguments.items()}
        x, y, z = (*(grid(arguments) if callable(grid) else grid), 1, 1)[:3]
        builder = self.interpreter.interpreter_builder
        assert max(y, z) <= 65_535, "a CUDA grid has at most 65,535 programs on its second and third axis"
        builder.set_grid_dim(x, y, z)
        patched = self.interpreter._patch_lang(function)
        try:
            self._run_all(kernel, function, arguments, (x, y, z))
        except Exception as error:
            raise self.interpreter.InterpreterError(repr(error)) from error
        finally:
            patched.restore()

    def _run_all(self, kernel: Any, function: Any, arguments: dict[str, Any], grid: tuple[int, int, int]) -> None:
        builder, count = self.interpreter.interpreter_builder, grid[0] * grid[1] * grid[2]
        if count > 1 and kernel not in self._one_by_one:
            places = np.stack(np.unravel_index(np.arange(count), grid), 1).astype(np.int32)
            try:
                run_programs(builder, function, arguments, places)
                return
            except OneByOne:
                self._one_by_one.add(kernel)
        for place in np.ndindex(grid):
            builder.set_grid_idx(*place)
            function(**arguments)

    def _kernel(self, kernel: Any) -> tuple[Any, frozenset[str], tuple[str, ...], dict[str, Any]]:
        if kernel not in self._kernels:
            function = kernel.rewrite()
            self.patch.setitem(function.__globals__, "range", lane_range)
            constants = self.interpreter.GridExecutor(function, kernel.arg_names, None).constexprs
            parameters = inspect.signature(function).parameters.values()
            defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
            self._kernels[kernel] = function, frozenset(constants), tuple(kernel.arg_names), defaults
        return self._kernels[kernel]

    def _converted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tl, handle = self.interpreter.tl, self.interpreter.TensorHandle
            if (kind := self._pointers.get(value.dtype)) is None:
                kind = self._pointers[value.dtype] = self.interpreter._implicit_cvt(value).type
            return tl.tensor(handle(np.array([value.data_ptr()], dtype=np.uint64), kind), kind)
        if not isinstance(value, int):
            return value
        key = type(value), value
        if key not in self._integers:
            self._integers[key] = self.interpreter._implicit_cvt(value)
        return self._integers[key]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def install_launcher(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(interpreter, patch)
    patch.setattr(interpreter.InterpretedFunction, "run", lambda *args, **named: launcher.run(*args, **named))
