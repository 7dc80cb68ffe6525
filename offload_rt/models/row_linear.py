"""Fast linear layers on a CPU, for few input rows and for bfloat16 without native instructions."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import row_products, team

TILE_BYTES = 1 << 22
"""Maximum size of a weight tile in bytes of float32. bfloat16 weights are converted tile by tile."""


class RowLinear(nn.Linear):
    """`nn.Linear` that computes up to `MOST_ROWS` input rows with `kernels.row_products`.

    There, each row is summed separately, so its result does not depend on the number of rows. Larger inputs use torch,
    with tiles of the weight distributed over threads.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `[..., in]`. Return `[..., out]`."""
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype or not input.numel():
            return super().forward(input)
        if input.numel() > row_products.MOST_ROWS * self.in_features:
            return self._by_parts(input)
        code = row_products.takes(self.weight)
        return super().forward(input) if code is None else code.linear(input, self.weight, self.bias)

    def _by_parts(self, input: torch.Tensor) -> torch.Tensor:
        # torch multiplies bfloat16 slowly without native instructions, so tiles of the weight are converted to float32.
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
    """Convert every plain linear layer with a supported weight to `RowLinear`, in place."""
    for module in model.modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            continue
        if row_products.takes(module.weight) is not None:
            module.__class__ = RowLinear
