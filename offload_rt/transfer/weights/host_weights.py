"""All weights of a model that stay in host memory, and their transfer counters."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.weights import HostEmbedding
from .experts import ExpertCache
from .streamed import WeightStream


@dataclass(frozen=True)
class WeightUse:
    """Transfer counters of offloaded weights."""

    bytes: int = 0  # size in bytes of the weights copied to the device: streamed layers, experts and embedding rows
    chosen: int = 0  # number of experts that routers have chosen, summed over layers and steps
    found: int = 0  # number of chosen experts that were already on the device

    def since(self, before: WeightUse) -> WeightUse:
        return WeightUse(self.bytes - before.bytes, self.chosen - before.chosen, self.found - before.found)

    def __add__(self, other: WeightUse) -> WeightUse:
        return WeightUse(self.bytes + other.bytes, self.chosen + other.chosen, self.found + other.found)


NOTHING_USED = WeightUse()


@dataclass(frozen=True)
class HostWeights:
    """Weights in host memory: streamed layers, experts, and the embedding. Each of these is optional."""

    stream: WeightStream | None = None
    experts: tuple[ExpertCache, ...] = ()
    embedding: HostEmbedding | None = None

    @property
    def use(self) -> WeightUse:
        copied = sum(part.bytes for part in self._parts)
        return WeightUse(copied, sum(e.chosen for e in self.experts), sum(e.found for e in self.experts))

    @property
    def host_bytes(self) -> int:
        """Size in bytes of the weights in host memory, excluding alignment padding."""
        return sum(part.host_bytes for part in self._parts)

    @property
    def device_bytes(self) -> int:
        return sum(part.device_bytes for part in self._parts)

    @property
    def _parts(self) -> list[WeightStream | HostEmbedding | ExpertCache]:
        return [part for part in (self.stream, self.embedding, *self.experts) if part is not None]

    def check_integrity(self) -> None:
        if self.stream is not None:
            self.stream.check_integrity()
        for experts in self.experts:
            experts.check_integrity()
