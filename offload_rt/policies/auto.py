"""Policy "auto": "infinigen" that selects only if that is cheaper than attending to all tokens.

On a CPU, selecting (scores, threshold, gathers, a second softmax) takes about as long as reading `WORTH_SELECTING`
bytes of KV, independent of the context length. A layer with less KV attends to all of it. The decision depends on
shapes and dtype alone, so that a model gives the same text on every CPU under any load.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..core import ModelGeometry
from ..skewing.artifact import SkewArtifact
from .infinigen.policy import InfiniGen
from .options import AutoOptions

WORTH_SELECTING = 4 << 20
"""Bytes of KV per layer and sequence from which selecting is faster on a CPU.

Measured in bfloat16 on one thread, with approximate KV. Both ways take equally long at 5,600 tokens (4.1 MiB per
layer) for SmolLM2's shape, at 6,900 tokens (3.4 MiB) for Qwen2.5-0.5B's, and below 2,000 tokens for an 8B Llama's,
where 4 MiB are 1,024 tokens.
"""


def dense_until(options: AutoOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype) -> int:
    """Return the longest context, in tokens, up to which every layer is dense."""
    if options.dense_until is not None:
        return options.dense_until
    return WORTH_SELECTING * geometry.layers // geometry.kv_bytes(1, dtype) if device.type == "cpu" else 0


class Auto(InfiniGen):
    """InfiniGen that attends to all tokens of contexts up to `dense_until`.

    Scoring keys and approximate KV are kept from the first token on, so that they are complete when selection starts.
    """

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
        """Takes the arguments of `InfiniGen`."""
        self.dense_until = dense_until(options, geometry, device, dtype)
        settled = replace(options, dense_until=self.dense_until)
        super().__init__(settled, geometry, artifact, device, dtype, keys_on_host=keys_on_host)
