"""Test that every Triton kernel can be compiled within the resource limits of GPUs. No GPU is needed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from support import compiled_kernels

SHARED = {
    "sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}  # fmt: skip
"""Shared memory limit per program, in bytes."""

SPILLED = 8
"""Maximum register spill per thread, in bytes. One value is spilled, on one architecture."""

REGISTERS = {
    ("attend, bf16", "triton_resident._attend"): 96,
    ("attend, bf16, groups of 1", "triton_resident._attend"): 80,
    ("attend, fp32, d 256", "triton_resident._attend"): 64,
    ("attend copies, bf16", "triton_resident._attend"): 120,
    ("attend copies, fp32, d 256", "triton_resident._attend"): 64,
    ("int8 keys", "triton_scores._packed"): 80,
    ("int4 keys", "triton_scores._packed"): 80,
    ("partial keys", "triton_scores._partial"): 96,
    ("tail, int4", "triton_low_bit_scores._score"): 112,
    ("tail, int4", "triton_low_bit._attend"): 168,
    ("tail, int2, d 64", "triton_low_bit._attend"): 128,
    ("packed, 4 bits", "triton_packed._linear"): 128,
    ("packed, 4 bits with zeros", "triton_packed._linear"): 128,
    ("packed, 8 bits", "triton_packed._linear"): 96,
}
"""Register limits per thread on every GPU. Programs of `triton_low_bit._attend` have two warps instead of four, so each
thread holds more values."""

AT_RISK = [
    "model",
    "gather, bf16",
    "int8 keys",
    "attend copies, bf16",
    "tail, int4",
    "packed, 4 bits",
]
"""Cases that `make test` compiles. Of similar cases, it is the one that uses the most registers.

`make stress PART=kernels` covers all cases and architectures.
"""

ALL = "OFFLOAD_RT_STRESS" in os.environ
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kernel_results(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """Return the results of `support/compiled_kernels.py`, which runs in a new process.

    A new process is needed because the Triton interpreter cannot be switched off in this one.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if pytestconfig.pluginmanager.hasplugin("cacheprovider"):
        environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))
    arguments = [] if ALL else ["--arch", "sm_89", *(part for case in AT_RISK for part in ("--case", case))]
    process = subprocess.run(
        [sys.executable, "-P", compiled_kernels.__file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280 * (6 if ALL else 1),
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(process.stdout)
    assert {row["case"] for row in results} >= set(AT_RISK)
    return results


def test_every_kernel_fits_shared_memory_and_registers(kernel_results: list[dict[str, Any]]) -> None:
    for row in kernel_results:
        assert row["shared"] <= SHARED[row["arch"]] and row["spilled"] <= SPILLED, row
        assert row["registers"] <= REGISTERS.get((row["case"], row["kernel"]), 255), row
    assert all(row["spills"] == 0 for row in kernel_results if row["arch"] == "sm_89")


def test_limits_name_existing_kernels() -> None:
    for name in {*WIDE, *(kernel for _, kernel in REGISTERS)}:
        module, _, kernel = name.partition(".")
        assert hasattr(importlib.import_module(f"offload_rt.kernels.{module}"), kernel), name


def test_rotations_are_rounded_after_each_product(kernel_results: list[dict[str, Any]]) -> None:
    """Fused multiply-adds round only once, so with Qwen's large keys, the results would differ from transformers."""
    fused = [row["fused"] for row in kernel_results if row["kernel"] == "triton_rotary._rotate"]
    assert fused and not any(fused)


def test_bulk_data_is_read_with_wide_loads(kernel_results: list[dict[str, Any]]) -> None:
    """KV, scoring keys and sortable scores are read in loads of 16 bytes. Only scalars use narrower loads."""
    for row in kernel_results:
        if row["kernel"] in WIDE:
            narrow = row.get("load_1", 0) + row.get("load_2", 0)
            uses_8_bytes = row["case"] == "gather, int4" or row["kernel"] in LOADS_OF_8_BYTES
            assert row.get("load_8" if uses_8_bytes else "load_16", 0) >= 1 and narrow <= WIDE[row["kernel"]], row


WIDE = {
    "triton_gather._gather": 0,
    "triton_gather._gather_tokens": 0,
    "triton_gather._slots": 0,
    "triton_scores._partial": 0,
    "triton_scores._packed": 0,
    "triton_resident._attend": 1,
    "triton_attention._attend": 0,
    "triton_kv_runs._attend": 0,
    "triton_select._histogram": 0,
    "triton_low_bit_scores._score": 1,
    "triton_low_bit._attend": 8,
    "triton_packed._linear": 48,
}
"""Allowed number of loads of one or two bytes in each kernel. They read queries of one head, the steps and validity of
low-bit KV, and the scales and fifth bits of packed weights."""

LOADS_OF_8_BYTES = ("triton_low_bit._attend", "triton_packed._linear")
"""Kernels that use 8-byte loads: low-bit blocks pass through shared memory, and packed weights have the layout of the
inputs. `gather, int4` uses them because its rows are no multiple of 16 bytes."""
