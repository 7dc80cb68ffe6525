"""What a sequence cost, put together from its trace and from what model, pool and link hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..config import EngineConfig
from ..forward.sequence import Sequence
from ..forward.trace import Trace
from ..models.registry import LoadedModel
from ..pool.pool import HostPool
from ..select.base import Policy
from ..transfer.link import Link
from ..transfer.weights import WeightStream


def _mean(rows: list[list[float]], tokens: int) -> float:
    """Mean over layers of the sum over steps, for each of `tokens` tokens."""
    layers = len(rows[0]) if rows else 0
    return sum(map(sum, rows)) / (layers * tokens) if layers and tokens else 0.0


@dataclass(frozen=True)
class Stats:
    """What one request cost and how much of the context it used. Times are wall-clock seconds, sizes bytes.

    link_bytes_*: rows that crossed (or, on the CPU, would cross) between host and device. Rows that several sequences
        share cross once a step and are counted for the first of them: the sum over the batch is what crossed.
    reused_tokens: prompt tokens whose KV was there: another sequence had computed it, or it came, whole, from a
        session's store. Prompts share full chunks of 64 tokens.
    diverged_at: the first prompt token at which the prompt parts from all that was there (it may lie behind
        `reused_tokens`, within a chunk); None where all of it was there, or nothing was looked for.
    link_bytes_weights: weights that crossed for this sequence's prefill and steps, not in `link_bytes_to_device`; for a
        batch they cross once and are counted for its first sequence.
    kv_bytes_host / kv_bytes_device: KV of this sequence in the pool / resident rows and staging of the runtime.
    tail_bytes_device: of `scoring_bytes_device`, low-bit rows that are scoring keys and tail in one; 0 without a tail.
    estimated_fraction: over the layers that select, mean share of the visible rows that the tail estimates: those that
        are not attended; 0 without a tail, and with `exact`, where all are.
    scoring_bytes_device / scoring_bytes_host: scoring keys of this sequence, on the device or where they are scored.
    weight_bytes / weight_bytes_device: all weights / those on the device, buffers for the others included.
    link_fraction, attended_fraction: mean over layers and new tokens, dense layers included; with `exact` of all passes
        that a token took, drafts and verification.
    drafted_tokens, accepted_tokens: with `exact`, tokens that were drafted, and those that full attention chose too.
    verifications: passes over all rows, each of which gave one token besides those accepted.
    sparse_link_fraction, sparse_attended_fraction: the same over the layers that select; 0 where none does.
    missed_mass: attention mass outside the attended rows, mean over sampled steps and selecting layers;
        `missed_mass_worst_layer` is the largest of the layers' means. None where nothing was measured. With a tail it
        is not lost: it is the mass that the tail estimates.
    working_set_rows: rows of each KV head and layer that stay on the device (`working_set=`); working_set_bytes: what
        this sequence's take, tables included, in `kv_bytes_device`; working_set_hit_rate: share of the selected rows
        that they had, None without one. Such rows are not in `link_bytes_to_device` and `link_fraction`.
    peak_device_bytes: on CUDA the allocator's peak; on the CPU weight_bytes_device + kv_bytes_device + scoring keys, as
        counted.
    """

    model: str
    policy: str
    device: str
    dtype: str
    prompt_tokens: int
    reused_tokens: int
    diverged_at: int | None
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    link_bytes_to_device: int
    link_bytes_to_host: int
    link_bytes_weights: int
    kv_bytes_host: int
    kv_bytes_device: int
    scoring_bytes_device: int
    scoring_bytes_host: int
    tail_bytes_device: int
    weight_bytes: int
    weight_bytes_device: int
    peak_device_bytes: int
    link_fraction: float
    attended_fraction: float
    sparse_link_fraction: float
    sparse_attended_fraction: float
    estimated_fraction: float
    dense_layers: tuple[int, ...]
    layers: int
    missed_mass: float | None
    missed_mass_worst_layer: float | None
    working_set_rows: int
    working_set_bytes: int
    working_set_hit_rate: float | None
    drafted_tokens: int
    accepted_tokens: int
    verifications: int
    attended_by_step: list[list[float]]
    missed_by_step: list[tuple[int, list[float]]]

    def to_dict(self) -> dict[str, Any]:
        """Plain types only, ready for JSON."""
        return asdict(self)

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of decoding."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def decoded_tokens(self) -> int:
        """New tokens but the first, which comes from the prefill."""
        return self.accepted_tokens + (self.verifications or len(self.attended_by_step))

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafted tokens that full attention chose too; None where none was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens that a verification gives, its own included; None without `exact`."""
        return 1 + self.accepted_tokens / self.verifications if self.verifications else None


