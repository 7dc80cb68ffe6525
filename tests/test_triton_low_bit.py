"""The tail in Triton against its definition in float64."""

from __future__ import annotations

import pytest
import torch
from support.low_bit import stored_rows

from offload_rt.kernels.low_bit import Layout, dequantise_rows, tail_attention


@pytest.mark.parametrize("value_bits", [2, 4])
@pytest.mark.parametrize(("d", "group"), [(64, 7), (64, 3), (80, 1), (128, 20), (12, 2)])
@pytest.mark.parametrize("tokens", [range(5, 600), range(64, 65), range(3, 128)])
def test_the_tail_is_what_is_defined(
    kernel_device: torch.device, tokens: range, d: int, group: int, value_bits: int
) -> None:
    """On CUDA weights are rounded to bfloat16, eight bits; the interpreter multiplies in float32."""
    from offload_rt.kernels.triton_low_bit import tail_attention as compiled

    torch.manual_seed(d + group)
    layout = Layout(d, value_bits)
    storage = stored_rows(layout, 2, 600).to(kernel_device)
    q = torch.randn(2, group, d, device=kernel_device) * d**-0.5
    shift = torch.randn(2, group, device=kernel_device)
    skip = torch.stack([torch.randperm(len(tokens))[: len(tokens) // 3] + tokens.start for _ in range(2)])
    skip = torch.cat((skip, torch.tensor([[-1], [-1]])), 1).to(kernel_device)
    out, lse = compiled(q, shift, storage, layout, tokens, skip)
    want, want_lse = tail_attention(q, shift, storage, layout, tokens, skip)
    largest = dequantise_rows(*(part.flatten(1, 2) for part in layout.values(storage)), value_bits, torch.float32)
    rounding = 2**-8 if kernel_device.type == "cuda" else 4e-6
    torch.testing.assert_close(out, want, rtol=0, atol=rounding * float(largest.abs().max()))
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-5)


def test_where_no_token_is_left_there_is_nothing(kernel_device: torch.device) -> None:
    from offload_rt.kernels.triton_low_bit import tail_attention as compiled

    layout = Layout(64, 2)
    storage = stored_rows(layout, 2, 700).to(kernel_device)
    q, skip = torch.randn(2, 2, 64, device=kernel_device), torch.arange(3, 640, device=kernel_device).repeat(2, 1)
    out, lse = compiled(q, torch.zeros(2, 2, device=kernel_device), storage, layout, range(3, 640), skip)
    assert out.eq(0).all() and lse.isneginf().all()
