"""All that brings weights from host memory, counted together."""

from __future__ import annotations

from dataclasses import dataclass

from ...models.host_embedding import HostEmbedding
from .experts import ExpertCache
from .streamed import WeightStream


@dataclass(frozen=True)
class WeightUse:
    """bytes: of weights that crossed the link, in layers, experts or rows of an embedding. chosen, found: experts that
    layers of steps chose, and how many of these were on the device."""

    bytes: int = 0
    chosen: int = 0
    found: int = 0

    def since(self, before: WeightUse) -> WeightUse:
        """What was added after `before`."""
        return WeightUse(self.bytes - before.bytes, self.chosen - before.chosen, self.found - before.found)

    def __add__(self, other: WeightUse) -> WeightUse:
        return WeightUse(self.bytes + other.bytes, self.chosen + other.chosen, self.found + other.found)


NOTHING_USED = WeightUse()


@dataclass(frozen=True)
class HostWeights:
    """What streams layers, has experts, or looks up the embedding; each may be missing."""

    stream: WeightStream | None = None
    experts: tuple[ExpertCache, ...] = ()
    embedding: HostEmbedding | None = None

    @property
    def use(self) -> WeightUse:
        """What has crossed so far."""
        crossed = sum(part.bytes for part in (*self._single, *self.experts))
        return WeightUse(crossed, sum(e.chosen for e in self.experts), sum(e.found for e in self.experts))

    @property
    def numbers(self) -> int:
        """Bytes of the weights themselves that are in host memory."""
        layers = 0 if self.stream is None else self.stream.numbers
        rows = 0 if self.embedding is None else self.embedding.host_bytes
        return layers + rows + sum(experts.host_bytes for experts in self.experts)

    @property
    def device_bytes(self) -> int:
        """What they have on the device: buffers and slots."""
        buffers = 0 if self.stream is None else self.stream.device_bytes
        return buffers + sum(experts.device_bytes for experts in self.experts)

    @property
    def _single(self) -> list[WeightStream | HostEmbedding]:
        return [part for part in (self.stream, self.embedding) if part is not None]

    def check_integrity(self) -> None:
        """Asserts that what is on the device is what it should be."""
        if self.stream is not None:
            self.stream.check_integrity()
        for experts in self.experts:
            experts.check_integrity()
