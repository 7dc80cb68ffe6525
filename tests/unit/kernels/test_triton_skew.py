"""Compare the Triton kernel that skews the queries of a batch with its definition."""

from __future__ import annotations

import pytest
import torch

from offload_rt.kernels import lists


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_sequence", [False, True], ids=["shared basis", "basis per sequence"])
@pytest.mark.parametrize(("d", "r", "group"), [(64, 64, 3), (80, 24, 1), (10, 10, 2), (40, 40, 20), (576, 24, 20)])
def test_queries_are_skewed(
    kernel_device: torch.device, d: int, r: int, group: int, per_sequence: bool, dtype: torch.dtype
) -> None:
    from offload_rt.kernels.triton_skew import skew_queries

    torch.manual_seed(d)
    kv_heads, batch = 2, 3
    q = torch.randn(batch, kv_heads * group, d, device=kernel_device).to(dtype).transpose(0, 1)  # as in attention
    basis = torch.randn(batch * kv_heads if per_sequence else kv_heads, d, r, device=kernel_device)
    actual, expected = (skew(q, basis, kv_heads, 0.25) for skew in (skew_queries, lists.skew_queries))
    assert actual.shape == (batch * kv_heads, group, r) and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * d)
