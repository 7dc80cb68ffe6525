"""Compile each Triton kernel without a GPU and report registers, spills, shared memory and load widths.

    python tests/support/compiled_kernels.py [--arch sm_89] [--case "int8 keys"]

The launch functions are called on host tensors, as in a decode step of an 8B Llama. A stub driver reports a GPU and
compiles kernels instead of running them, with Triton's specialization on argument values. `cuobjdump`, a part of
Triton, disassembles the result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
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

from offload_rt.errors import ConfigError
from offload_rt.kernels.kv_runs import Run
from offload_rt.kernels.low_bit import Layout
from offload_rt.kernels.packed_format import PackedFormat
from offload_rt.kernels.pages import PAGE_BLOCKS, PAGE_TOKENS, Pages, PageTable
from offload_rt.kernels.pointer_table import PointerTable
from offload_rt.policies.infinigen.scoring import row_width
from offload_rt.utils.config_fields import check_choice

CAPABILITIES = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_120": 120}
"""Compute capability by architecture: A100; RTX 40 series; H100 and H200; RTX 50 series."""

KV_HEADS, GROUP, D, COLUMNS, TOKENS, BATCH = 8, 4, 128, 38, 4096, 2
"""Shape of an 8B Llama; `COLUMNS` of the scoring keys correspond to partial_ratio 0.3."""

_LOAD = re.compile(r"\b(LDG(?:STS)?\.E[.\w]*)")
_SPILL = re.compile(r"\b((?:LDL|STL)[.\w]*)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")
_BRANCH = re.compile(r"0x([0-9a-f]+)")


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for the architecture `arch`, as launched in `case`.

    Attributes:
        registers: Registers per thread.
        spilled: Spilled bytes per thread.
        spills: Number of spill instructions.
        shared: Shared memory per program in bytes.
        loop: Number of instructions of the longest loop; 0 if there is no loop.
        warps: Warps per program.
        fused: Number of fused multiply-adds in the PTX code.
        loads: Number of load instructions from global memory by width in bytes.
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
    """Compile the kernels launched by `cases` (empty: all cases).

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
            with _compiling(arch) as found:
                launch()
            unlike = {(kernel, binary.hash): binary for kernel, binary in found}
            yield from (_read(arch, name, kernel, binary) for (kernel, _), binary in unlike.items())


@contextmanager
def _compiling(arch: str) -> Iterator[list[tuple[str, Any]]]:
    """Compile kernels launched in this context without running them. Yields a list of (name, binary)."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any]] = []
    compile_or_run: Callable[..., Any] = JITFunction.run

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if "WIDEN" in named:  # half precision products are only native on a device
            named["WIDEN"] = any(isinstance(x, torch.Tensor) and x.dtype == torch.float32 for x in args[:1])
        if "INTERPRETED" in named:
            named["INTERPRETED"] = False
        name = f"{kernel.__module__.rpartition('.')[2]}.{kernel.__name__}"
        found.append((name, compile_or_run(kernel, *args, grid=grid, warmup=True, **named)))

    with ExitStack() as undo:
        undo.callback(driver.set_active, driver._active)
        driver.set_active(_Driver(CAPABILITIES[arch]))
        undo.enter_context(patch.object(JITFunction, "run", compiled))
        yield found


def _read(arch: str, case: str, kernel: str, binary: Any) -> CompiledKernel:
    tool = Path(str(files("triton"))) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", "-sass", file.name], capture_output=True, text=True, check=True, timeout=60
        )
    usage = _USAGE.search(done.stdout)
    assert usage is not None, done.stdout[:500]
    loads = Counter(_load_bytes(each) for each in _LOAD.findall(done.stdout))
    return CompiledKernel(
        arch, case, kernel, int(usage[1]), int(usage[2]), len(_SPILL.findall(done.stdout)), binary.metadata.shared,
        *_lengths(done.stdout), binary.metadata.num_warps, binary.asm["ptx"].count("fma.rn"),
        dict(sorted(loads.items(), reverse=True)),
    )  # fmt: skip


def _lengths(code: str) -> tuple[int, int]:
    """Count the instructions of a program and of its longest loop (between a backward branch and its target)."""
    found = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(code)]
    places = [at for at, _, _ in found]
    goals = [(at, _BRANCH.search(rest)) for at, name, rest in found if name.split(".")[0] == "BRA"]
    back = [(int(goal[1], 16), at) for at, goal in goals if goal is not None and int(goal[1], 16) < at]
    return len(found), max((sum(start <= at <= stop for at in places) for start, stop in back), default=0)


def _load_bytes(instruction: str) -> int:
    """Return the bytes per thread of a load: LDG.E.U8 is 1, LDG.E is 4, LDGSTS.E.BYPASS.128 is 16."""
    parts = instruction.split(".")
    wide = next((int(part) // 8 for part in parts if part in ("64", "128", "256")), 4)
    return {"8": 1, "6": 2}.get(next((part[-1] for part in parts if re.fullmatch("[US](8|16)", part)), ""), wide)


def rows(archs: Collection[str], cases: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the kernels of `cases` compiled for `archs`, with a key `load_N` for each load width in bytes."""
    found = []
    for kernel in (kernel for arch in archs for kernel in read_kernels(arch, cases)):
        loads = {f"load_{size}": count for size, count in kernel.loads.items()}
        found.append({key: value for key, value in asdict(kernel).items() if key != "loads"} | loads)
    return found


