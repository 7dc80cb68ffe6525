"""Scale the channels of keys so that a quantised KV cache loses less.

Channels of a key that are quantised together share a step size, so one large channel increases the error of all others.
In Qwen2 and Qwen2.5, the bias of the key projection makes some channels of each head much larger than the rest.

The rows of `k_proj` are divided by scales, and the rows of `q_proj` are multiplied by them. Attention scores stay the
same, because the two channels that RoPE rotates together share a scale. All scales are powers of two, so no number is
rounded, except for float16 numbers close to 0. In packed weights, only the scales and minima of the rows change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from .linear import plain_weight
from .linear.packed import PackedLinear
from .weights import attention_of, decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODEL_TYPES = ("qwen2", "qwen2_moe")
"""Models with a bias in the key projection, RoPE over the whole head, and no norm of queries and keys."""


def can_balance_keys(model: PreTrainedModel) -> bool:
    """Return whether `balance_keys` supports the model. Weights must be plain or in `PackedFormat`."""
    return model.config.model_type in _MODEL_TYPES and all(
        _can_scale(projection)
        for layer in decoder_layers(model)
        for projection in (attention_of(layer).q_proj, attention_of(layer).k_proj)
    )


def _can_scale(layer: nn.Linear) -> bool:
    plain = type(layer) is nn.Linear and plain_weight(layer) is not None
    return layer.bias is not None and (plain or type(layer) is PackedLinear)


@torch.no_grad()
def balance_keys(model: PreTrainedModel) -> None:
    """Scale the key and query projections of all layers in place."""
    for layer in decoder_layers(model):
        attention, norm = attention_of(layer), layer.get_parameter("input_layernorm.weight")
        scales = key_scales(attention.k_proj, norm, attention.head_dim)
        _scale_outputs(attention.k_proj, 1 / scales.flatten())
        _scale_outputs(attention.q_proj, scales.repeat_interleave(attention.num_key_value_groups, dim=0).flatten())


def key_scales(k_proj: nn.Linear, norm: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the scales, float32 `[Hkv, d]`: square roots of the estimated sizes of the channels, relative to the
    head's mean.

    A channel's size is estimated for inputs whose elements are independent, with mean 0 and variance 1 before they are
    multiplied by `norm` `[D]`. With Qwen2.5, dividing by the size itself instead of its square root loses more.
    """
    weight = k_proj.dequantised() if isinstance(k_proj, PackedLinear) else k_proj.weight.float()
    squares = (weight * norm.float()).square().sum(1) + k_proj.bias.float().square()
    pairs = squares.view(-1, 2, head_dim // 2).mean(1)  # RoPE rotates the channels c and c + d / 2 together
    sizes = pairs.sqrt()
    exponents = (sizes / sizes.mean(1, keepdim=True)).log2().div(2).round()
    exponents = exponents.nan_to_num(0, 0, 0).clamp(-8, 8)  # a pruned channel has size 0
    return exponents.repeat(1, 2).exp2()


def _scale_outputs(layer: nn.Linear, scales: torch.Tensor) -> None:
    if isinstance(layer, PackedLinear):
        layer.scale_weight(scales)
    else:
        layer.weight.mul_(scales[:, None])
    layer.bias.mul_(scales)
