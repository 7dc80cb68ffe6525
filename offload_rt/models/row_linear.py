"""Linear layers that are fast for a few rows on a CPU, and for bfloat16 without products of bfloat16."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import row_products

TILE_BYTES = 1 << 23
"""Size of the float32 buffer into which bfloat16 weights are widened."""


class RowLinear(nn.Linear):
    """`nn.Linear` whose products with up to `MOST_ROWS` rows are computed by `kernels.row_products`.

    Each row is summed alone, so that its result does not depend on how many rows come together.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `[..., in]` to `[..., out]`."""
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype or not input.numel():
            return super().forward(input)
        if input.numel() <= row_products.MOST_ROWS * self.in_features:
            if (code := row_products.takes(self.weight)) is not None:
                return code.linear(input, self.weight, self.bias)
        elif self.weight.dtype == torch.bfloat16 and not row_products.torch_multiplies_bfloat16():
            return self._by_tiles(input)
        return super().forward(input)

    def _by_tiles(self, input: torch.Tensor) -> torch.Tensor:
        """Widen rows of the weight to float32, tile by tile, because torch's bfloat16 product is slow here."""
        x = input.float().view(-1, self.in_features)
        out = input.new_empty(len(x), self.out_features)
        rows = max(1, TILE_BYTES // (4 * self.in_features))
        for start in range(0, self.out_features, rows):
            tile = slice(start, start + rows)
            bias = None if self.bias is None else self.bias[tile].float()
            out[:, tile] = nn.functional.linear(x, self.weight[tile].float(), bias)
        return out.view(*input.shape[:-1], self.out_features)


def use_row_linear(model: nn.Module) -> None:
    """Turn every plain linear layer of a model into a `RowLinear` if its weight is supported."""
    for module in model.modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            continue
        if row_products.takes(module.weight) is not None:
            module.__class__ = RowLinear
