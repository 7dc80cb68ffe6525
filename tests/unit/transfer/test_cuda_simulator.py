"""Test that the CUDA simulator detects each kind of fault, and accepts the correct variant of the same code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.cuda_simulator import CaptureError, IllegalAccessError, Late, Lazy, Schedule, Seeded, Simulator, simulated

CUDA = torch.device("cuda")
SCHEDULES: list[Schedule] = [Lazy(), Late(), Late((0,)), Late((1,)), Seeded(0), Seeded(1)]
NAMES = ["lazy", "eager", "compute late", "side late", "seed 0", "seed 1"]


@pytest.fixture(params=SCHEDULES, ids=NAMES)
def sim(request: pytest.FixtureRequest) -> Iterator[Simulator]:
    with simulated(request.param) as machine:
        yield machine


@pytest.fixture
def late_side_stream() -> Iterator[Simulator]:
    with simulated(Late((1,))) as machine:
        yield machine


@pytest.fixture
def late_compute_stream() -> Iterator[Simulator]:
    with simulated(Late((0,))) as machine:
        yield machine


def test_operations_equal_those_of_a_cpu(sim: Simulator) -> None:
    x = torch.arange(12.0, device=CUDA).view(3, 4)
    x[1, 2:] = -1
    x[:, 0].mul_(3).add_(1)
    y = torch.cat((x, x.T.contiguous().view(3, 4)), dim=1)
    values, order = y.sort(1)
    picked = values.gather(1, order)[order[0, :2] % 3]
    want = torch.arange(12.0).view(3, 4)
    want[1, 2:] = -1
    want[:, 0].mul_(3).add_(1)
    host = torch.cat((want, want.T.contiguous().view(3, 4)), dim=1)
    wanted, ordered = host.sort(1)
    assert torch.equal(picked.cpu(), wanted.gather(1, ordered)[ordered[0, :2] % 3])
    assert (y @ y.T).sum().item() == (host @ host.T).sum().item()
    assert y.device == torch.device("cuda:0") and y.is_cuda and values.untyped_storage().device.type == "cuda"


def read_side_stream_result(side: torch.cuda.Stream, wait: bool) -> torch.Tensor:
    x = torch.full((4,), 2.0, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 3
    if wait:
        torch.cuda.current_stream().wait_stream(side)
    return (y + 1).cpu()


def test_missing_wait_between_streams_is_detected(late_side_stream: Simulator) -> None:
    side = torch.cuda.Stream()
    assert read_side_stream_result(side, wait=True).tolist() == [7.0] * 4
    assert read_side_stream_result(side, wait=False).isnan().all()


def read_after_free(side: torch.cuda.Stream, record: bool) -> torch.Tensor:
    """Read a tensor on the compute stream while the side stream frees it and reuses its memory."""
    with torch.cuda.stream(side):
        staged = torch.full((4,), 5.0, device=CUDA)
    torch.cuda.current_stream().wait_stream(side)
    read = staged * 2
    if record:
        staged.record_stream(torch.cuda.current_stream())
    del staged
    with torch.cuda.stream(side):
        torch.full((4,), 9.0, device=CUDA)
    return read.cpu()


def test_missing_record_stream_is_detected(late_compute_stream: Simulator) -> None:
    side = torch.cuda.Stream()
    assert read_after_free(side, record=True).tolist() == [10.0] * 4
    assert read_after_free(side, record=False).tolist() != [10.0] * 4


def test_host_does_not_see_the_result_of_a_pending_copy(late_compute_stream: Simulator) -> None:
    x = torch.full((4,), 2.0, device=CUDA)
    event = torch.cuda.Event()
    early = x.to("cpu", non_blocking=True)
    event.record()
    assert early.is_pinned() and early.isnan().all()
    event.synchronize()
    assert early.tolist() == [2.0] * 4
    into = torch.zeros(4).pin_memory()
    into.copy_(x * 2, non_blocking=True)
    assert into.tolist() == [0.0] * 4


def test_host_write_during_a_pending_copy_changes_the_copy(late_compute_stream: Simulator) -> None:
    values = torch.ones(4).pin_memory()
    x = values.to(CUDA, non_blocking=True)
    values.fill_(7)
    assert x.tolist() == [7.0] * 4


def test_freed_memory_contains_poison(sim: Simulator) -> None:
    x = torch.full((600,), 2, dtype=torch.int64, device=CUDA)
    address = x.data_ptr()
    y = x + 1
    del x
    torch.cuda.memory_allocated()  # processes pending frees
    torch.cuda.synchronize()
    again = torch.empty(600, dtype=torch.int64, device=CUDA)
    assert again.data_ptr() == address
    assert (again > 1 << 62).all().item() and (y == 3).all().item()
    assert torch.empty(600, device=CUDA).isnan().all().item()


def test_synchronous_operations_are_recorded_with_their_file(sim: Simulator) -> None:
    pageable, pinned = torch.ones(4, 4), torch.ones(4, 4).pin_memory()
    x = torch.empty(4, 4, device=CUDA)
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    x[:, :2].copy_(pinned[:2].view(4, 2), non_blocking=True)
    assert sim.syncs == []
    x.copy_(pageable, non_blocking=True)
    x.copy_(pinned)
    x.copy_(pinned.T, non_blocking=True)
    pageable.copy_(x, non_blocking=True)
    torch.tensor([1], device=CUDA)
    x.sum().item()
    x[torch.tensor([0, 1])]
    x[x > 0]
    assert {sync.file for sync in sim.syncs} == {"tests/unit/transfer/test_cuda_simulator.py"}
    assert [sync.what for sync in sim.syncs] == [
        "copy host to device of pageable memory",
        "copy host to device",
        "copy host to device in pieces",
        "copy device to host of pageable memory",
        "copy host to device",
        "_local_scalar_dense",
        "copy host to device",
        "index",
    ]


def test_host_and_device_tensors_cannot_be_combined(sim: Simulator) -> None:
    x = torch.ones(4, device=CUDA)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat((torch.ones(4), x))
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 4


def test_memory_is_limited_and_counted() -> None:
    with simulated(Lazy(), limit=1 << 20) as sim:
        x = torch.empty(500_000, dtype=torch.uint8, device=CUDA)
        with pytest.raises(torch.OutOfMemoryError, match="simulated"):
            torch.empty(600_000, dtype=torch.uint8, device=CUDA)
        assert torch.cuda.memory_allocated() == -(-500_000 // 512) * 512
        x = torch.empty(4, device=CUDA)
        assert torch.cuda.memory_allocated() == 512 and torch.cuda.max_memory_allocated() > 500_000
        assert sim.memory.usage.active_peak > 500_000
        side = torch.cuda.Stream()
        x.record_stream(side)
        with torch.cuda.stream(side):
            torch.zeros(1, device=CUDA)
        x = torch.empty(0, device=CUDA)
        sim.memory.collect()
        held = sim.memory.usage.active - sim.memory.usage.allocated
        assert held == 512, "the block is held until the side stream reaches this point"
        side.synchronize()
        sim.memory.collect()
        assert sim.memory.usage.active == sim.memory.usage.allocated


# ------------------------------------------------------------------------------------------------------------- graphs


def compute_on_two_streams(side: torch.cuda.Stream, x: torch.Tensor, join: bool = True) -> torch.Tensor:
    now = torch.cuda.current_stream()
    side.wait_stream(now)
    with torch.cuda.stream(side):
        y = x * 2
    z = x + 1
    if join:
        now.wait_stream(side)
        y.record_stream(now)
    return y + z


def test_graph_repeats_the_captured_launches(sim: Simulator) -> None:
    side, x = torch.cuda.Stream(), torch.zeros(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = compute_on_two_streams(side, x)
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert out.tolist() == [3 * value + 1] * 4


def test_invalid_captures_are_refused(sim: Simulator) -> None:
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    before, x = torch.cuda.Event(), torch.zeros(4, device=CUDA)
    before.record()
    with pytest.raises(CaptureError, match="not joined"), torch.cuda.graph(graph):
        compute_on_two_streams(side, x, join=False)
    for body, what in ((before.wait, "outside"), (before.synchronize, "host waits"), (x.cpu, "host waits")):
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.default_stream()
        with (
            pytest.raises(CaptureError, match="previous error") as caught,
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            body()
        assert what in str(caught.value.__context__) and torch.cuda.current_stream() != main
        torch.cuda.set_stream(main)


# ------------------------------------------------------------------------------------------------------------- Triton


def test_kernels_access_only_device_and_page_locked_memory(sim: Simulator) -> None:
    errors = pytest.importorskip("triton.runtime.errors", reason="triton is not installed")
    from offload_rt.kernels.triton_gather import gather_rows

    rows, ids = torch.randn(10, 8), torch.tensor([[3, -1, 7]], device=CUDA)
    counts = torch.tensor([3], dtype=torch.int32, device=CUDA)
    out = torch.zeros(1, 3, 8, device=CUDA)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        gather_rows(rows, ids, counts, out)
    pinned = rows.pin_memory()
    gather_rows(pinned, ids, counts, out)
    assert torch.equal(out.cpu()[0, [0, 2]], rows[[3, 7]]) and out[0, 1].abs().sum().item() == 0

    def read_out_of_bounds() -> None:
        gather_rows(pinned, ids + (1 << 40), counts, out)
        torch.cuda.synchronize()

    with pytest.raises(errors.InterpreterError, match=r"IllegalAccessError.*cannot reach"):
        read_out_of_bounds()


def test_kernels_run_on_the_current_device() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from offload_rt.kernels.triton_gather import gather_rows

    with simulated(Late(), devices=2):
        second = torch.device("cuda:1")
        rows, ids = torch.ones(4, 8, device=second), torch.zeros(1, 2, dtype=torch.int64, device=second)
        counts, out = torch.tensor([2], dtype=torch.int32, device=second), torch.zeros(1, 2, 8, device=second)
        with pytest.raises(IllegalAccessError, match="launched on cuda:0"):
            gather_rows(rows, ids, counts, out)
        with torch.cuda.device(second):
            gather_rows(rows, ids, counts, out)
        assert out.sum().item() == 16
