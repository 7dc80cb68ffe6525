"""A long context without a prefill: random keys and values in which a stated share of tokens attracts every query.

Random weights spread attention evenly, so that every threshold passes every token. Here a constant vector `c` is added
to all queries of a KV head (one small addition a layer), keys are noise, and planted keys have `HEIGHT / |c|` along `c`
besides: whatever the query, planted tokens score `HEIGHT` above the others, and within a nat of each other. Planted
tokens are drawn for each layer and KV head on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core import KVPart, ModelGeometry, Selection, Visible
from ..models.adapter import ModelAdapter
from ..select.base import KeyReader, Moment
from ..select.passive import PassiveState
from ..skewing.artifact import SkewArtifact

HEIGHT = 40.0
"""Score, scale included, that planted tokens have above the others: also int2 keys keep them apart."""

NOISE = 0.1
"""Standard deviation of every number of a key."""

RESIDENT = (4, 64)
"""First and last tokens of the context that are never planted: the default preset's sinks and window."""


@dataclass(frozen=True, eq=False)
class Planted:
    """directions: float32 `[L, Hkv, d]`, `c` of each KV head. tokens: int64 `[L, Hkv, n]`, planted token indices,
    rising. length: tokens of the context. fraction: n over the tokens that could be planted."""

    geometry: ModelGeometry
    length: int
    fraction: float
    seed: int
    directions: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def draw(cls, geometry: ModelGeometry, length: int, fraction: float, seed: int = 0) -> Planted:
        """Draws directions and planted tokens for a context of `length` tokens."""
        generator = torch.Generator().manual_seed(seed)
        layers, kv_heads, d = geometry.layers, geometry.kv_heads, geometry.head_dim
        directions = torch.randn(layers, kv_heads, d, generator=generator)
        sizes = torch.tensor([2.0 / scale for scale in geometry.scales]).view(-1, 1, 1)
        directions *= sizes / directions.norm(dim=-1, keepdim=True)
        first, last = RESIDENT
        room = length - first - last
        assert room > 0, f"a context of {length} tokens has no place to plant"
        n = max(1, round(fraction * room))
        drawn = [torch.randperm(room, generator=generator)[:n].sort().values for _ in range(layers * kv_heads)]
        tokens = torch.stack(drawn).view(layers, kv_heads, n) + first
        return cls(geometry, length, fraction, seed, directions, tokens)

    def layers(self) -> Iterator[KVPart]:
        """K and V `[Hkv, N, d]` of each layer in turn, float32, on the CPU; the same at every call."""
        geometry = self.geometry
        shape = (geometry.kv_heads, self.length, geometry.head_dim)
        for layer in range(geometry.layers):
            generator = torch.Generator().manual_seed(self.seed + 1 + layer)
            k = torch.randn(shape, generator=generator).mul_(NOISE)
            v = torch.randn(shape, generator=generator)
            for head, tokens in enumerate(self.tokens[layer]):
                k[head, tokens] += self.directions[layer, head] * self._along(layer)
            yield KVPart(k, v)

    def _along(self, layer: int) -> float:
        """What a planted key has of `c`: HEIGHT = scale * along * |c|^2."""
        return HEIGHT / (self.geometry.scales[layer] * float(self.directions[layer, 0].square().sum()))

    def artifact(self) -> SkewArtifact:
        """The skewing that a calibration on such keys would find: `c` is the first column, the others share the rest,
        and means and deviations are those of the planted keys."""
        generator = torch.Generator().manual_seed(self.seed)
        layers, kv_heads, d = self.directions.shape
        columns = torch.randn(layers, kv_heads, d, d, generator=generator)
        columns[..., 0] = self.directions
        basis = torch.linalg.qr(columns).Q
        first = (basis[..., 0] * self.directions).sum(-1).sign()
        basis[..., 0] *= first.unsqueeze(-1)
        share = self.tokens.shape[2] / self.length
        mean, std = torch.zeros(layers, kv_heads, d), torch.full((layers, kv_heads, d), NOISE)
        for layer in range(layers):
            height = self._along(layer) * float(self.directions[layer, 0].norm())
            mean[layer, :, 0] = share * height
            std[layer, :, 0] = math.hypot(NOISE, height * math.sqrt(share * (1 - share)))
        return SkewArtifact("svd", basis, basis, mean, std, fingerprint="planted", calibration="planted keys")


class PlantedAdapter:
    """A model's adapter whose queries have `c` added; everything else is the model's own."""

    def __init__(self, inner: ModelAdapter, planted: Planted) -> None:
        self._inner = inner
        group = inner.geometry.group
        added = planted.directions.repeat_interleave(group, dim=1).unsqueeze(2)
        self._added = list(added.to(inner.device, inner.dtype))  # of each layer `[H, 1, d]`

    @property
    def geometry(self) -> ModelGeometry:
        """The model's."""
        return self._inner.geometry

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._inner.dtype

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self._inner.device

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, D]`."""
        return self._inner.embed(tokens, positions)

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, D]`."""
        return self._inner.attention_input(layer, hidden)

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The model's k and v `[Hkv, T, d]`; its q `[H, T, d]` with `c` added."""
        q, k, v = self._inner.qkv(layer, attention_input, positions)
        return q.add(self._added[layer]), k, v

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's q `[H, T, d]` with `c` added."""
        return self._inner.query(layer, attention_input, positions).add(self._added[layer])

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's, each `[Hkv, T, d]`."""
        return self._inner.key_value(layer, attention_input, positions)

    def turned(self, k: torch.Tensor, offset: int) -> torch.Tensor:
        """As the model's."""
        return self._inner.turned(k, offset)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, D]`."""
        return self._inner.after_attention(layer, hidden, attended)

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, D]`."""
        return self._inner.mlp(layer, residual)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, V]`."""
        return self._inner.logits(hidden)


class GivenState(PassiveState):
    """Selects what it is told."""

    def __init__(self, given: list[Selection]) -> None:
        self._given = given

    def select(self, layer: int, q: torch.Tensor, visible: Visible) -> Selection:
        """The planted tokens of the layer, for nothing."""
        return self._given[layer]

    def fork(self, keys: KeyReader) -> GivenState:
        """Immutable, so the same."""
        return self


class Given:
    """The policy "ideal": the planted tokens without scoring anything. What selection costs is the distance to it."""

    name = "ideal"
    moment: Moment = "attention_input"
    sinks, recent = RESIDENT
    wants_weights = False
    wants_queries = False
    evictable = False
    lineage = "ideal"

    def __init__(self, planted: Planted, device: torch.device, dense_layers: tuple[int, ...] = ()) -> None:
        self.dense_layers = frozenset(dense_layers)
        self._state = GivenState([Selection(tokens.to(device)) for tokens in planted.tokens])

    def new_state(self, keys: KeyReader) -> GivenState:
        """All sequences share the one list."""
        return self._state
