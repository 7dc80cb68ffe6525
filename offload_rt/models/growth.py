"""Scale queries by their position, so that attention over long texts stays as sharp as over short ones.

Each query is multiplied by 1 + rate log(1 + floor((position + first) / step)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Growth:
    """Position-dependent query scaling of one layer."""

    rate: float
    step: float
    first: int

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the float32 factors `[T]` for positions `[T]`."""
        return 1 + self.rate * torch.log1p(torch.floor((positions.float() + self.first) / self.step))


def growth_of(attention: Any, config: Any) -> Growth | None:
    """Return the query scaling of a layer, or None if its queries are not scaled.

    Llama 4 scales only in layers without rotary positions, Ministral 3 in all layers.
    """
    if getattr(config, "attn_temperature_tuning", False):
        return None if attention.use_rope else Growth(float(attention.attn_scale), float(attention.floor_scale), 1)
    rate = config.rope_parameters.get("llama_4_scaling_beta")
    return (
        None
        if rate is None
        else Growth(float(rate), float(config.rope_parameters["original_max_position_embeddings"]), 0)
    )
