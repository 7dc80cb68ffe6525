"""Policy "auto": "infinigen" with full attention for contexts in which token selection would be slower.

On a CPU, the speed of exact attention is limited by the memory bandwidth for reading KV. Selection reads a quarter of
the bytes, but computes scores and approximate attention for every token. A layer with at most `WORTH_SELECTING` bytes
of KV therefore attends to all tokens. The decision depends only on shapes and dtype, so the generated text does not
depend on the CPU or its load.
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

With KV in host memory on an AMD EPYC, selection was slower than full attention at every measured length, up to 24 MiB
of KV per layer (`eval/results/cpu/threads`). On an Intel Xeon, it was faster at 8,000 tokens of SmolLM2
(`eval/results/cpu/intel`). For Qwen2.5-0.5B, extrapolation gives equal times near 25 MiB. For SmolLM2, the time
difference does not shrink with length. The value is finite because a KV cache on disk is read far more slowly.
"""


def dense_until(options: AutoOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype) -> int:
    """Return the longest context, in tokens, for which every layer attends to all tokens."""
    if options.dense_until is not None:
        return options.dense_until
    return WORTH_SELECTING * geometry.layers // geometry.kv_bytes(1, dtype) if device.type == "cpu" else 0


class Auto(InfiniGen):
    """InfiniGen with full attention for contexts of up to `dense_until` tokens.

    Scoring keys and approximate KV are stored from the first token on, so that they are complete when selection starts.
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
