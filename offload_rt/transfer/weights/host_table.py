"""Page-locking of the `LayerEmbeddings` table, so that device kernels can read the rows of a step's tokens in place."""

from __future__ import annotations

import torch

from ...kv_cache.arena import page_lock, reserve
from ...models.weights import HostTable


def lock_table(table: HostTable) -> None:
    """Move a table to page-locked host memory, which is released when the table is deleted. Raises MemoryLimitError."""
    [weight] = table.parameters()
    # Memory-mapped files cannot be page-locked.
    memory = torch.frombuffer(reserve(weight.nbytes, "the embeddings of each token in every layer"), dtype=torch.uint8)
    page_lock(memory, table)
    weight.data = memory.view(weight.dtype).view(weight.shape).copy_(weight.data)
    table.in_place = True
