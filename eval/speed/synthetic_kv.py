"""Create the KV of a long context without a prefill. A fixed fraction of the tokens receives nearly all attention.

If weights are random, attention is uniform and every threshold selects all tokens. Therefore, some tokens are
*planted*. A constant vector `c` is added to all queries of a KV head. The keys of planted tokens are shifted along `c`
by `HEIGHT / (scale |c|)`. Apart from this, keys are noise. Every query then scores planted tokens higher than other
tokens by `HEIGHT`. The scores of planted tokens differ from each other by less than one nat.

Planted tokens are drawn separately for each layer and KV head. The heads have different numbers of planted tokens,
because InfiniGen selects the mean number in every head. If the numbers were equal, planted tokens would never have to
be ranked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...core import KVPart, ModelGeometry
from ...models.adapter import ForwardingAdapter, ModelAdapter
from ...skewing.artifact import SkewArtifact
from ...skewing.prediction import Correction

HEIGHT = 40.0
"""Difference between the scaled scores of planted tokens and other tokens. It is large enough even for int2 keys."""

NOISE = 0.1
"""Standard deviation of the elements of a key."""

SEED = 0

CPU = torch.device("cpu")

RESIDENT = (4, 64)
"""Numbers of tokens at the start and at the end that are never planted.

They equal the default sinks and recent window.
"""


@dataclass(frozen=True, eq=False)
class SyntheticKV:
    geometry: ModelGeometry
    length: int
    fraction: float  # fraction of planted tokens, mean over the KV heads of a layer
    directions: torch.Tensor  # `c` of each KV head, float32 `[L, Hkv, d]`
    tokens: list[list[torch.Tensor]]  # sorted indices of planted tokens, int64 `[n]`, by layer and KV head

    @classmethod
    def draw(cls, geometry: ModelGeometry, length: int, fraction: float, spread: float = 0.0) -> SyntheticKV:
        """Draw directions and planted tokens for a context of `length` tokens. No layer may have a sliding window.

        The number of planted tokens of a KV head differs from the mean by at most `spread`, relative to the mean.
        """
        assert not geometry.sliding, "planted tokens outside a sliding window would get no attention"
        generator = torch.Generator().manual_seed(SEED)
        layers, kv_heads, d = geometry.layers, geometry.kv_heads, geometry.head_dim
        directions = torch.randn(layers, kv_heads, d, generator=generator)
        sizes = torch.tensor([2.0 / scale for scale in geometry.scales]).view(-1, 1, 1)
        directions *= sizes / directions.norm(dim=-1, keepdim=True)
        first, last = RESIDENT
        room = length - first - last
        assert room > 0, f"a context of {length} tokens has no place to plant"
        n = max(1, round(fraction * room))
        counts = _counts(n, kv_heads, spread)
        tokens = []
        for _ in range(layers):
            mixed = [counts[i] for i in torch.randperm(kv_heads, generator=generator).tolist()]
            drawn = [torch.randperm(room, generator=generator)[:count] for count in mixed]
            tokens.append([first + chosen.sort().values for chosen in drawn])
        return cls(geometry, length, fraction, directions, tokens)

    def layers(self, device: torch.device = CPU) -> Iterator[KVPart]:
        """Yield K and V of each layer, float32 `[Hkv, N, d]`. All calls yield the same values on the same device."""
        geometry = self.geometry
        shape = (geometry.kv_heads, self.length, geometry.head_dim)
        for layer in range(geometry.layers):
            generator = torch.Generator(device).manual_seed(SEED + 1 + layer)
            k = torch.randn(shape, generator=generator, device=device).mul_(NOISE)
            v = torch.randn(shape, generator=generator, device=device)
            for head, tokens in enumerate(self.tokens[layer]):
                k[head, tokens.to(device)] += self.directions[layer, head].to(device) * self._along(layer)
            yield KVPart(k, v)

    def _along(self, layer: int) -> float:
        """Return the factor f by which `c` is multiplied in planted keys, so that HEIGHT = scale * f * |c|^2."""
        return HEIGHT / (self.geometry.scales[layer] * float(self.directions[layer, 0].square().sum()))

    def artifact(self) -> SkewArtifact:
        """Return the skew artifact that a calibration on these keys would produce.

        The first column of the basis is `c / |c|`, and the other columns span the rest of the space.
        """
        generator = torch.Generator().manual_seed(SEED)
        layers, kv_heads, d = self.directions.shape
        columns = torch.randn(layers, kv_heads, d, d, generator=generator)
        columns[..., 0] = self.directions
        basis = torch.linalg.qr(columns).Q
        first = (basis[..., 0] * self.directions).sum(-1).sign()
        basis[..., 0] *= first.unsqueeze(-1)
        mean, std = torch.zeros(layers, kv_heads, d), torch.full((layers, kv_heads, d), NOISE)
        for layer in range(layers):
            height = self._along(layer) * float(self.directions[layer, 0].norm())
            for head, tokens in enumerate(self.tokens[layer]):
                share = len(tokens) / self.length
                mean[layer, head, 0] = share * height
                std[layer, head, 0] = math.hypot(NOISE, height * math.sqrt(share * (1 - share)))
        right = Correction.none(layers)
        return SkewArtifact(
            "svd", basis, basis, mean, std, right.slope, right.offset, fingerprint="planted", calibration="planted keys"
        )


def _counts(n: int, heads: int, spread: float) -> list[int]:
    """Return one count per head.

    The counts are evenly spaced from `(1 - spread) n` to `(1 + spread) n` and add up to `heads * n`.
    """
    steps = [2 * i / (heads - 1) - 1 if heads > 1 else 0.0 for i in range(heads)]
    counts = [max(1, round(n * (1 + spread * step))) for step in steps]
    counts[-1] += heads * n - sum(counts)
    return counts


class SyntheticAdapter(ForwardingAdapter):
    """Model adapter that adds to every query the constant vector `c` of its KV head (see the module docstring)."""

    def __init__(self, inner: ModelAdapter, synthetic: SyntheticKV) -> None:
        super().__init__(inner)
        group = inner.geometry.group
        added = synthetic.directions.repeat_interleave(group, dim=1).unsqueeze(2)
        self._added = list(added.to(inner.device, inner.dtype))  # `[H, 1, d]` of each layer

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().qkv(layer, attention_input, positions)
        return q.add(self._added[layer]), k, v

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().query(layer, attention_input, positions).add(self._added[layer])
