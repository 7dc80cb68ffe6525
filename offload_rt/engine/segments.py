"""How many tokens of a prompt go through the layers together, where its rows lie on disk."""

from __future__ import annotations

import torch

from ..core import ModelGeometry

SEGMENT_BYTES = {"cpu": 32 << 20, "device": 512 << 20}
"""Of hidden states, queries and outputs of a segment: more is fewer passes over what is there already, and memory."""


def segment_tokens(geometry: ModelGeometry, dtype: torch.dtype, device: torch.device, slice_tokens: int) -> int:
    """Whole slices of a prompt beyond memory, whose hidden states, queries and outputs would not fit either."""
    token = geometry.hidden * dtype.itemsize + geometry.heads * geometry.head_dim * (dtype.itemsize + 4)
    most = SEGMENT_BYTES["cpu" if device.type == "cpu" else "device"] // token
    return max(1, most // slice_tokens) * slice_tokens
