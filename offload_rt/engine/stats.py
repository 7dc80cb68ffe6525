"""Collect the statistics of a sequence from its trace, the model, the KV cache and the transfers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import EngineConfig
from ..kv_cache.disk.file_arena import DiskUse
from ..kv_cache.pool import HostPool
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Trace
from ..models.loading import LoadedModel
from ..outputs import Stats
from ..policies.base import Policy
from ..transfer.link import Link
from ..transfer.weights.host_weights import HostWeights
from ..utils.native_libraries import native_status


def _mean(rows: list[list[float]], tokens: int) -> float:
    """Return the sum over steps, divided by layers and `tokens`."""
    layers = len(rows[0]) if rows else 0
    return sum(map(sum, rows)) / (layers * tokens) if layers and tokens else 0.0


def layer_means(trace: Trace, dense_layers: frozenset[int]) -> tuple[float | None, float | None]:
    """Return (mean, largest mean of a layer) of the missed attention mass; None if it was not measured."""
    selecting = [layer for layer in range(trace.layers) if layer not in dense_layers]
    if not trace.missed or not selecting:
        return None, None
    means = [sum(masses[layer] for _, masses in trace.missed) / len(trace.missed) for layer in selecting]
    return sum(means) / len(means), max(means)


@dataclass(frozen=True)
class Fractions:
    """Fractions of visible tokens that are fetched (`link`) and attended exactly, as means over layers and tokens.

    `sparse_*` are means over the layers that select.
    """

    link: float
    attended: float
    sparse_link: float
    sparse_attended: float

    @classmethod
    def of(cls, trace: Trace, dense_layers: frozenset[int]) -> Fractions:
        trace.settle()
        selecting = [layer for layer in range(trace.layers) if layer not in dense_layers]
        fetched, attended = ([[row[i] for i in selecting] for row in rows] for rows in (trace.fetched, trace.attended))
        hits, tokens = sum(trace.hit_shares()), trace.decoded_tokens
        link = _mean(trace.fetched, tokens) - hits / trace.layers
        sparse = _mean(fetched, tokens) - hits / max(1, len(selecting))
        return cls(link, _mean(trace.attended, tokens), sparse, _mean(attended, tokens))


class Accounting:
    """Compute statistics of a runner's sequences. It changes nothing."""

    def __init__(
        self,
        model: LoadedModel,
        policy: Policy,
        pool: HostPool,
        link: Link,
        config: EngineConfig,
        weights: HostWeights | None,
        drafts: tuple[int, HostPool] | None = None,
    ) -> None:
        """`drafts`: size of a draft model's weights, and its KV cache."""
        self._model, self._policy, self._pool, self._link, self._config = model, policy, pool, link, config
        self._weights = weights
        self._drafts = drafts

    @property
    def weights_on_device(self) -> int:
        """Bytes of weights on the device, including buffers for streamed weights."""
        if self._weights is None:
            return self._weight_bytes
        return self._weight_bytes - self._weights.numbers + self._weights.device_bytes

    @property
    def _weight_bytes(self) -> int:
        return self._model.weight_bytes + (0 if self._drafts is None else self._drafts[0])

    def _held(self, sequence: Sequence) -> int:
        """Bytes of a sequence's blocks, including those of its draft sequence."""
        held = self._pool.bytes_of(sequence.blocks)
        if self._drafts is None or sequence.drafter is None:
            return held
        return held + self._drafts[1].bytes_of(sequence.drafter.blocks)

    def peak_device_bytes(self, scoring: int) -> int:
        """Return the allocator's peak on a GPU; on a CPU the sum of weights, KV and `scoring` bytes."""
        device = self._model.adapter.device
        if device.type != "cpu":
            return torch.accelerator.max_memory_allocated(device)
        return self.weights_on_device + self._link.device_bytes + scoring

    def stats(self, sequence: Sequence, peak_device_bytes: int) -> Stats:
        """Return the statistics of a sequence so far."""
        trace, adapter, dense = sequence.trace, self._model.adapter, self._policy.dense_layers
        trace.settle()
        shares = Fractions.of(trace, dense)
        missed, worst = layer_means(trace, dense)
        file, held, steps = self._pool.file, self._held(sequence), trace.step_weights
        used = DiskUse() if file is None or trace.disk_before is None else file.use.since(trace.disk_before)
        estimates = sequence.state.tail_bytes and trace.attended and self._config.exact is None
        return Stats(
            model=self._model.name,
            policy=self._policy.name,
            device=str(adapter.device),
            dtype=str(adapter.dtype).removeprefix("torch."),
            native_code=str(native_status()),
            prompt_tokens=trace.prompt_tokens,
            reused_tokens=trace.reused_tokens,
            diverged_at=trace.diverged_at,
            new_tokens=len(sequence.tokens) - trace.prompt_tokens,
            prefill_seconds=trace.prefill_seconds,
            decode_seconds=trace.decode_seconds,
            h2d_bytes=trace.bytes_to_device,
            d2h_bytes=trace.bytes_to_host,
            h2d_weight_bytes=trace.prefill_weights.bytes + steps.bytes,
            h2d_weight_bytes_steps=steps.bytes,
            kv_bytes_host=held if file is None else file.host_bytes,
            kv_bytes_device=self._link.device_bytes,
            scoring_bytes_device=sequence.state.device_bytes,
            scoring_bytes_host=sequence.state.host_bytes,
            approximate_bytes_device=sequence.state.tail_bytes,
            weight_bytes=self._weight_bytes,
            weight_bytes_device=self.weights_on_device,
            peak_device_bytes=peak_device_bytes,
            fetched_fraction=shares.link,
            exact_fraction=shares.attended,
            sparse_fetched_fraction=shares.sparse_link,
            sparse_exact_fraction=shares.sparse_attended,
            approximate_fraction=1 - shares.sparse_attended if estimates else 0.0,
            dense_layers=tuple(sorted(dense)),
            layers=adapter.geometry.layers,
            missed_mass=missed,
            missed_mass_worst_layer=worst,
            working_set_rows=self._config.working_set,
            working_set_bytes=self._link.working_set_bytes(sequence.blocks),
            working_set_hit_rate=trace.hit_rate if self._config.working_set else None,
            drafted_tokens=trace.drafted,
            accepted_tokens=trace.accepted,
            verifications=0 if self._config.exact is None else len(trace.attended) - trace.draft_steps,
            draft_speedup=trace.draft_speedup,
            attended_by_step=trace.attended,
            missed_by_step=trace.missed,
            kv_bytes_disk=0 if file is None else held,
            disk_bytes_read=used.bytes_read,
            disk_bytes_written=used.bytes_written,
            expert_hit_rate=steps.found / steps.chosen if steps.chosen else None,
            disk_hit_rate=used.cached / used.wanted if used.wanted else None,
        )
