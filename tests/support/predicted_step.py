"""Predict the time of a decode step on a GPU from the bytes and the instructions of its kernels. No GPU is needed.

    python tests/support/predicted_step.py [--print]

The steps are those of an 8B Llama with a context of 131,072 tokens: with the default policy, and with policy `full` and
all KV on the device. Their Triton kernels are compiled for sm_90, and the counts are written to
`eval/results/gpu/predicted.json` (or printed). `docs/gpu_tables.py` computes times from them. Kernels of other
libraries are counted by their bytes only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from offload_rt.core import BLOCK_SIZE
from offload_rt.eval.core.report import environment, write_text
from offload_rt.kernels import (
    triton_append,
    triton_gather,
    triton_low_bit,
    triton_low_bit_rows,
    triton_low_bit_scores,
    triton_norm,
    triton_resident,
    triton_rotary,
    triton_select,
    triton_skew,
)
from offload_rt.kernels.low_bit import Layout
from offload_rt.kernels.pages import PAGE_BLOCKS, PAGE_TOKENS, Pages
from offload_rt.kernels.pointer_table import PointerTable
from offload_rt.kernels.pool_rows import DeviceRows
from support.compiled_kernels import compiling, disassemble, instructions_and_loops
from support.low_bit import table_of
from support.step_counts import documented_counts

FILE = Path(__file__).parents[2] / "eval" / "results" / "gpu" / "predicted.json"
LAYERS, HIDDEN, MLP, VOCAB, HEADS, GROUP, D = 32, 4096, 14336, 128256, 8, 4, 128
TOKENS, SELECTED, RESIDENT = 131_072, 2_621, 68
BF16, FLOAT = torch.bfloat16.itemsize, torch.float32.itemsize

Trips = Mapping[str, tuple[int, ...]]

TRIPS: Trips = {
    "triton_skew._skew": (GROUP,),
    "triton_select._peaks_and_logs": (4, 4),
    "triton_select._mark": (2, 0, 2, 0),  # two loops over heads, each with a part for the heads left by unrolling
    "triton_gather._gather_tokens": (41,),
    "triton_resident._attend": (4,),
    "triton_low_bit._attend": (PAGE_BLOCKS,),
    "triton_low_bit._merge": (1, 1, 4),
}
"""Trips of each loop of a kernel, in order. All other loops run once."""

FULL_TRIPS: Trips = {
    "triton_resident._attend": (16,),  # pieces of 1,024 tokens, tiles of 64
    "triton_attention._merge": (1, 1, 9),  # 129 parts, 16 at a time
}


@dataclass(frozen=True)
class Part:
    """Kernels of a decode step.

    Attributes:
        kernels: Triton kernels, or modules of which all kernels belong to this part.
        traced: Parts of the names of these kernels in `eval/results/gpu_h200/trace.json`. `_join` and `_whole` have
            other names now.
        device_bytes: Bytes of device memory that a step reads and writes. Data that stay in the L2 cache do not count.
        host_bytes: Bytes of host memory that a step reads.
    """

    name: str
    kernels: tuple[str, ...] = ()
    traced: tuple[str, ...] = ()
    device_bytes: int = 0
    host_bytes: int = 0
    instructions: int = 0


def predict_parts() -> list[Part]:
    linear = HIDDEN * D * HEADS * (2 * GROUP + 2) + 3 * HIDDEN * MLP
    predicted = (LAYERS - 1) * HIDDEN * HEADS * GROUP * D
    keys = TOKENS * HEADS * (D // 2 + 1) * LAYERS
    fetched = SELECTED * HEADS * 2 * D * BF16 * LAYERS
    bases = HEADS * D * D * FLOAT * LAYERS
    return [
        Part("weights", (), ("nvjet", "cublasLt", "cutlass"),
             (LAYERS * linear + VOCAB * HIDDEN + predicted) * BF16),
        Part("scores", ("triton_low_bit_scores",), ("_score",), keys),
        Part("selection, new KV", ("triton_select", "triton_low_bit_rows", "triton_append", "triton_gather._write"),
             ("_mark", "_histogram", "_tally", "_write", "_whole", "_append", "_keep"), bases),
        Part("attention to exact and approximate KV", ("triton_resident", "triton_attention", "triton_low_bit"),
             ("_attend", "_merge", "_exclude", "_join", "Fill"), 2 * keys + fetched),
        Part("norms, rotary embeddings, query bases", ("triton_norm", "triton_rotary", "triton_skew"),
             ("_rms_norm", "_rotate", "_skew"), 2 * bases),
        Part("copy of selected KV", ("triton_gather._gather_tokens",), ("_gather_tokens",), fetched, fetched),
    ]  # fmt: skip


def predict_full_parts() -> list[Part]:
    weights, *_ = predict_parts()
    kv = TOKENS * HEADS * 2 * D * BF16 * LAYERS
    own = weights.device_bytes - (LAYERS - 1) * HIDDEN * HEADS * GROUP * D * BF16  # without predicted queries
    return [
        Part("weights", device_bytes=own),
        Part("new KV", ("triton_append", "triton_gather._write")),
        Part("attention", ("triton_resident", "triton_attention"), device_bytes=kv),
        Part("norms, rotary embeddings", ("triton_norm", "triton_rotary")),
    ]


def _launch_full_layer() -> None:
    """Launch the Triton kernels of one layer with all KV on the device."""
    hidden, turns = torch.empty(1, HIDDEN, dtype=torch.bfloat16), torch.empty(1, 1, D)
    q, k = hidden.new_empty(HEADS, GROUP, D), hidden.new_empty(HEADS, D)
    slots, bounds = torch.zeros(2, dtype=torch.int64), torch.zeros(HEADS, dtype=torch.int32)
    rows, planes = hidden.new_empty(TOKENS, D), slots.new_empty(2, HEADS)
    resident, copies = PointerTable.of([hidden.new_empty(2 * HEADS, 1, D)]), DeviceRows(rows, TOKENS, planes)
    for _ in range(2):
        triton_norm.rms_norm(hidden, hidden[0], 1e-5)
        triton_rotary.rotate_halves(hidden.view(1, -1, D).transpose(0, 1), turns, turns)  # queries, keys
    triton_append.store_resident(k, k, resident, slots[:1])
    triton_gather.write_rows(rows, k, k, slots, planes, copies)
    bases = slots.new_empty(1, TOKENS // BLOCK_SIZE)
    triton_resident.attend_copies(q, resident, bounds, bounds, copies, bases, bounds, bounds, 0.1)


def _launch_layer() -> None:
    """Launch the Triton kernels of one layer."""
    hidden, turns = torch.empty(1, HIDDEN, dtype=torch.bfloat16), torch.empty(1, 1, D)
    q, k = hidden.new_empty(HEADS * GROUP, 1, D), hidden.new_empty(HEADS, D)
    basis, mean, mixing = torch.empty(HEADS, D, D), torch.empty(HEADS, D), torch.empty(D, D)
    slots, bounds = torch.zeros(HEADS, dtype=torch.int64), torch.zeros(HEADS, dtype=torch.int32)
    rows, planes = hidden.new_empty(TOKENS, D), slots.new_empty(2, HEADS)
    resident = PointerTable.of([hidden.new_empty(2 * HEADS, RESIDENT, D)])
    layout = Layout(D, 4)
    page = torch.empty(2, HEADS, PAGE_BLOCKS, layout.block_bytes, dtype=torch.uint8)
    table = table_of([Pages.of([page] * (TOKENS // PAGE_TOKENS), 1)])

    for _ in range(2):
        triton_norm.rms_norm(hidden, hidden[0], 1e-5)
        skewed = triton_skew.skew_queries(q, basis, HEADS, 0.1)
    for _ in range(3):  # queries, keys, predicted queries
        triton_rotary.rotate_halves(hidden.view(1, -1, D).transpose(0, 1), turns, turns)
    triton_append.store_resident(k, k, resident, slots[:1])
    triton_gather.write_rows(rows, k, k, slots[:1], planes)
    triton_low_bit_rows.append_rows(k, k, basis, mean, mixing, layout, table, slots)
    scores = triton_low_bit_scores.scores(skewed, mean, layout, table, bounds, bounds, TOKENS)
    chosen, counts = triton_select.select_tokens(scores, bounds, bounds, HEADS, 5.0, bounds[:1], SELECTED)
    fetched = hidden.new_empty(2, HEADS, SELECTED, D)
    triton_gather.gather_tokens(rows, chosen, counts, slots.new_empty(1, TOKENS // 64), planes, fetched)
    triton_resident.attend_resident(k[:, None].expand(-1, GROUP, -1).contiguous(), resident, bounds, bounds, *fetched,
                                    bounds, 0.1)  # fmt: skip
    spans, exact = (bounds, bounds, chosen, counts, TOKENS), (torch.empty_like(skewed), skewed.new_empty(HEADS, GROUP))
    triton_low_bit.merge_approximate(skewed, mean, mixing, layout, table, *spans, *exact)


def executed(code: str, trips: Sequence[int]) -> int:
    """Return how many instructions a warp executes if loop i runs `trips[i]` times, and later loops once.

    Code behind a branch counts as executed.
    """
    places, loops = instructions_and_loops(code)
    assert len(loops) >= len(trips), (len(loops), trips)
    counts = dict.fromkeys(places, 1)
    for (start, stop), times in zip(loops, trips, strict=False):
        for at in places:
            if start <= at <= stop:
                counts[at] *= times
    return sum(counts.values())


def _instructions(launch_layer: Callable[[], None], trips: Trips) -> Iterator[tuple[str, int]]:
    """Yield the kernel and the executed warp instructions of each launch in a layer."""
    with compiling("sm_90") as launches:
        launch_layer()
    for each in launches:
        count = executed(disassemble(each.binary), trips.get(each.kernel, ()))
        yield each.kernel, count * each.programs * each.binary.metadata.num_warps


def _predict(step: str, parts: Sequence[Part], launch_layer: Callable[[], None], trips: Trips) -> dict[str, Any]:
    """Return the counts of a step. `step` is its name in `CONTRIBUTING.md`."""
    counted, rows = list(_instructions(launch_layer, trips)), []
    for part in parts:
        own = [n for kernel, n in counted if kernel in part.kernels or kernel.partition(".")[0] in part.kernels]
        rows.append(asdict(part) | {"instructions": LAYERS * sum(own), "launches": LAYERS * len(own)})
    assert sum(row["launches"] for row in rows) == LAYERS * len(counted)
    return {"tokens": TOKENS, "nodes": LAYERS * documented_counts()[step].nodes, "rows": rows}


def predict() -> dict[str, Any]:
    full = _predict("full attention, KV on the device", predict_full_parts(), _launch_full_layer, FULL_TRIPS)
    return _predict("default", predict_parts(), _launch_layer, TRIPS) | {"full": full}


def main() -> None:
    if "--print" in sys.argv:
        print(json.dumps(predict()))
    else:
        write_text(FILE, json.dumps({"environment": environment(), "results": predict()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
