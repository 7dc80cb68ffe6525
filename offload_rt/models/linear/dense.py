"""Float32 and bfloat16 weights on a CPU, without quantisation.

Products with few input rows use C code. For bfloat16 on processors without bfloat16 instructions, larger products are
computed in tiles.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import row_products, team
from ...kernels.native import has_tiles
from .backend import BackendLinear, LinearBackend

TILE_BYTES = 1 << 22
"""Maximum size in bytes of a weight tile in float32. bfloat16 weights are converted tile by tile."""


class DenseLinear(BackendLinear):
    """Computes up to `MAX_ROWS` input rows with `kernels.row_products`, and more rows with torch.

    Up to `MAX_ROWS` rows, the result of each row does not depend on the number of rows.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight  # Modules look up parameters slowly, and a decode step has hundreds of linear layers.
        if torch.is_grad_enabled() or input.dtype != weight.dtype or not input.numel():
            return super().forward(input)
        if input.numel() > row_products.MAX_ROWS * self.in_features:
            return product_by_tiles(input, lambda tile, dtype: weight[tile].to(dtype), len(weight), self.bias)
        # The owner of the model may have moved the weight, and the C code reads it through its address.
        in_place = weight.is_cpu and weight.is_contiguous()
        code = row_products.code_for(weight.dtype) if in_place else None
        return super().forward(input) if code is None else code.linear(input, weight, self.bias)


class DenseCPU(LinearBackend):
    """Weight format of plain weights on a CPU."""

    layer_class = DenseLinear

    def takes(self, layer: nn.Linear, device: torch.device) -> bool:
        return device.type == "cpu" and row_products.takes(layer.weight) is not None


def product_by_tiles(
    x: torch.Tensor, weights: Callable[[slice, torch.dtype], torch.Tensor], outs: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply many rows x `[..., in]` by a weight `[outs, in]` and add the bias. Return `[..., outs]`.

    x is float32 or bfloat16. `weights(rows, dtype)` returns the given rows of the weight in `dtype`.
    """
    # Without bfloat16 instructions, torch multiplies bfloat16 slowly, so tiles of the weight are converted to float32.
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
    """Return whether bfloat16 models are fast on this CPU: the C code is available, or torch uses AMX."""
    return row_products.takes(torch.empty(32, 32, dtype=torch.bfloat16)) is not None or has_tiles()
