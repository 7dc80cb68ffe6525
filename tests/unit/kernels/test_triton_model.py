"""Compare the Triton kernels for norms and rotary embeddings with their definitions."""

from __future__ import annotations

import pytest
import torch

from offload_rt.kernels import reference

ROUNDING = {torch.float32: 2.0**-20, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""Relative error compared with float64, from rounding twice. The interpreter truncates bfloat16."""


@pytest.mark.parametrize(("tokens", "d"), [(1, 64), (3, 72), (2, 1024), (70, 72)])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_norm_equals_the_definition(kernel_device: torch.device, tokens: int, d: int, dtype: torch.dtype) -> None:
    from offload_rt.kernels.triton_norm import rms_norm

    torch.manual_seed(d)
    x = (torch.randn(tokens, 2 * d, device=kernel_device) * 3).to(dtype)[:, :d]
    weight = torch.randn(d, device=kernel_device).to(dtype)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("heads", "tokens", "d"), [(4, 1, 64), (3, 5, 80), (2, 75, 80)])
def test_rotations_equal_the_definition(
    kernel_device: torch.device, heads: int, tokens: int, d: int, dtype: torch.dtype
) -> None:
    from offload_rt.kernels.triton_rotary import rotate_halves

    torch.manual_seed(d)
    x = torch.randn(tokens, heads, d, device=kernel_device).to(dtype).transpose(0, 1)  # layout of a projection
    cos, sin = torch.randn(2, 1, tokens, d, device=kernel_device)
    expected = reference.rotate_halves(x.double(), cos.double(), sin.double())
    actual = rotate_halves(x, cos, sin)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=8 * ROUNDING[dtype])


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_rotations_are_rounded_like_transformers(kernel_device: torch.device, dtype: torch.dtype) -> None:
    """When results were rounded only once, the load-time verification of Qwen failed on an H100.

    With tables of the same dtype, all bits are equal. The interpreter truncates bfloat16.
    """
    from offload_rt.kernels.triton_rotary import rotate_halves

    torch.manual_seed(0)
    x = (100 * torch.randn(4, 3, 64, device=kernel_device)).to(dtype)
    cos, sin = torch.randn(2, 1, 3, 64, device=kernel_device).to(dtype)
    actual, expected = rotate_halves(x, cos, sin), reference.rotate_halves(x, cos, sin)
    truncates = dtype == torch.bfloat16 and kernel_device.type == "cpu"
    torch.testing.assert_close(actual, expected, rtol=0, atol=8.0 if truncates else 0)
    rounded_once = reference.rotate_halves(x.double(), cos.double(), sin.double()).to(dtype)
    assert dtype == torch.float32 or not torch.equal(expected, rounded_once), "the test detects a single rounding"


def test_rms_norm_of_llama_is_recognised_by_its_code() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from offload_rt.models.decoder_layer import fused_norm

    unsupported = GemmaRMSNorm(8), torch.nn.LayerNorm(8)
    assert all(fused_norm(module) is module for module in unsupported)
    for module in (LlamaRMSNorm(8), Qwen3RMSNorm(8)):
        assert fused_norm(module) is not module
        x, module.weight.data = torch.randn(3, 8), torch.randn(8)
        assert torch.equal(fused_norm(module)(x), module(x))
        assert torch.equal(reference.rms_norm(x, module.weight, module.variance_epsilon), module(x))
