"""Hardware benchmarks: bandwidths, launch costs, overlap of transfer and compute, graph capture, page-locking.

Everything also runs on a CPU as a check, but those numbers are meaningless.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import dispatch
from ...kv_cache.arena import page_lock, reserve
from ...model_runner.cuda_graphs import CudaGraph
from ...transfer.streams import DeviceStream, InlineStream, Stream
from .kernels import milliseconds

Facts = dict[str, Any]

ROW_NUMBERS = 128
"""Elements of a gathered row: 256 bytes, as a head of dimension 128 in half precision."""


@dataclass(frozen=True)
class HardwareSize:
    """Sizes of the benchmarks.

    Attributes:
        copied: Bytes per copy.
        rows: Number of gathered rows of `ROW_NUMBERS` 2-byte elements.
        among: Number of rows to gather from.
        width: Width of the square matrices multiplied during transfers.
        launches: Number of launches to average over.
        locked: Number of page-locked bytes.
        repeats: Number of repeats of each time.
    """

    copied: int = 1 << 28
    rows: int = 104_857
    among: int = 1 << 21
    width: int = 8192
    launches: int = 1000
    locked: int = 1 << 30
    repeats: int = 30


SMALL = HardwareSize(1 << 20, 64, 1024, 64, 10, 1 << 20, 2)


def measure(device: torch.device, size: HardwareSize) -> Iterator[tuple[str, Any]]:
    """Run all benchmarks and yield (name, result) in order of importance."""
    yield "bandwidth", bandwidth(device, size.copied, size.repeats)
    yield "launch", launches(device, size)
    yield "overlap", overlap(device, size)
    yield "capture", capture(device, size)
    yield "page-locking", locking(device, size)


def bandwidth(device: torch.device, size: int, repeats: int) -> dict[str, float]:
    """Measure bandwidths in bytes per second.

    Covers pinned transfers from host to device, back, and in both directions at once (the sum), and copies in device
    memory (bytes count twice, for read and write). On a CPU, all are copies in memory.
    """
    pinned, back = (torch.zeros(size, dtype=torch.uint8, pin_memory=device.type != "cpu") for _ in range(2))
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    other, side = torch.zeros_like(there), _stream(device)

    def rate(call: Callable[[], Any], count: int) -> float:
        return 1e3 * count / milliseconds(call, device, repeats)[1]

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


# ------------------------------------------------------------------------------------------------------------ launches


def launches(device: torch.device, size: HardwareSize) -> dict[str, dict[str, float]]:
    """Measure the time per launch in microseconds: on the host, and until the device has finished."""
    x, row = torch.zeros(1, device=device), torch.zeros(1, ROW_NUMBERS, dtype=torch.int16, device=device)
    ids, counts = torch.zeros(1, 1, dtype=torch.int64, device=device), torch.ones(1, dtype=torch.int32, device=device)
    out, side = torch.empty(1, 1, ROW_NUMBERS, dtype=torch.int16, device=device), _stream(device)

    def fork_and_join() -> None:
        with side.behind_compute():
            pass
        side.hold_compute(side.record_event())

    found = {
        "torch": _each(lambda: x.add_(1), size.launches, device),
        "triton": _each(lambda: dispatch.gather_rows(row, ids, counts, out), size.launches, device),
        "fork and join": _each(fork_and_join, size.launches, device),
    }
    if device.type == "cuda":
        graph = _graph(device)

        def body() -> tuple[torch.Tensor, ...]:
            for _ in range(size.launches):
                x.add_(1)
            return (x,)

        graph.capture(body)
        replayed = _each(graph.replay, 10, device)
        found["graph, of torch"] = {name: spent / size.launches for name, spent in replayed.items()}
    return found


def _each(call: Callable[[], Any], count: int, device: torch.device) -> dict[str, float]:
    call()
    _wait(device)
    began = time.perf_counter()
    for _ in range(count):
        call()
    launched = time.perf_counter()
    _wait(device)
    return {"host_us": 1e6 * (launched - began) / count, "done_us": 1e6 * (time.perf_counter() - began) / count}


# ------------------------------------------------------------------------------------------------------------- overlap


def overlap(device: torch.device, size: HardwareSize) -> list[Facts]:
    """Measure the overlap of each transfer method with each kind of compute.

    Returns the times in ms of the transfer, of the compute and of both at once, and the hidden fraction of the shorter
    one (1: fully overlapped, 0: sequential).
    """
    side = _stream(device)
    rows = torch.zeros(size.among, ROW_NUMBERS, dtype=torch.int16, pin_memory=device.type != "cpu")
    ids = torch.randint(0, size.among, (1, size.rows), device=device)
    counts = torch.full((1,), size.rows, dtype=torch.int32, device=device)
    out = torch.empty(1, size.rows, ROW_NUMBERS, dtype=torch.int16, device=device)
    dense = rows[: size.rows]
    ways: dict[str, Callable[[], Any]] = {
        "gather kernel": lambda: dispatch.gather_rows(rows, ids, counts, out),
        "copy engine": lambda: out[0].copy_(dense, non_blocking=True),
    }
    found = []
    for work, step in _work(device, size.width).items():
        for way, move in ways.items():
            found.append({"way": way, "work": work} | _hidden(move, step, side, device, size.repeats))
    return found


def _work(device: torch.device, width: int) -> dict[str, Callable[[], Any]]:
    """Return the compute kinds: compute-bound as in a prefill, and memory-bound as in a decode step."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    square, one = torch.ones(width, width, device=device, dtype=dtype), torch.ones(1, width, device=device, dtype=dtype)
    out, line = torch.empty_like(square), torch.empty_like(one)
    return {
        "matrix by matrix": lambda: torch.mm(square, square, out=out),
        "row by matrix": lambda: torch.mm(one, square, out=line),
    }


