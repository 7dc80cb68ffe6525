"""Linear layers on a CPU: fast for few rows, and for bfloat16 on processors without instructions for it."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import row_products, team

TILE_BYTES = 1 << 22
"""Size of a part of a weight in float32: bfloat16 is widened in a buffer of this size."""


class RowLinear(nn.Linear):
    """`nn.Linear` whose products with up to `MOST_ROWS` rows are computed by `kernels.row_products`.

    Each row is summed alone, so that its result does not depend on how many rows come together. Products with more rows
    are torch's, shared out to threads by parts of the weight.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map `[..., in]` to `[..., out]`."""
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype or not input.numel():
            return super().forward(input)
        if input.numel() > row_products.MOST_ROWS * self.in_features:
            return self._by_parts(input)
        code = row_products.takes(self.weight)
        return super().forward(input) if code is None else code.linear(input, self.weight, self.bias)

    def _by_parts(self, input: torch.Tensor) -> torch.Tensor:
        # torch's product of bfloat16 is slow without instructions for it, so tiles of the weight are widened.
        widens = self.weight.dtype == torch.bfloat16 and not row_products.torch_multiplies_bfloat16()
        dtype = torch.float32 if widens else self.weight.dtype
        x = input.reshape(-1, self.in_features).to(dtype)
        out = input.new_empty(len(x), self.out_features)
        most = max(1, TILE_BYTES // (4 * self.in_features))
        parts = max(-(-self.out_features // most), min(team.threads(), self.out_features))
        rows = -(-self.out_features // parts)

        def compute(part: int) -> None:
            tile = slice(part * rows, (part + 1) * rows)
            bias = None if self.bias is None else self.bias[tile].to(dtype)
            out[:, tile] = nn.functional.linear(x, self.weight[tile].to(dtype), bias)

        team.share(compute, -(-self.out_features // rows))
        return out.view(*input.shape[:-1], self.out_features)


def use_row_linear(model: nn.Module) -> None:
    """Turn every plain linear layer of a model into a `RowLinear` if its weight is supported."""
    for module in model.modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            continue
        if row_products.takes(module.weight) is not None:
            module.__class__ = RowLinear
