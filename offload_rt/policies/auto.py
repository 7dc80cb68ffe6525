"""Policy "auto": "infinigen" that selects only where that is cheaper than attending to everything.

On a CPU a layer that selects works for about as long as it reads `WORTH_SELECTING` bytes of rows, whatever the context:
scores, a threshold, gathers, a second softmax. A layer whose rows are fewer attends to them all. This depends on shapes
and dtype alone: the same model gives the same text on every CPU, whatever else it has to do.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..core import ModelGeometry
from ..skewing.artifact import SkewArtifact
from .infinigen.policy import InfiniGen
from .options import AutoOptions

WORTH_SELECTING = 4 << 20
"""Bytes of a layer's rows of one sequence from which selecting is faster on a CPU, measured in bfloat16 on one thread,
with the tail: steps of SmolLM2's shape take as long either way at 5,600 tokens, of Qwen2.5-0.5B's at 6,900, 4.1 and 3.4
MiB of rows a layer; of an 8B Llama's below 2,000, where 4 MiB are 1,024."""


def dense_until(options: AutoOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype) -> int:
    """Tokens up to which a context is attended to as a whole."""
    if options.dense_until is not None:
        return options.dense_until
    return WORTH_SELECTING * geometry.layers // geometry.kv_bytes(1, dtype) if device.type == "cpu" else 0


class Auto(InfiniGen):
    """The policy for one model, with the context from which it selects. Scoring keys and low-bit rows are kept from the
    first token on: they are complete when it begins to."""

    name = "auto"

    def __init__(
        self,
        options: AutoOptions,
        geometry: ModelGeometry,
        artifact: SkewArtifact,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keys_on_host: bool = False,
    ) -> None:
        """As `InfiniGen`."""
        self.dense_until = dense_until(options, geometry, device, dtype)
        settled = replace(options, dense_until=self.dense_until)
        super().__init__(settled, geometry, artifact, device, dtype, keys_on_host=keys_on_host)
