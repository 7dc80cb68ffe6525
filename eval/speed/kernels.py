"""Benchmark each operation of the decode step: its time relative to a lower bound, and its error relative to float64.

The bound is derived from the number of bytes that must be moved. If there is no CUDA device, the torch definitions run
instead, to test the benchmark itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...kernels import dispatch, kv_runs, lists, packed_products
from ...kernels.kv_runs import Run
from ...kernels.packed_format import PackedFormat, interleave
from ...kernels.pointer_table import PointerTable
from ...kernels.selection import pack
from ...model_runner.cuda_graphs import SharedPool
from ...models.linear.packed import packed_linear, unpack_rows
from ...policies.infinigen.scoring import row_width
from ...transfer.streams import DeviceStream, InlineStream
from ..core.report import Row

KV_HEADS, GROUP, D, COLUMNS = 8, 4, 128, 38
"""Shape of one layer of an 8B Llama. `COLUMNS` is the number of columns of scoring keys for partial_ratio 0.3."""

FORMATS: dict[str, dict[str, Any]] = {
    "Q4_K": {"bits": 4, "group": 32, "has_minima": True, "has_factors": True},
    "AWQ": {"bits": 4, "group": 128, "has_zeros": True},
    "Q6_K": {"bits": 6, "group": 16, "offset": 32, "has_factors": True},
    "int8": {"bits": 8, "group": 32, "offset": 128},
}
"""Formats of packed weights to measure."""

HIDDEN = 5120
"""Number of inputs of linear layers, as in models with 27 billion parameters."""

WARM_UP = 3
"""Number of untimed calls before the measurement. The first call compiles the kernel."""

CACHES = 1 << 28
"""Number of bytes to write between calls to flush the device's cache. It is larger than the cache of any device."""

SHORTEST = 1e-6
"""Minimum time of a copy in ms, needed because the coarse clocks of virtual machines may measure 0."""

REPLAYED = 8
"""Number of calls in a CUDA graph."""


@dataclass(frozen=True)
class KernelSize:
    copied: int = 1 << 28  # bytes of each copy that measures a bandwidth
    tokens: int = 131_072
    share: float = 0.05  # fraction of the tokens copied from the host
    batch: int = 32  # number of sequences with a shared prefix
    prefix: int = 4096  # tokens of the shared prefix
    own: int = 64  # tokens of each sequence after the shared prefix
    repeats: int = 30
    # Additional numbers of Triton programs to try for a gather. Too few do not saturate PCIe, and too many delay other
    # kernels.
    programs: tuple[int, ...] = (8, 16, 64, 132, 1024)
    outs: int = 17_408


SMALL = KernelSize(1 << 20, 1024, 0.05, 3, 128, 64, 3, (8,), 40)