def _hidden(
    move: Callable[[], Any], step: Callable[[], Any], side: Stream, device: torch.device, repeats: int
) -> Facts:
    """Measure the overlap, repeating the compute until it takes about as long as the transfer."""

    def moved() -> None:
        with side.behind_compute():
            move()

    def crossed() -> None:
        moved()
        side.hold_compute(side.record_event())

    link = milliseconds(crossed, device, repeats)[0]
    steps = max(1, round(link / max(milliseconds(step, device, repeats)[0], 1e-6)))

    def worked() -> None:
        for _ in range(min(steps, 1000)):
            step()

    def at_once() -> None:
        moved()
        worked()
        side.hold_compute(side.record_event())

    work = milliseconds(worked, device, repeats)[0]
    both = milliseconds(at_once, device, repeats)[0]
    share = (link + work - both) / max(min(link, work), 1e-9)
    return {"link_ms": link, "work_ms": work, "both_ms": both, "hidden": share}


# ------------------------------------------------------------------------------------------------------------- capture


def capture(device: torch.device, size: HardwareSize) -> Facts:
    """Capture a graph of two streams while another thread waits for events, then replay it with other inputs.

    The waiting thread acts like the saver thread of sessions. If the capture fails, the result contains `error`.
    """
    if device.type != "cuda":
        return {"skipped": "no CUDA device"}
    side, x = _stream(device), torch.zeros(1024, device=device)
    stop, waits = threading.Event(), [0]
    with side.behind_compute():
        marks = [side.record_event() for _ in range(4)]

    def wait() -> None:
        while not stop.is_set():
            marks[waits[0] % len(marks)].synchronize()
            waits[0] += 1

    def body() -> tuple[torch.Tensor, ...]:
        with side.behind_compute():
            y = x * 2
        z = x + 1
        side.hold_compute(side.record_event(), y)
        return (y + z,)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        while not waits[0]:
            time.sleep(0.001)
        graph = _graph(device)
        [out] = graph.capture(body)
        right = []
        for value in range(size.repeats):
            x.fill_(value)
            graph.replay()
            right.append(bool((out == 3 * value + 1).all()))
        return {"right": all(right), "replays": len(right), "waits": waits[0]}
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0], "waits": waits[0]}
    finally:
        stop.set()
        thread.join()


# --------------------------------------------------------------------------------------------------------- page-locking


def locking(device: torch.device, size: HardwareSize) -> Facts:
    """Measure the time to page-lock untouched memory of the host pool."""
    if device.type != "cuda":
        return {"skipped": "no CUDA device"}
    memory = torch.frombuffer(reserve(size.locked, "a measurement"), dtype=torch.uint8)
    owner = threading.Event()  # any weakly referenceable object; the memory is released with it
    began = time.perf_counter()
    page_lock(memory, owner)
    seconds = time.perf_counter() - began
    return {"bytes": size.locked, "seconds": seconds, "seconds_per_gib": seconds * 2**30 / size.locked}


def _stream(device: torch.device) -> Stream:
    return InlineStream() if device.type == "cpu" else DeviceStream(device)


def _graph(device: torch.device) -> CudaGraph:
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return CudaGraph(torch.cuda.graph_pool_handle())


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
