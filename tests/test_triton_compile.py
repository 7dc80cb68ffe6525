"""Every kernel compiles for a GPU: the interpreter takes code that the compiler does not. No device is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 99 * 1024
"""Bytes of shared memory that one program may have on a consumer card (compute capability 8.6 and 8.9)."""


def test_every_kernel_compiles_and_fits_a_consumer_card(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "support" / "triton_compile.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), "89"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [line.split() for line in done.stdout.splitlines()]
    assert len(sizes) == 29 and all(int(size) <= SHARED for _, size in sizes), done.stdout
