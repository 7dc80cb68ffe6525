"""Dense float32 and bfloat16 weights on a CPU: fast products for few rows, and for bfloat16 without native support."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import row_products, team
from ...kernels.native import has_tiles
from .backend import BackendLinear, LinearBackend

TILE_BYTES = 1 << 22
"""Maximum size of a weight tile in bytes of float32. bfloat16 weights are converted tile by tile."""


class DenseCPU(LinearBackend):
    """Computes up to `MAX_ROWS` input rows with `kernels.row_products`, and larger inputs with torch.

    Few rows are summed separately, so a result does not depend on the number of rows. For larger inputs, tiles of the
    weight are distributed over threads.
    """

    def takes(self, layer: nn.Linear, device: torch.device) -> bool:
        return device.type == "cpu" and row_products.takes(layer.weight) is not None

    def linear(self, layer: BackendLinear, x: torch.Tensor) -> torch.Tensor:
        weight = layer.weight  # modules look up parameters slowly, and a decode step has hundreds of linear layers
        if torch.is_grad_enabled() or x.dtype != weight.dtype or not x.numel():
            return super().linear(layer, x)
        if x.numel() > row_products.MAX_ROWS * layer.in_features:
            return product_by_tiles(x, lambda tile, dtype: weight[tile].to(dtype), len(weight), layer.bias)
        code = row_products.takes(weight)
        return super().linear(layer, x) if code is None else code.linear(x, weight, layer.bias)


def product_by_tiles(
    x: torch.Tensor, weights: Callable[[slice, torch.dtype], torch.Tensor], outs: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x `[..., in]` times a weight `[outs, in]` plus bias, `[..., outs]`, for many rows of x.

    Args:
        x: float32 or bfloat16.
        weights: Called as `weights(rows, dtype)`. Returns these rows of the weight.
        outs: Rows of the weight.
        bias: `[outs]`, or None.
    """
    # torch multiplies bfloat16 slowly without native instructions, so tiles of the weight are converted to float32.
    widens = x.dtype == torch.bfloat16 and not row_products.torch_multiplies_bfloat16()
    dtype, ins = torch.float32 if widens else x.dtype, x.shape[-1]
    rows = x.reshape(-1, ins).to(dtype)
    out = x.new_empty(len(rows), outs)
    most = max(1, TILE_BYTES // (4 * ins))
    parts = max(-(-outs // most), min(team.threads(), outs))
    height = -(-outs // parts)

    def compute(part: int) -> None:
        tile = slice(part * height, (part + 1) * height)
        out[:, tile] = F.linear(rows, weights(tile, dtype), None if bias is None else bias[tile].to(dtype))

    team.share(compute, -(-outs // height))
    return out.view(*x.shape[:-1], outs)


def computes_bfloat16() -> bool:
    """Return whether bfloat16 models are fast on this CPU: there is compiled code, or torch uses AMX."""
    return row_products.takes(torch.empty(32, 32, dtype=torch.bfloat16)) is not None or has_tiles()
