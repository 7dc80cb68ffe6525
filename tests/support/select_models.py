"""Model shapes, artifacts, and random queries and keys for policy tests."""

from __future__ import annotations

import torch

from offload_rt.core import ModelGeometry
from offload_rt.policies.base import PolicyState
from offload_rt.skewing.artifact import SkewArtifact
from offload_rt.skewing.prediction import Correction

CPU = torch.device("cpu")


def geometry(*, layers: int = 2, kv_heads: int = 2, group: int = 1, head_dim: int = 16) -> ModelGeometry:
    return ModelGeometry(
        layers=layers,
        hidden=kv_heads * group * head_dim,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=64,
        # Different scales, so that tests notice if a layer uses another layer's scale.
        scales=tuple(head_dim**-0.5 * (1 + 0.25 * layer) for layer in range(layers)),
        windows=(None,) * layers,
        max_positions=4096,
        absolute_positions=False,
        default_alpha=5.0,
    )


def artifact(shape: ModelGeometry, seed: int = 0) -> SkewArtifact:
    """Create an artifact. Queries and keys have the same random orthogonal bases, and all scales are 1."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim)
    basis = torch.linalg.qr(torch.randn(size, generator=generator, dtype=torch.float64))[0].float()
    mean = torch.randn(size[:3], generator=generator) * 0.1
    correction = Correction.none(shape.layers)
    made_from = "0" * 16, f"random {seed}"
    return SkewArtifact(
        "svd", basis, basis, mean, torch.ones(size[:3]), correction.slope, correction.offset, *made_from
    )


def dequantise(codes: torch.Tensor, mean: torch.Tensor, step: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values `[Hkv, m, d]` of the codes of `quantise`, in the dtype of `mean`."""
    return (codes.to(mean.dtype) - ((1 << bits) - 1) / 2) * step.unsqueeze(1) + mean.unsqueeze(1)


def tokens(shape: ModelGeometry, count: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries `[L, H, count, d]` and keys `[L, Hkv, count, d]` (float64) with widely spread scores."""
    generator = torch.Generator().manual_seed(seed)
    d = shape.head_dim
    q = torch.randn(shape.layers, shape.heads, count, d, generator=generator, dtype=torch.float64) * 2
    k = torch.randn(shape.layers, shape.kv_heads, count, d, generator=generator, dtype=torch.float64)
    return q, k


def pass_keys(state: PolicyState, layer: int, k: torch.Tensor, start: int) -> None:
    state.on_kv(layer, k, torch.zeros_like(k), start)


def no_keys(layer: int, wanted: range) -> torch.Tensor:
    raise AssertionError("this policy reads no full keys")


def as_sets(selected: torch.Tensor) -> list[set[int]]:
    """Return each head's selection as a set. Fail if a head selects a token twice."""
    rows = [set(row) for row in selected.tolist()]
    assert all(len(row) == selected.shape[1] for row in rows), "a token was selected twice"
    return rows
