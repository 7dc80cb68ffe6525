"""Compare sparse decode attention and the LSE merge in Triton with float64."""

from __future__ import annotations

import math

import pytest
import torch
from support.interpreter import ROUNDING, is_compiled

from offload_rt.kernels import lists
from offload_rt.kernels.reference import merge_lse

SHAPES = [(64, 1), (80, 4), (96, 7), (128, 16), (128, 8), (256, 2), (576, 20), (40, 70)]
"""d, G. The tiles of 576 and 40 are split, and the groups of 20 and 70 heads need several programs."""


def random_inputs(
    device: torch.device, d: int, group: int, dtype: torch.dtype, counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q `[P, G, d]`, k and v `[P, n, d]`, and counts `[P]`. In each list, KV beyond the count is NaN."""
    listed = max(counts) + 3
    q = torch.randn(len(counts), group, d, device=device).to(dtype)
    kv = torch.randn(2, len(counts), listed + 1, d, device=device).to(dtype)[:, :, :listed]
    for p, count in enumerate(counts):
        kv[:, p, count:] = math.nan
    return q, kv[0], kv[1], torch.tensor(counts, dtype=torch.int32, device=device)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("d", "group"), SHAPES)
def test_attention_equals_float64(kernel_device: torch.device, d: int, group: int, dtype: torch.dtype) -> None:
    from offload_rt.kernels.triton_attention import attend_counted

    torch.manual_seed(d + group)
    cuda = kernel_device.type == "cuda"
    q, k, v, counts = random_inputs(
        kernel_device, d, group, dtype, [6554, 0, 1, 300, 256] * 4 if is_compiled(kernel_device) else [270, 0, 1, 64]
    )
    out, lse = attend_counted(q, k, v, counts, d**-0.5)
    expected, expected_lse = lists.attend_counted(q.double(), k.double(), v.double(), counts, d**-0.5)
    largest = v.double().nan_to_num(0.0).abs().amax((1, 2)).view(-1, 1, 1)
    rounding = ROUNDING[dtype] if cuda else 0.0  # the interpreter multiplies in float32
    assert ((out - expected).abs() <= (rounding + 4e-6) * largest).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()


def test_resident_and_fetched_kv_merge_to_full_attention(kernel_device: torch.device) -> None:
    from offload_rt.kernels.triton_attention import attend_counted, merge_parts

    torch.manual_seed(1)
    q, k, v, counts = random_inputs(kernel_device, 64, 4, torch.float32, [90, 1, 40])
    resident = counts.clamp_max(16)
    parts = [
        attend_counted(q, k[:, :16], v[:, :16], resident, 0.125),
        attend_counted(q, k[:, 16:], v[:, 16:], counts - resident, 0.125),
    ]
    out, lse = merge_parts(
        torch.stack([o.flatten(0, 1) for o, _ in parts]), torch.stack([s.flatten() for _, s in parts])
    )
    expected, expected_lse = lists.attend_counted(q.double(), k.double(), v.double(), counts, 0.125)
    torch.testing.assert_close(out.view_as(expected).double(), expected, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.view_as(expected_lse).double(), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 5, 33])
def test_merge_equals_float64(kernel_device: torch.device, parts: int) -> None:
    from offload_rt.kernels.triton_attention import merge_parts

    torch.manual_seed(parts)
    outs, lses = torch.randn(parts, 7, 80, device=kernel_device), torch.randn(parts, 7, device=kernel_device) * 40
    lses[0, 2], lses[:, 3] = -math.inf, -math.inf
    outs[0, 2], outs[:, 3] = math.nan, math.nan  # outputs of empty parts are uninitialised
    out, lse = merge_parts(outs, lses)
    expected, expected_lse = merge_lse(outs.double().nan_to_num(0).unbind(), lses.double().unbind())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    assert (out[3] == 0).all() and (lse[3] == -math.inf).all()


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("d", [40, 128, 256, 320, 512, 576])
def test_block_has_at_least_16_rows(d: int, itemsize: int) -> None:
    """Matrix products need at least 16 rows. The compiler checks this, but the interpreter does not."""
    from offload_rt.kernels.triton_attention import sizes

    assert all(sizes(d, itemsize, 4, same=same)["BLOCK"] >= 16 for same in (False, True))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_shared_memory_of_a_consumer_card(itemsize: int) -> None:
    """Triton keeps the queries, and K and V of all but one of the iterations in flight, in shared memory (99 KiB)."""
    from offload_rt.kernels.triton_attention import sizes

    # With more than 512 dimensions, the keys contain the values (latent attention).
    for d, same in [*((d, False) for d in range(16, 513, 8)), *((d, True) for d in range(16, 577, 8))]:
        tiles = sizes(d, itemsize, 64, same=same)
        kv = tiles["BLOCK"] * (1 if same else 2) * (tiles["num_stages"] - 1)
        used = (kv + tiles["QUERIES"]) * (tiles["D"] + tiles["REST"]) * itemsize
        assert used <= 97 << 10, (d, same)