def layer_means(trace: Trace, dense_layers: frozenset[int]) -> tuple[float | None, float | None]:
    """(mean, worst layer's mean) of the sampled missed mass over the layers that select; None where none was."""
    selecting = [layer for layer in range(trace.layers) if layer not in dense_layers]
    if not trace.missed or not selecting:
        return None, None
    means = [sum(masses[layer] for _, masses in trace.missed) / len(trace.missed) for layer in selecting]
    return sum(means) / len(means), max(means)


@dataclass(frozen=True)
class Fractions:
    """Means over layers and decoded tokens of the share of visible rows fetched across the link (`link`) and attended;
    `sparse_*` over the layers that select, 0 where none does."""

    link: float
    attended: float
    sparse_link: float
    sparse_attended: float

    @classmethod
    def of(cls, trace: Trace, dense_layers: frozenset[int]) -> Fractions:
        """Of all steps of a trace."""
        trace.settle()
        selecting = [layer for layer in range(trace.layers) if layer not in dense_layers]
        fetched, attended = ([[row[i] for i in selecting] for row in rows] for rows in (trace.fetched, trace.attended))
        hits, tokens = sum(trace.hit_shares()), trace.decoded_tokens
        link = _mean(trace.fetched, tokens) - hits / trace.layers
        sparse = _mean(fetched, tokens) - hits / max(1, len(selecting))
        return cls(link, _mean(trace.attended, tokens), sparse, _mean(attended, tokens))


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
        if device.type != "cpu":
            return torch.accelerator.max_memory_allocated(device)
        return self.weights_on_device + self._link.device_bytes + scoring

    def stats(self, sequence: Sequence, peak_device_bytes: int) -> Stats:
        """What the sequence cost so far."""
        trace, adapter, dense = sequence.trace, self._model.adapter, self._policy.dense_layers
        trace.settle()
        shares = Fractions.of(trace, dense)
        missed, worst = layer_means(trace, dense)
        estimates = sequence.state.tail_bytes and trace.attended and self._config.exact is None
        return Stats(
            model=self._model.name,
            policy=self._policy.name,
            device=str(adapter.device),
            dtype=str(adapter.dtype).removeprefix("torch."),
            prompt_tokens=trace.prompt_tokens,
            reused_tokens=trace.reused_tokens,
            diverged_at=trace.diverged_at,
            new_tokens=len(sequence.tokens) - trace.prompt_tokens,
            prefill_seconds=trace.prefill_seconds,
            decode_seconds=trace.decode_seconds,
            link_bytes_to_device=trace.bytes_to_device,
            link_bytes_to_host=trace.bytes_to_host,
            link_bytes_weights=trace.weight_bytes,
            kv_bytes_host=self._pool.bytes_of(sequence.blocks),
            kv_bytes_device=self._link.device_bytes,
            scoring_bytes_device=sequence.state.device_bytes,
            scoring_bytes_host=sequence.state.host_bytes,
            tail_bytes_device=sequence.state.tail_bytes,
            weight_bytes=self._model.weight_bytes,
            weight_bytes_device=self.weights_on_device,
            peak_device_bytes=peak_device_bytes,
            link_fraction=shares.link,
            attended_fraction=shares.attended,
            sparse_link_fraction=shares.sparse_link,
            sparse_attended_fraction=shares.sparse_attended,
            estimated_fraction=1 - shares.sparse_attended if estimates else 0.0,
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
            attended_by_step=trace.attended,
            missed_by_step=trace.missed,
        )
