"""The order of a matrix' numbers in memory, for products with one or a few tokens on a CPU."""

from __future__ import annotations

import torch
from torch import nn


def order_by_columns(model: nn.Module) -> None:
    """Stores the weight `[out, in]` of every float32 linear layer with out >= in column by column; names, shapes and
    values stay as they are.

    A decode step is bound by reading weights, and the CPU's matrix-vector product reads such a matrix faster by
    columns, a small one above all; long prompts are equally fast. Matrices with out < in are faster as they are, half
    precision goes another way, and a matrix that is also an embedding is read by rows. Packed
    ones stay as they are. One matrix at a time is held twice.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter or id(module.weight) in embeddings:
            continue
        if module.weight.dtype == torch.float32 and module.out_features >= module.in_features:
            module.weight.data = module.weight.data.t().contiguous().t()
