"""Policy "auto": "infinigen" that selects only if that is cheaper than attending to all tokens.

On a CPU, exact attention reads KV at the speed of memory. Selection reads a quarter of the bytes, but computes scores
and approximate attention for every token. A layer with at most `WORTH_SELECTING` bytes of KV attends to all of it. The
decision depends on shapes and dtype alone, so that a model gives the same text on every CPU under any load.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..core import ModelGeometry
from ..skewing.artifact import SkewArtifact
from .infinigen.policy import InfiniGen
from .options import AutoOptions

WORTH_SELECTING = 64 << 20
"""Bytes of KV per layer and sequence up to which every token is attended to on a CPU.

Selecting was slower at every length that was measured, up to 24 MiB per layer (eval/results/cpu/threads: SmolLM2 at
6,000 to 32,000 tokens, Qwen2.5-0.5B at 6,000 to 16,000). From Qwen's times, both ways would take equally long near
25 MiB; those of SmolLM2 do not approach each other. A limit remains because a KV cache on disk is read at a far lower
speed.
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
