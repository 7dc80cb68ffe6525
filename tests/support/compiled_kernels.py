"""Compile the Triton kernels without a GPU and report registers, spills, shared memory and load widths.

    python tests/support/compiled_kernels.py [--arch sm_89] [--case "int8 keys"]

The launch functions are called on host tensors with the shapes of a decode step of an 8B Llama (`kernel_cases`). A stub
driver reports a GPU. Instead of running the kernels, it compiles them, specialized on argument values as Triton does.
`cuobjdump`, which comes with Triton, disassembles the result.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from offload_rt.errors import ConfigError
from offload_rt.utils.config_fields import check_choice
from support.kernel_cases import CASES

CAPABILITIES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90": 90, "sm_100": 100, "sm_120": 120}
"""Compute capability by architecture: A100; RTX 30 and 40 series; H100 and H200; B200; RTX 50 series."""

_LOAD = re.compile(r"\b(LDG(?:STS)?\.E[.\w]*)")
_SPILL = re.compile(r"\b((?:LDL|STL)[.\w]*)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_BRANCH = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that `case` launches, compiled for the architecture `arch`.

    Attributes:
        registers: Registers per thread.
        spilled: Spilled bytes per thread.
        spills: Number of spill instructions.
        shared: Bytes of shared memory per program.
        loop: Number of instructions in the longest loop, or 0 if there is no loop.
        warps: Warps per program.
        fused: Number of fused multiply-adds in the PTX code.
        loads: Number of load instructions from global memory, by load width in bytes.
    """

    arch: str
    case: str
    kernel: str
    registers: int
    spilled: int
    spills: int
    shared: int
    instructions: int
    loop: int
    warps: int
    fused: int
    loads: dict[int, int]


@dataclass(frozen=True)
class Launch:
    """A launch of the compiled kernel `binary` with `programs` programs."""

    kernel: str
    binary: Any
    programs: int


class _Driver:
    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """Return the compute capability, because Triton caches kernels by device."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def read_kernels(arch: str, cases: Collection[str] = ()) -> Iterator[CompiledKernel]:
    """Compile the kernels that `cases` launch, or the kernels of all cases if `cases` is empty.

    Raises ConfigError if a case or the architecture is unknown, or if Triton runs in interpreter mode.
    """
    from triton import knobs

    check_choice("architecture", arch, CAPABILITIES)
    for name in cases:
        check_choice("case", name, CASES)
    if knobs.runtime.interpret:
        raise ConfigError("kernels are interpreted in this process, not compiled: unset TRITON_INTERPRET")
    for name, launch in CASES.items():
        if name in cases or not cases:
            with compiling(arch) as found:
                launch()
            unlike = {(each.kernel, each.binary.hash): each.binary for each in found}
            yield from (_read(arch, name, kernel, binary) for (kernel, _), binary in unlike.items())


@contextmanager
def compiling(arch: str) -> Iterator[list[Launch]]:
    """Compile launched kernels instead of running them. Yield a list that collects the launches."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []
    compile_or_run: Callable[..., Any] = JITFunction.run

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if "WIDEN" in named:  # use the native half-precision products, as on a GPU
            named["WIDEN"] = any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in args[:1])
        if "INTERPRETED" in named:
            named["INTERPRETED"] = False
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        found.append(Launch(name, compile_or_run(kernel, *args, grid=grid, warmup=True, **named), math.prod(grid)))

    with ExitStack() as undo:
        undo.callback(driver.set_active, driver._active)
        driver.set_active(_Driver(CAPABILITIES[arch]))
        undo.enter_context(patch.object(JITFunction, "run", compiled))
        yield found


def disassemble(binary: Any) -> str:
    """Return the resource usage and the machine code of a compiled kernel as text."""
    tool = Path(str(files("triton"))) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    return done.stdout


def _read(arch: str, case: str, kernel: str, binary: Any) -> CompiledKernel:
    code = disassemble(binary)
    usage = _USAGE.search(code)
    assert usage is not None, code[:500]
    loads = Counter(_load_bytes(each) for each in _LOAD.findall(code))
    places, loops = instructions_and_loops(code)
    longest = max((sum(start <= at <= stop for at in places) for start, stop in loops), default=0)
    return CompiledKernel(
        arch, case, kernel, int(usage[1]), int(usage[2]), len(_SPILL.findall(code)), binary.metadata.shared,
        len(places), longest, binary.metadata.num_warps, binary.asm["ptx"].count("fma.rn"),
        dict(sorted(loads.items(), reverse=True)),
    )  # fmt: skip


def instructions_and_loops(code: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the addresses of all instructions, and the first and last address of each loop."""
    found = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(code)]
    goals = [(at, _BRANCH.search(rest)) for at, name, rest in found if name.split(".")[0] == "BRA"]
    loops = [(int(goal[1], 16), at) for at, goal in goals if goal is not None and int(goal[1], 16) < at]
    return [at for at, _, _ in found], loops


def _load_bytes(instruction: str) -> int:
    """Return the bytes that a load reads per thread: LDG.E.U8 is 1, LDG.E is 4, LDGSTS.E.BYPASS.128 is 16."""
    parts = instruction.split(".")
    wide = next((int(part) // 8 for part in parts if part in ("64", "128", "256")), 4)
    return {"8": 1, "6": 2}.get(next((part[-1] for part in parts if re.fullmatch("[US](8|16)", part)), ""), wide)


def rows(archs: Collection[str], cases: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return one row per kernel and architecture, with a key `load_N` for each load width of N bytes."""
    found = []
    for kernel in (kernel for arch in archs for kernel in read_kernels(arch, cases)):
        loads = {f"load_{size}": count for size, count in kernel.loads.items()}
        found.append({key: value for key, value in asdict(kernel).items() if key != "loads"} | loads)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile Triton kernels and print the results as JSON.")
    parser.add_argument("--arch", action="append", default=[], help=f"of {', '.join(CAPABILITIES)} (all)")
    parser.add_argument("--case", action="append", default=[], help=f"of {'; '.join(CASES)} (all)")
    asked = parser.parse_args()
    print(json.dumps(rows(asked.arch or CAPABILITIES, asked.case), indent=1))
