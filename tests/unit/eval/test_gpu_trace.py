"""Test how a profiler trace from a CUDA device is summarised."""

from __future__ import annotations

from offload_rt.eval.suites.gpu_trace import DeviceEvent, covered, summary

EVENTS = [
    DeviceEvent("gemm", 7, 0.0, 10.0),
    DeviceEvent("_gather_tokens", 8, 5.0, 25.0),
    DeviceEvent("gemm", 7, 30.0, 40.0),
    DeviceEvent("Memcpy HtoD (Pinned -> Device)", 8, 22.0, 26.0),
]


def test_overlapping_work_counts_once() -> None:
    assert covered(EVENTS) == 36.0 and covered(EVENTS[::-1]) == 36.0 and covered([]) == 0.0


def test_kernels_and_streams_are_summed_per_step() -> None:
    found = summary(EVENTS, 2)
    assert found["kernels"][0] == {"kernel": "gemm", "launches": 1.0, "us": 10.0}
    assert found["streams"] == {"7": {"launches": 1.0, "us": 10.0}, "8": {"launches": 1.0, "us": 12.0}}
    assert (found["wall"], found["device busy"], found["PCIe busy"]) == (20.0, 18.0, 10.5)
