"""Test the Triton kernel that skews the queries of a batch against its definition."""

from __future__ import annotations

import pytest
import torch

from offload_rt.kernels import lists


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [False, True], ids=["shared basis", "own bases"])
@pytest.mark.parametrize(("d", "r", "group"), [(64, 64, 3), (80, 24, 1), (10, 10, 2), (40, 40, 20), (576, 24, 20)])
def test_queries_are_skewed(
    kernel_device: torch.device, d: int, r: int, group: int, own: bool, dtype: torch.dtype
) -> None:
    """Queries are a transposed view, as attention passes them."""
    from offload_rt.kernels.triton_skew import skew_queries

    torch.manual_seed(d)
    kv_heads, batch = 2, 3
    q = torch.randn(batch, kv_heads * group, d, device=kernel_device).to(dtype).transpose(0, 1)
    basis = torch.randn(batch * kv_heads if own else kv_heads, d, r, device=kernel_device)
    got, want = (call(q, basis, kv_heads, 0.25) for call in (skew_queries, lists.skew_queries))
    assert got.shape == (batch * kv_heads, group, r) and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * d)
