"""Linear layers that read their weights faster where they have few rows to multiply, on a CPU."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels import row_products
from .column_order import order_by_columns


def suit_cpu(model: nn.Module) -> None:
    """Makes a model that we loaded ourselves read its weights as fast as a CPU can: float32 ones in another order,
    bfloat16 ones by other code."""
    order_by_columns(model)
    read_by_rows(model)


class RowLinear(nn.Linear):
    """`nn.Linear` in bfloat16 whose products with a few rows are `kernels.row_products`'. Each row is summed alone, so
    that how many come together changes nothing, up to `MOST_ROWS`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`."""
        few = input.dtype == torch.bfloat16 and 0 < input.numel() <= row_products.MOST_ROWS * self.in_features
        library = row_products.takes(self.weight) if few and not torch.is_grad_enabled() else None
        if library is None:
            return super().forward(input)
        return row_products.linear(library, input, self.weight, self.bias)


def read_by_rows(model: nn.Module) -> None:
    """Makes a `RowLinear` of every linear layer whose weight can be read so; names, values and shapes stay as they are,
    and packed layers what they are."""
    for module in model.modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            continue
        if module.weight.is_contiguous() and row_products.takes(module.weight) is not None:
            module.__class__ = RowLinear
