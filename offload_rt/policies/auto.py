"""Policy "auto": "infinigen", but with full attention in short contexts, where selection does not pay off.

On a CPU, the engine measures up to which context length full attention is as fast as selection. It does this once per
processor (`engine.selection_cost`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch

from ..core import ModelGeometry
from ..skewing.artifact import SkewArtifact
from .infinigen.policy import InfiniGen
from .options import AutoOptions
from .registry import PolicyContext

MAX_DENSE_BYTES = 64 << 20
"""Maximum KV size for full attention on a CPU, in bytes per layer and sequence. Above it, tokens are always selected.

With KV in the host memory of an AMD EPYC, selection was slower than full attention at all measured lengths, up to
24 MiB of KV per layer (`eval/results/cpu/threads`). There is a limit because a KV cache on disk is read far more
slowly.
"""


def dense_limit(options: AutoOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype) -> int:
    """Return the maximum of `Auto.dense_until` in tokens: the option if it is set, or else the device's default."""
    if options.dense_until is not None:
        return options.dense_until
    return MAX_DENSE_BYTES // geometry.full_rows.bytes(dtype) if device.type == "cpu" else 0


class Auto(InfiniGen):
    """InfiniGen with full attention for contexts of up to `dense_until` tokens.

    Scoring keys and approximate KV are stored from the first token on, because a later selection needs them for all
    tokens.
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
        measured: int | None = None,
    ) -> None:
        """Create the policy like `InfiniGen`. Unless `measured` is None, `dense_until` is at most `measured` tokens."""
        limit = dense_limit(options, geometry, device, dtype)
        # The KV provenance key depends on the limit and not on the measured value, so that KV that was stored on one
        # processor can be used on another.
        resolved_options = replace(options, dense_until=limit)
        super().__init__(resolved_options, geometry, artifact, device, dtype, keys_on_host=keys_on_host)
        self.dense_until = limit if measured is None else min(limit, measured)

    @classmethod
    def build(cls, options: AutoOptions, context: PolicyContext) -> Self:  # type: ignore[override]
        artifact, is_set = context.artifact(options.skew), options.dense_until is not None
        measured = None if is_set or context.measure is None else context.measure(options)
        return cls(
            options, context.geometry, artifact, context.device, context.dtype, keys_on_host=context.keys_on_host,
            measured=measured,
        )  # fmt: skip