@dataclass(frozen=True)
class Case:
    name: str
    moved: int  # number of bytes that the operation must read and write
    over_pcie: bool  # whether these bytes are copied from host to device (otherwise, within device memory)
    call: Callable[[], Any]
    error: Callable[[], float]  # returns the largest error relative to its tolerance (kernels/README.md)


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the median and the minimum time of `repeats` calls in ms, after `WARM_UP` untimed calls.

    On a CPU, measure CPU time.
    """
    spent = []
    for repeat in range(WARM_UP + repeats):
        if device.type != "cpu":
            begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
            begin.record()
            call()
            end.record()
            torch.accelerator.synchronize(device)
            took = begin.elapsed_time(end)
        else:
            began = time.process_time()
            call()
            took = 1e3 * (time.process_time() - began)
        if repeat >= WARM_UP:
            spent.append(took)
    return statistics.median(spent), min(spent)


def replayed(call: Callable[[], Any], device: torch.device, repeats: int) -> float | None:
    """Return the time of a call in ms, measured in a replayed CUDA graph with a cold L2 cache.

    The time does not include launches from the host. The result is None on a CPU, and if the call cannot be captured.
    """
    if device.type != "cuda":
        return None
    other = torch.empty(CACHES, dtype=torch.uint8, device=device)

    def flush() -> None:
        other.zero_()

    def both() -> None:
        flush()
        call()

    graphs = [SharedPool(device).new_graph() for _ in (flush, both)]
    try:
        for graph, step in zip(graphs, (flush, both), strict=True):
            graph.capture(_repeated(step))
    except RuntimeError:
        return None
    alone, together = (milliseconds(graph.replay, device, repeats)[0] for graph in graphs)
    return (together - alone) / REPLAYED


def _repeated(step: Callable[[], Any]) -> Callable[[], tuple[torch.Tensor, ...]]:
    def body() -> tuple[torch.Tensor, ...]:
        for _ in range(REPLAYED):
            step()
        return ()

    return body


def bandwidth(device: torch.device, size: int, repeats: int) -> dict[str, float]:
    """Measure bandwidths in bytes per second by copying `size` bytes.

    Returns:
        "host_to_device" and "device_to_host" with pinned memory, "both_ways" (the sum of both at the same time), and
        "device" (copies within device memory; each byte counts twice, as read and as written). On a CPU, all are copies
        in memory.
    """
    pinned, back = (torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in range(2))
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    other, side = torch.zeros_like(there), InlineStream() if device.type == "cpu" else DeviceStream(device)

    def rate(call: Callable[[], Any], count: int) -> float:
        return 1e3 * count / max(SHORTEST, milliseconds(call, device, repeats)[1])

    def both() -> None:
        with side.behind_compute():
            back.copy_(other, non_blocking=True)
        there.copy_(pinned, non_blocking=True)
        side.hold_compute(side.record_event())

    return {
        "host_to_device": rate(lambda: there.copy_(pinned, non_blocking=True), size),
        "device_to_host": rate(lambda: back.copy_(there, non_blocking=True), size),
        "both_ways": rate(both, 2 * size),
        "device": rate(lambda: other.copy_(there, non_blocking=True), 2 * size),
    }


def measure(device: torch.device, size: KernelSize, rates: dict[str, float]) -> list[Row]:
    """Measure each operation twice: launched from the host, and in a replayed CUDA graph.

    `rates` are the measured bandwidths in bytes per second: "device" within device memory, "pcie" from host to device.
    """
    rows = []
    for case in cases(device, size):
        error = case.error()
        median, least = milliseconds(case.call, device, size.repeats)
        alone = replayed(case.call, device, size.repeats)
        floor = 1e3 * case.moved / rates["pcie" if case.over_pcie else "device"]
        rows.append(
            {"kernel": case.name, "bytes": case.moved, "over_pcie": case.over_pcie, "ms": median, "least_ms": least}
            | {"floor_ms": floor, "replayed_ms": alone, "times_floor": (alone or median) / floor, "error": error}
        )
    return rows


def cases(device: torch.device, size: KernelSize) -> Iterator[Case]:
    """Yield all operations. The memory of each operation is freed before the next operation is created."""
    torch.manual_seed(0)
    for make in (_gather, _partial, _quantised, _select, _attend, _runs, _append, _packed):
        yield from make(device, size)


def _bounds(device: torch.device, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the starts and stops, each int32 `[Hkv]`, of lists that contain all `tokens` tokens of one sequence."""
    zeros = torch.zeros(KV_HEADS, dtype=torch.int32, device=device)
    return zeros, zeros + tokens


def _chosen(size: KernelSize) -> int:
    return max(1, int(size.share * size.tokens))


def _gather(device: torch.device, size: KernelSize) -> Iterator[Case]:
    n, cuda = _chosen(size), device.type == "cuda"
    rows = torch.randint(0, 1 << 15, (2 * KV_HEADS * size.tokens, D), dtype=torch.int16)
    rows = rows.pin_memory() if cuda else rows
    ids = torch.randint(0, len(rows), (2 * KV_HEADS, n), device=device)
    counts = torch.full((len(ids),), n, dtype=torch.int32, device=device)
    out = torch.empty(len(ids), n, D, dtype=rows.dtype, device=device)

    def error(call: Callable[[], Any]) -> float:
        out.fill_(-1)
        call()
        return 0.0 if torch.equal(out.cpu(), rows[ids.cpu()]) else float("inf")

    moved = out.numel() * out.itemsize
    call = partial(dispatch.gather_rows, rows, ids, counts, out)
    yield Case("gather_rows", moved, True, call, partial(error, call))
    for programs in size.programs if cuda else ():
        from ...kernels import triton_gather

        call = partial(triton_gather.gather_rows, rows, ids, counts, out, programs=programs)
        yield Case(f"gather_rows, {programs} programs", moved, True, call, partial(error, call))


def _score_error(call: Callable[[], lists.Scores], want: lists.Scores, bound: torch.Tensor) -> float:
    return float(((call().scores.double() - want.scores).abs() / bound).max())


