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
"""On a CPU, a layer with at most this many bytes of KV per sequence attends to all tokens.

Selection was slower at every measured length, up to 24 MiB per layer (`eval/results/cpu/threads`). For Qwen2.5-0.5B the
two times would meet near 25 MiB. For SmolLM2 the gap does not shrink. A limit is still needed for a KV cache on disk,
which is read far more slowly.
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
        """Create the policy. See `InfiniGen` for the arguments."""
        self.dense_until = dense_until(options, geometry, device, dtype)
        settled = replace(options, dense_until=self.dense_until)
        super().__init__(settled, geometry, artifact, device, dtype, keys_on_host=keys_on_host)