# ------------------------------------------------------------------------------------------------------------ cases


def _lists(heads: int = KV_HEADS) -> torch.Tensor:
    """Return an int32 tensor with one element per list, for bounds or counts."""
    return torch.zeros(BATCH * heads, dtype=torch.int32)


def _gather(width: int, dtype: torch.dtype) -> None:
    from offload_rt.kernels import triton_gather

    rows, ids = torch.empty(TOKENS, width, dtype=dtype), torch.empty(BATCH * KV_HEADS, 512, dtype=torch.int64)
    out = rows.new_empty(2, *ids.shape, width)
    triton_gather.gather_rows(rows, ids, _lists(), out[0])
    bases, planes = ids.new_empty(BATCH, TOKENS // 64), ids.new_empty(2, KV_HEADS)
    triton_gather.gather_tokens(rows, ids, _lists(), bases, planes, out)
    table = PointerTable.of([torch.empty(2 * KV_HEADS, 65, width, dtype=dtype) for _ in range(BATCH)])
    triton_gather.gather_slots(table, ids, out)
    triton_gather.scatter_slots(table, ids, out)
    triton_gather.gather_tokens(rows, ids, _lists(), bases, planes[:1], out[:1])


def _gather_copies(width: int, dtype: torch.dtype) -> None:
    from offload_rt.kernels import triton_gather
    from offload_rt.kernels.pool_rows import DeviceRows

    rows, ids = torch.empty(TOKENS, width, dtype=dtype), torch.empty(BATCH * KV_HEADS, 512, dtype=torch.int64)
    out, bases = rows.new_empty(2, *ids.shape, width), ids.new_empty(BATCH, TOKENS // 64)
    planes, tally = ids.new_empty(2, KV_HEADS), ids.new_empty(BATCH, 2)
    device = DeviceRows(torch.empty_like(rows), TOKENS, planes)
    triton_gather.gather_rows(rows, ids, _lists(), out[0], device)
    triton_gather.gather_tokens(rows, ids, _lists(), bases, planes, out, device, tally)
    k = rows[: BATCH * KV_HEADS]
    triton_gather.write_rows(rows, k, k, ids.flatten()[: 2 * BATCH], planes, device)


def _append() -> None:
    from offload_rt.kernels import triton_append, triton_entries, triton_gather

    lists = BATCH * KV_HEADS
    k, slots = torch.empty(lists, D, dtype=torch.bfloat16), torch.empty(lists, dtype=torch.int64)
    kept = PointerTable.of([torch.empty(2 * KV_HEADS, 68, D, dtype=torch.bfloat16) for _ in range(BATCH)])
    triton_append.store_resident(k, k, kept, slots[:BATCH])
    planes = slots.new_empty(2, KV_HEADS)
    triton_gather.write_rows(torch.empty(TOKENS, D, dtype=torch.bfloat16), k, k, slots[:BATCH], planes)
    keys = PointerTable.of([torch.empty(KV_HEADS, COLUMNS, TOKENS, dtype=torch.bfloat16) for _ in range(BATCH)])
    triton_append.append_partial(k, torch.empty(KV_HEADS, D, COLUMNS), keys, slots)
    packed = PointerTable.of([torch.empty(KV_HEADS, TOKENS // 2, D, dtype=torch.int8) for _ in range(BATCH)])
    scale = torch.empty(KV_HEADS, D)
    triton_append.append_quantised(k, torch.empty(KV_HEADS, D, D), scale, scale, 4, packed, slots)
    entries = PointerTable.of([torch.empty(KV_HEADS, TOKENS, D, dtype=torch.bfloat16) for _ in range(BATCH)])
    triton_entries.append_entries(k, entries, slots, 16)
    triton_entries.write_lists(triton_entries.read_lists(entries, 64, slots[:BATCH]), entries, slots[:BATCH])
    triton_entries.mask_scores(torch.empty(lists, GROUP, 64), _lists(), _lists(), 16)
    slot_tables = PointerTable.of([torch.empty(KV_HEADS, 65, 2, dtype=torch.int32) for _ in range(BATCH)])
    triton_entries.write_lists(triton_entries.read_lists(slot_tables, 65, slots[:BATCH]), slot_tables, slots[:BATCH])


def _partial(group: int) -> None:
    from offload_rt.kernels import triton_scores

    keys = PointerTable.of([torch.empty(KV_HEADS, COLUMNS, TOKENS, dtype=torch.bfloat16) for _ in range(BATCH)])
    q = torch.empty(BATCH * KV_HEADS, group, COLUMNS)
    triton_scores.partial_scores(q, keys, _lists(), _lists(), TOKENS)


def _quantised(bits: int, d: int, group: int = GROUP) -> None:
    from offload_rt.kernels import triton_scores

    rows = [torch.empty(KV_HEADS, TOKENS * bits // 8, row_width(d), dtype=torch.int8) for _ in range(BATCH)]
    q, scale = torch.empty(BATCH * KV_HEADS, group, d), torch.empty(KV_HEADS, d)
    triton_scores.quantised_scores(q, PointerTable.of(rows), scale, scale, bits, _lists(), _lists(), TOKENS)


def _select(group: int) -> None:
    from offload_rt.kernels import triton_select
    from offload_rt.kernels.lists import Scores

    blocks = torch.empty(BATCH * KV_HEADS, group, TOKENS // 256)
    found = Scores(torch.empty(BATCH * KV_HEADS, group, TOKENS), blocks, blocks)
    limits = torch.empty(BATCH, dtype=torch.int32)
    triton_select.select_tokens(found, _lists(), _lists(), KV_HEADS, 5.0, limits, 200)


def _attend(dtype: torch.dtype, d: int, group: int = GROUP) -> None:
    from offload_rt.kernels import triton_resident

    lists = BATCH * KV_HEADS
    kept = PointerTable.of([torch.empty(2 * KV_HEADS, 68, d, dtype=dtype) for _ in range(BATCH)])
    q, rows = torch.empty(lists, group, d, dtype=dtype), torch.empty(lists, 512, d, dtype=dtype)
    triton_resident.attend_resident(q, kept, _lists(), _lists(), rows, rows, _lists(), 0.1)


def _runs(dtype: torch.dtype, d: int, sequences: int) -> None:
    from offload_rt.kernels import triton_kv_runs

    own = torch.empty(KV_HEADS, 64, d, dtype=dtype)
    shared = torch.empty(KV_HEADS, TOKENS, d, dtype=dtype)
    runs = [Run(0, sequences, shared, shared), *(Run(b, b + 1, own, own) for b in range(sequences))]
    triton_kv_runs.attend_runs(torch.empty(KV_HEADS * GROUP, sequences, d, dtype=dtype), runs, 0.1)


def _model() -> None:
    from offload_rt.kernels import triton_norm, triton_rotary

    for tokens in (BATCH, 100):
        hidden, turns = torch.empty(tokens, KV_HEADS * GROUP * D, dtype=torch.bfloat16), torch.empty(1, tokens, D)
        triton_norm.rms_norm(hidden, hidden[0], 1e-5)
        triton_rotary.rotate_halves(hidden.view(tokens, -1, D).transpose(0, 1), turns, turns)


def _skew() -> None:
    from offload_rt.kernels import triton_skew

    q = torch.empty(KV_HEADS * GROUP, BATCH, D, dtype=torch.bfloat16)
    triton_skew.skew_queries(q, torch.empty(KV_HEADS, D, D), KV_HEADS, 0.1)


def _tail(bits: int, d: int) -> None:
    from offload_rt.kernels import triton_low_bit, triton_low_bit_rows, triton_low_bit_scores

    layout, lists = Layout(d, bits), BATCH * KV_HEADS
    page, count = torch.zeros(2, KV_HEADS, PAGE_BLOCKS, layout.block_bytes, dtype=torch.uint8), TOKENS // PAGE_TOKENS
    table = PageTable.of([Pages.of([page] * count, 1) for _ in range(BATCH)])
    q, mean, mixing = torch.ones(lists, GROUP, d), torch.zeros(KV_HEADS, d), torch.eye(d)
    k, basis = torch.empty(lists, d, dtype=torch.bfloat16), torch.empty(KV_HEADS, d, d)
    slots = torch.zeros(lists, dtype=torch.int64)
    triton_low_bit_rows.append_rows(k, k, basis, mean, mixing, layout, table, slots)
    for values in (False, True):
        triton_low_bit_rows.store_rows(table.pages[0], layout, torch.empty(KV_HEADS, 200, d), 70, values=values)
    triton_low_bit_scores.scores(q, mean, layout, table, _lists(), _lists(), TOKENS)
    chosen, exact = torch.zeros(lists, 80, dtype=torch.int64), (torch.empty(lists, GROUP, d), torch.empty(lists, GROUP))
    triton_low_bit.merge_approximate(
        q, mean, mixing, layout, table, _lists(), _lists(), chosen, _lists(), TOKENS, *exact
    )


def _packed(form: PackedFormat) -> None:
    from offload_rt.kernels import triton_packed

    rows = torch.empty(4096, form.row_bytes, dtype=torch.uint8)
    triton_packed.linear(torch.empty(1, form.ins, dtype=torch.bfloat16), rows, form, None)
    triton_packed.unpack(rows, form, torch.bfloat16)


CASES: dict[str, Callable[[], None]] = {
    "model": _model,
    "packed, 4 bits": lambda: _packed(PackedFormat(4096, 4, 32, True, has_factors=True)),
    "packed, 4 bits with zeros": lambda: _packed(PackedFormat(4096, 4, 128, has_zeros=True)),
    "packed, 5 bits": lambda: _packed(PackedFormat(4096, 5, 32, True, has_factors=True)),
    "packed, 6 bits": lambda: _packed(PackedFormat(4096, 6, 16, offset=32, has_factors=True)),
    "packed, 8 bits": lambda: _packed(PackedFormat(4096, 8, 32, offset=128)),
    "gather, bf16": lambda: _gather(D, torch.bfloat16),
    "gather, copies": lambda: _gather_copies(D, torch.bfloat16),
    "gather, int4": lambda: _gather(D // 2 + 12, torch.uint8),
    "append": _append,
    "skew": _skew,
    "partial keys": lambda: _partial(GROUP),
    "partial keys, groups of 1": lambda: _partial(1),
    "int8 keys": lambda: _quantised(8, COLUMNS),
    "int8 keys, groups of 1": lambda: _quantised(8, COLUMNS, 1),
    "int4 keys": lambda: _quantised(4, D),
    "int2 keys, d 256": lambda: _quantised(2, 256),
    "select": lambda: _select(GROUP),
    "select, groups of 1": lambda: _select(1),
    "attend, bf16": lambda: _attend(torch.bfloat16, D),
    "attend, bf16, groups of 1": lambda: _attend(torch.bfloat16, D, 1),
    "attend, bf16, d 256": lambda: _attend(torch.bfloat16, 256),
    "attend, fp32, d 256": lambda: _attend(torch.float32, 256),
    "attend, fp32, d 512": lambda: _attend(torch.float32, 512),
    "runs, bf16": lambda: _runs(torch.bfloat16, D, 32),
    "runs, fp32, d 256": lambda: _runs(torch.float32, 256, 4),
    "tail, int4": lambda: _tail(4, D),
    "tail, int2, d 64": lambda: _tail(2, 64),
    "tail, int2": lambda: _tail(2, D),
}
"""Launch functions by case name."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile Triton kernels and print the results as JSON.")
    parser.add_argument("--arch", action="append", default=[], help=f"of {', '.join(CAPABILITIES)} (all)")
    parser.add_argument("--case", action="append", default=[], help=f"of {'; '.join(CASES)} (all)")
    asked = parser.parse_args()
    print(json.dumps(rows(asked.arch or CAPABILITIES, asked.case), indent=1))
