"""Compare Triton's attention to shared and private runs of KV with float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.interpreter import ROUNDING, is_compiled

from offload_rt.kernels import dispatch, kv_runs
from offload_rt.kernels.kv_runs import Run


def random_kv(
    device: torch.device, n: int, kv_heads: int, d: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v `[Hkv, n, d]` as views of a wider buffer that contains NaN around them."""
    buffer = torch.full((2, kv_heads, n + 5, d), torch.nan, device=device, dtype=dtype)
    buffer[:, :, 2 : n + 2] = torch.randn(2, kv_heads, n, d, device=device).to(dtype)
    return buffer[0, :, 2 : n + 2], buffer[1, :, 2 : n + 2]


def in_float64(runs: list[Run]) -> list[Run]:
    return [Run(run.first, run.stop, run.k.double(), run.v.double()) for run in runs]


SHARED_RUNS = [
    (0, 7, 130),
    (0, 3, 64),
    (3, 6, 256),
    (4, 6, 1),
    (0, 1, 300),
    (1, 2, 1),
    (2, 3, 17),
    (3, 4, 0),
    (3, 4, 2),
]
"""First sequence, stop sequence and number of tokens of each run. Seven sequences share runs at three levels.

One run is empty."""


SHAPES = [(64, 1), (80, 4), (96, 3), (128, 16), (128, 4), (20, 2), (576, 20)]
"""Head dimension and group."""

HALF_PRECISION_SHAPES = SHAPES if torch.cuda.is_available() else SHAPES[:2]
"""Shapes for half precision. With the interpreter, only the loads differ, so fewer shapes are tested."""


@pytest.mark.parametrize(
    ("d", "group", "dtype"),
    [
        *((d, group, torch.float32) for d, group in SHAPES),
        *((d, group, dtype) for dtype in (torch.float16, torch.bfloat16) for d, group in HALF_PRECISION_SHAPES),
    ],
)
def test_attention_to_a_tree_of_runs_equals_float64(
    kernel_device: torch.device, d: int, group: int, dtype: torch.dtype
) -> None:
    from offload_rt.kernels.triton_kv_runs import attend_runs

    torch.manual_seed(d + group)
    cuda, kv_heads, batch = is_compiled(kernel_device), 2, 7
    tree = [*SHARED_RUNS, (4, 5, 5), (5, 6, 4), (6, 7, 3)]
    grown = [(first, stop, 40 * n if cuda else n) for first, stop, n in tree]
    runs = [Run(first, stop, *random_kv(kernel_device, n, kv_heads, d, dtype)) for first, stop, n in grown]
    if d > 512:  # in latent attention, values are keys
        runs = [replace(run, v=run.k) for run in runs]
    q = torch.randn(kv_heads * group, batch, d, device=kernel_device).to(dtype)
    out, lse = attend_runs(q, runs, d**-0.5)
    expected, expected_lse = kv_runs.attend_runs(q.double(), in_float64(runs), d**-0.5)
    largest = max(float(run.v.double().abs().max()) for run in runs if run.v.numel())
    rounding = ROUNDING[dtype] if cuda else 0.0  # the interpreter multiplies in float32
    assert (out - expected).abs().max() <= (rounding + 4e-6) * largest
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


def test_long_runs_are_split_into_a_limited_number_of_pieces(kernel_device: torch.device) -> None:
    from offload_rt.kernels.triton_kv_runs import _PIECES, _table_row, attend_runs

    torch.manual_seed(0)
    slots = [0, 0]
    runs = [Run(0, 2, *random_kv(kernel_device, n, 1, 16, torch.float32)) for n in (20_000, 3)]
    assert [_table_row(run, slots)[9] for run in runs] == [0, -(-20_000 // 512)] and slots[0] == slots[1] <= _PIECES + 1
    runs += [Run(b, b + 1, *random_kv(kernel_device, 5, 1, 16, torch.float32)) for b in range(2)]
    q = torch.randn(1, 2, 16, device=kernel_device)
    out, _ = attend_runs(q, runs, 0.25)
    expected, _ = kv_runs.attend_runs(q.double(), in_float64(runs), 0.25)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.simulated
def test_cuda_tensors_use_the_kernel() -> None:
    device = torch.device("cuda")
    runs = [Run(0, 2, *random_kv(device, 100, 2, 64, torch.bfloat16))]
    runs += [Run(b, b + 1, *random_kv(device, 9, 2, 64, torch.bfloat16)) for b in range(2)]
    q = torch.randn(4, 2, 64, device=device).bfloat16()
    out, _ = dispatch.attend_runs(q, runs, 0.125)
    assert out.is_cuda and out.dtype == torch.float32
    expected, _ = kv_runs.attend_runs(q.double(), in_float64(runs), 0.125)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
