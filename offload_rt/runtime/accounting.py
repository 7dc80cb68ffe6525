"""What a sequence cost, put together from its trace and from what model, pool and link hold."""

from __future__ import annotations

import torch

from ..config import EngineConfig
from ..models.registry import LoadedModel
from ..pool.pool import HostPool
from ..select.base import Policy
from ..transfer.link import Link
from ..transfer.weights import WeightStream
from .metrics import Fractions, Stats, layer_means
from .sequence import Sequence


class Accounting:
    """Reads, never changes, what one runner's parts hold."""

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        pool: HostPool,
        link: Link,
        config: EngineConfig,
        weights: WeightStream | None,
    ) -> None:
        self._model, self._policy, self._pool, self._link, self._config = model, policy, pool, link, config
        self._weights = weights

    @property
    def weights_crossed(self) -> int:
        """Bytes of weights that have crossed the link so far."""
        return 0 if self._weights is None else self._weights.bytes

    @property
    def weights_on_device(self) -> int:
        """Bytes of weights on the device, and of the buffers for the others."""
        if self._weights is None:
            return self._model.weight_bytes
        return self._model.weight_bytes - self._weights.numbers + self._weights.device_bytes

    def peak_device_bytes(self, scoring: int) -> int:
        """The device's peak where it counts; else what is held now, `scoring` bytes of all sequences' scoring keys."""
        device = self._model.adapter.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return self.weights_on_device + self._link.device_bytes + scoring

    def stats(self, sequence: Sequence, peak_device_bytes: int) -> Stats:
        """What the sequence cost so far."""
        trace, adapter, dense = sequence.trace, self._model.adapter, self._policy.dense_layers
        trace.settle()
        shares = Fractions.of(trace, dense)
        missed, worst = layer_means(trace, dense)
        return Stats(
            model=self._model.name,
            policy=self._policy.name,
            device=str(adapter.device),
            dtype=str(adapter.dtype).removeprefix("torch."),
            prompt_tokens=trace.prompt_tokens,
            reused_tokens=trace.reused_tokens,
            new_tokens=len(sequence.tokens) - trace.prompt_tokens,
            prefill_seconds=trace.prefill_seconds,
            decode_seconds=trace.decode_seconds,
            link_bytes_to_device=trace.bytes_to_device,
            link_bytes_to_host=trace.bytes_to_host,
            link_bytes_weights=trace.weight_bytes,
            kv_bytes_host=len(sequence.lease.chunks) * self._pool.chunk_bytes,
            kv_bytes_device=self._link.device_bytes,
            scoring_bytes_device=sequence.state.device_bytes,
            scoring_bytes_host=sequence.state.host_bytes,
            weight_bytes=self._model.weight_bytes,
            weight_bytes_device=self.weights_on_device,
            peak_device_bytes=peak_device_bytes,
            link_fraction=shares.link,
            attended_fraction=shares.attended,
            sparse_link_fraction=shares.sparse_link,
            sparse_attended_fraction=shares.sparse_attended,
            dense_layers=tuple(sorted(dense)),
            layers=adapter.geometry.layers,
            missed_mass=missed,
            missed_mass_worst_layer=worst,
            working_set_rows=self._config.working_set,
            working_set_bytes=self._link.working_set_bytes(sequence.lease),
            working_set_hit_rate=trace.hit_rate if self._config.working_set else None,
            attended_by_step=trace.attended,
            missed_by_step=trace.missed,
        )