def _partial(device: torch.device, size: KernelSize) -> Iterator[Case]:
    q = torch.randn(KV_HEADS, GROUP, COLUMNS, device=device)
    keys = torch.randn(KV_HEADS, COLUMNS, size.tokens, device=device).half()
    starts, stops = _bounds(device, size.tokens)
    own = PointerTable.of([keys])
    moved = keys.numel() * 2 + KV_HEADS * GROUP * size.tokens * 4
    call = partial(dispatch.partial_scores, q, own, starts, stops, size.tokens)

    def error() -> float:
        want = lists.partial_scores(q.double(), own, starts, stops, size.tokens)
        bound = COLUMNS * 2.0**-24 * q.double().abs().sum(-1, keepdim=True) * keys.abs().max().double()
        return _score_error(call, want, bound)

    yield Case("partial_scores, fp16", moved, False, call, error)


def _quantised(device: torch.device, size: KernelSize) -> Iterator[Case]:
    starts, stops = _bounds(device, size.tokens)
    for bits, d in ((8, COLUMNS), (4, D), (2, D)):
        mean, step = torch.zeros(KV_HEADS, d, device=device), torch.rand(KV_HEADS, d, device=device) + 0.01
        codes = torch.randint(0, 1 << bits, (KV_HEADS, size.tokens, d), dtype=torch.uint8, device=device)
        rows = torch.nn.functional.pad(pack(codes, bits), (0, row_width(d) - d))  # the memory layout of scoring keys
        packed, q = PointerTable.of([rows]), torch.randn(KV_HEADS, GROUP, d, device=device)
        del codes
        moved = rows.numel() + KV_HEADS * GROUP * size.tokens * 4
        given = q, packed, mean, step, bits, starts, stops, size.tokens
        call = partial(dispatch.quantised_scores, *given)
        yield Case(f"quantised_scores, int{bits}", moved, False, call, partial(_quantised_error, call, *given))


def _quantised_error(call: Callable[[], lists.Scores], *given: Any) -> float:
    q, _, _, step, bits, *_ = given
    wide = (q.double().abs() * step.double().unsqueeze(1) * (1 << bits)).sum(-1, keepdim=True)
    return _score_error(call, lists.quantised_scores(*given), 2 * q.shape[-1] * 2.0**-24 * wide)


def _select(device: torch.device, size: KernelSize) -> Iterator[Case]:
    starts, stops = _bounds(device, size.tokens)
    found = lists.mask_scores(4 * torch.randn(KV_HEADS, GROUP, size.tokens, device=device), starts, stops)
    cap = _chosen(size)
    limits = torch.tensor([cap], dtype=torch.int32, device=device)
    moved = 2 * KV_HEADS * GROUP * size.tokens * 4 + 7 * KV_HEADS * size.tokens * 4
    given = found, starts, stops, KV_HEADS, 5.0, limits, cap
    call = partial(dispatch.select_tokens, *given)

    def error() -> float:
        pairs = zip(call(), lists.select_tokens(*given), strict=True)
        return 0.0 if all(torch.equal(got, want) for got, want in pairs) else float("inf")

    yield Case("select_tokens", moved, False, call, error)


