"""Compare C kernels with plain C loops (`tests/native`), with NEON in an emulator and at this processor's levels.

`make stress PART=neon` runs this test. It needs gcc-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from offload_rt.utils.native_code import LEVEL_FLAGS, available_levels
from offload_rt.utils.native_libraries import KERNEL_FLAGS

if not os.environ.get("OFFLOAD_RT_STRESS"):
    pytest.skip("runs in make stress", allow_module_level=True)

CHECKS = Path(__file__).parents[2] / "native"
EMULATED = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


@pytest.mark.parametrize("level", sorted({*available_levels(), "neon"}))
@pytest.mark.parametrize(("head_dim", "value_bits"), [(32, 2), (64, 4), (96, 2), (128, 4)])
def test_c_kernels_equal_plain_loops(level: str, head_dim: int, value_bits: int, tmp_path: Path) -> None:
    native = level in available_levels()
    compiler, *emulator = ("cc",) if native else EMULATED
    for tool in (compiler, *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    program = tmp_path / "checks"
    constants = (f"-DHEAD_DIM={head_dim}", f"-DVALUE_BITS={value_bits}", "-DPAGE_BLOCKS=8")
    flags = (*LEVEL_FLAGS[level], *KERNEL_FLAGS, *constants, "-Wall", "-Wextra", "-Werror", "-static")
    sources = sorted(map(str, CHECKS.glob("*.c")))
    subprocess.run([compiler, *flags, *sources, "-o", str(program), "-lm"], check=True, timeout=300)
    ran = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
