"""Look up some columns of embeddings in torch: the reference implementation of `triton_embedding`."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding_part(part: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows `ids` `[T]` of `part` `[V, P]`, on the device of `ids`.

    `part` contains some columns of an embedding table and may be in host memory.
    """
    return F.embedding(ids.to(part.device), part).to(ids.device)
