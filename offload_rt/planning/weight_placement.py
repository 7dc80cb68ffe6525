"""Placement of experts and the embedding in host memory, as configured or to meet a device memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..config import EngineConfig
from ..errors import ConfigError
from ..models.shape import ModelShape
from ..models.weights import Placement


def requested_placement(config: EngineConfig, shape: ModelShape) -> Placement:
    """Return the placement requested by `config`. Raise ConfigError if the model has no such weights."""
    sizes, slots = shape.sizes, config.experts_on_device
    if slots is not None and sizes.experts is None:
        packed = f" that can be told apart: its weights are packed ({shape.packing})" if shape.packing else ""
        raise ConfigError(f"experts_on_device={slots}, but this model has no mixture of experts{packed}; leave it out")
    if config.embedding_on_host and not sizes.embedding:
        raise ConfigError(
            "embedding_on_host, but this model's head is its embedding (tied), and every token reads all of it on the "
            "device: leave it out"
        )
    kept = None if slots is None or sizes.experts is None or slots >= sizes.experts.count else slots
    return Placement(experts=kept, embedding=config.embedding_on_host)


def placements(config: EngineConfig, shape: ModelShape) -> Iterator[Placement]:
    """Yield the placements to try under a limit, starting with the most weights on the device.

    Raises ConfigError as `requested_placement` does.
    """
    asked, experts = requested_placement(config, shape), shape.sizes.experts
    yield asked
    if config.experts_on_device is None and experts is not None:
        for slots in range(experts.count - 1, 0, -1):
            yield replace(asked, experts=slots)
