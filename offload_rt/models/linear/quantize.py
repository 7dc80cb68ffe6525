"""Quantisation of the linear layers of a 16-bit checkpoint while it is being loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...kernels.packed_format import TILE, PackedFormat
from .packed import use_packed_weights

GROUP = 32
_ROUTERS = (".gate", "_expert_gate", "router")
"""Name suffixes of layers that choose experts.

They are not quantised: they are small, and errors would change the choice.
"""

_ABSORBED = ("kv_b_proj",)
"""Name suffixes of layers whose weights latent attention multiplies by the queries. They are not quantised."""

_READ_IN_PARTS = ("per_layer_model_projection",)
"""Name suffixes of layers that are read in parts, one part per decoder layer (`LayerEmbeddings`).

Their weights must not be quantised.
"""

_MAX_INPUTS_PER_OUTPUT = 16
"""Layers with a higher ratio of inputs to outputs are not quantised.

They are small, and each of their outputs affects a whole head.
"""

_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Fractions of a group's range that 4-bit codes may cover.

For each group, the fraction with the smallest squared error is used.
"""

_WEIGHTS_AT_ONCE = 1 << 20
"""Number of weights whose codes are computed together. This needs up to 50 bytes of device memory per weight.

At that time, the device has no weights yet, so memory plans need not count these 50 MiB.
"""


def quantize_layers(model: Any, bits: int, device: torch.device | None = None) -> None:
    """Quantise the linear layers of `model` to packed weights with 4 or 8 bits, in place.

    The codes are computed on `device`. The head always gets 8 bits. For a model on the meta device, only the shapes are
    converted. The following layers are not quantised:

    * a head that is tied to the embedding,
    * routers of experts, and stacked experts,
    * layers that latent attention absorbs, or that decoder layers read in parts,
    * layers with few outputs, or with a number of inputs that is not a multiple of 64.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for name, module in model.named_modules():
        excluded = (*_ROUTERS, *_ABSORBED, *_READ_IN_PARTS)
        if type(module) is not nn.Linear or f".{name}".endswith(excluded) or (module is head and tied):
            continue
        if _MAX_INPUTS_PER_OUTPUT * module.out_features < module.in_features:
            continue
        layer_bits = 8 if module is head else bits
        if PackedFormat.fits(module.in_features, layer_bits, GROUP):
            weight = module.weight.data
            form = PackedFormat(module.in_features, layer_bits, GROUP, layer_bits == 4, 0 if layer_bits == 4 else 128)
            if (device or weight.device).type == "cpu":
                form = form.for_cpu()
            # the exponent makes all scaled values less than 2^15, so that few scales are subnormal float16 numbers
            if not weight.is_meta:
                low, high = weight.aminmax()  # without a copy of the weight, as `abs` would make
                form = replace(form, exponent=int(torch.frexp(torch.maximum(-low, high).float()).exponent) - 15)
            use_packed_weights(module, form, weight.dtype, _quantized(weight, form, device or weight.device))


def _quantized(weight: torch.Tensor, form: PackedFormat, device: torch.device) -> torch.Tensor:
    rows = torch.empty(len(weight), form.row_bytes, dtype=torch.uint8, device=weight.device)
    if weight.is_meta:
        return rows
    power = torch.tensor(2.0**-form.exponent)
    step = max(1, _WEIGHTS_AT_ONCE // (form.ins * TILE)) * TILE
    for start in range(0, len(weight), step):
        groups = (weight[start : start + step].to(device).float() * power).view(-1, form.ins // form.group, form.group)
        rows[start : start + step] = form.pack(*(_int4(groups) if form.has_minima else _int8(groups)))
    return rows


def _int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8-bit codes and a scale for each group of weights in `groups` `[out, n, GROUP]`."""
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = (groups / scales.clamp_min(1e-30)).round().clamp(-127, 127) + 128
    return codes.to(torch.uint8).flatten(1), scales[..., 0]


def _int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 4-bit codes, a scale and a minimum for each group of weights in `groups` `[out, n, GROUP]`."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best: list[torch.Tensor] = []
    for fraction in _SHRINK:
        minima = (middle - fraction * half).half().float()
        scales = (fraction * half / 7.5).half().float()
        codes = ((groups - minima) / scales.clamp_min(1e-30)).round().clamp(0, 15)
        error = (codes * scales + minima - groups).square().sum(-1, keepdim=True)
        candidate = [codes, scales, minima, error]
        if best:
            better = error < best[3]
            candidate = [torch.where(better, a, b) for a, b in zip(candidate, best, strict=True)]
        best = candidate
    codes, scales, minima, _ = best
    return codes.to(torch.uint8).flatten(1), scales[..., 0], minima[..., 0]
