"""Test which tensors use compiled kernels, with and without CUDA."""

from __future__ import annotations

import inspect

import pytest
import torch

from offload_rt.kernels import dispatch, lists

OPERATIONS = [
    "gather_rows", "gather_tokens", "write_rows", "keep_rows", "partial_scores", "quantised_scores", "select_tokens",
    "attend_counted", "attend_kept", "merge_parts", "append_partial", "append_quantised",
    "read_lists", "write_lists", "append_entries", "within",
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_called_as_it_is_defined(operation: str) -> None:
    called, defined = getattr(dispatch, operation), getattr(lists, operation)
    assert inspect.signature(called) == inspect.signature(defined)


def test_cpu_tensors_take_the_definition() -> None:
    """The test uses float64, which the compiled kernels do not support."""
    q, k = torch.randn(2, 3, 8, dtype=torch.float64), torch.randn(2, 5, 8, dtype=torch.float64)
    counts = torch.tensor([5, 2])
    out, lse = dispatch.attend_counted(q, k, k, counts, 1.0)
    want, want_lse = lists.attend_counted(q, k, k, counts, 1.0)
    assert out.dtype == torch.float64 and torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_tensors_stay_there(dtype: torch.dtype) -> None:
    q, k = (torch.randn(2, n, 64, dtype=dtype, device="cuda") for n in (3, 300))
    counts = torch.tensor([300, 20], dtype=torch.int32, device="cuda")
    out, lse = dispatch.attend_counted(q, k, k, counts, 0.125)
    want, want_lse = lists.attend_counted(q.double(), k.double(), k.double(), counts, 0.125)
    assert out.is_cuda and out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