def _half(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _attend(device: torch.device, size: KernelSize) -> Iterator[Case]:
    n, dtype = _chosen(size), _half(device)
    q = torch.randn(KV_HEADS, GROUP, D, device=device).to(dtype)
    k, v = torch.randn(2, KV_HEADS, n, D, device=device).to(dtype)
    counts = torch.full((KV_HEADS,), n, dtype=torch.int32, device=device)
    name = f"attend_counted, {str(dtype).removeprefix('torch.')}"
    call = partial(dispatch.attend_counted, q, k, v, counts, D**-0.5)

    def error() -> float:
        want, _ = lists.attend_counted(q.double(), k.double(), v.double(), counts, D**-0.5)
        return float((call()[0] - want).abs().max() / (_rounding(dtype) * v.abs().max()))

    yield Case(name, 2 * k.numel() * k.itemsize, False, call, error)


def _rounding(dtype: torch.dtype) -> float:
    return 4e-6 + (2.0**-9 if dtype == torch.bfloat16 else 0.0)


def _runs(device: torch.device, size: KernelSize) -> Iterator[Case]:
    dtype = _half(device)

    def rows(first: int, stop: int, n: int) -> Run:
        k, v = torch.randn(2, KV_HEADS, n, D, device=device).to(dtype)
        return Run(first, stop, k, v)

    runs = [rows(0, size.batch, size.prefix), *(rows(b, b + 1, size.own) for b in range(size.batch))]
    q = torch.randn(KV_HEADS * GROUP, size.batch, D, device=device).to(dtype)
    moved = sum(2 * run.k.numel() * run.k.itemsize for run in runs)
    name = f"attend_runs, {size.batch} on {size.prefix:,}"
    call = partial(dispatch.attend_runs, q, runs, D**-0.5)

    def error() -> float:
        wide = [Run(run.first, run.stop, run.k.double(), run.v.double()) for run in runs]
        want, _ = kv_runs.attend_runs(q.double(), wide, D**-0.5)
        largest = max(float(run.v.abs().max()) for run in runs)
        return float((call()[0] - want).abs().max()) / (_rounding(dtype) * largest)

    yield Case(name, moved, False, call, error)


def _append(device: torch.device, size: KernelSize) -> Iterator[Case]:
    basis = torch.randn(KV_HEADS, D, COLUMNS, device=device) / D**0.5
    k = torch.randn(KV_HEADS, D, device=device).to(_half(device))
    keys = torch.zeros(KV_HEADS, COLUMNS, size.tokens, dtype=torch.float16, device=device)
    slots = torch.full((KV_HEADS,), size.tokens - 1, device=device)
    moved = basis.numel() * 4 + k.numel() * k.itemsize + KV_HEADS * COLUMNS * 2
    call = partial(dispatch.append_partial, k, basis, PointerTable.of([keys]), slots)

    def error() -> float:
        call()
        want = torch.zeros(KV_HEADS, COLUMNS, 1, dtype=torch.float64, device=device)
        lists.append_partial(k.double(), basis.double(), PointerTable.of([want]), torch.zeros_like(slots))
        return float(((keys[:, :, -1:] - want).abs() / (2.0**-10 * want.abs() + 1e-6)).max())

    yield Case("append_partial, fp16", moved, False, call, error)


def _packed(device: torch.device, size: KernelSize) -> Iterator[Case]:
    dtype = _half(device)
    weight = torch.randn(size.outs, HIDDEN, device=device).to(dtype)
    call = partial(torch.nn.functional.linear, weight[:1], weight)
    yield Case("linear, 16 bits, 1 row", weight.numel() * weight.itemsize, False, call, lambda: 0.0)
    del weight, call
    for name, options in FORMATS.items():
        form = PackedFormat(HIDDEN, **options)
        rows = torch.randint(256, (size.outs, form.row_bytes), dtype=torch.uint8, device=device)
        halves = rows[:, form.factors_start :] if form.has_factors else rows[:, form.scales_start : form.minima_start]
        halves.copy_(torch.rand(size.outs, halves.shape[1] // 2, device=device).half().view(torch.uint8))
        if device.type == "cpu":
            rows, form = interleave(rows), form.for_cpu()
        for count in (1, 4, 8, 16, 17):
            x = torch.randn(count, form.ins, device=device).to(dtype)
            call = partial(torch.inference_mode()(packed_linear), x, rows, form, None)
            error = partial(_packed_error, call, x, rows, form)
            yield Case(f"linear, {name}, {count} rows", rows.numel(), False, call, error)
        moved = rows.numel() + size.outs * form.ins * dtype.itemsize
        x = torch.eye(form.ins, dtype=dtype, device=device)
        error = partial(_packed_error, partial(_unpacked, rows, form, dtype), x, rows, form)
        yield Case(f"unpack, {name}", moved, False, partial(unpack_rows, rows, form, dtype), error)


def _unpacked(rows: torch.Tensor, form: PackedFormat, dtype: torch.dtype) -> torch.Tensor:
    """Return the unpacked weights, transposed to `[in, out]`."""
    return unpack_rows(rows, form, dtype).T


def _packed_error(call: Callable[[], torch.Tensor], x: torch.Tensor, rows: torch.Tensor, form: PackedFormat) -> float:
    weights = form.unpack(rows, torch.float32).double()
    want, size = x.double() @ weights.T, x.double().norm(dim=1)[:, None] * weights.norm(dim=1)
    # kernels/README.md. For many rows, weights are rounded to the dtype of x. Triton's interpreter truncates bfloat16.
    tolerance = 2.0**-8 if len(x) > packed_products.MAX_ROWS else 2e-6 if x.is_cuda else 1e-5
    return float(((call().double() - want).abs() / (2.0**-7 * want.abs() + tolerance * size)).max())
