"""Compute the statistics of a sequence (`Stats`) from its trace, its model, the KV cache and the transfers."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ..kv_cache.disk.requests import DiskUse
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Trace
from ..outputs import Stats
from ..utils.native_libraries import native_status
from .runner import Runner


def _mean(rows: list[list[float]], layers: Seq[int], tokens: int) -> float:
    # `rows` `[steps][layers]` has one value per step and layer. A step may give several tokens or, for drafts, none.
    return sum(sum(row[i] for i in layers) for row in rows) / (len(layers) * tokens) if layers and tokens else 0.0


def layer_means(trace: Trace, dense_layers: frozenset[int]) -> tuple[float | None, float | None]:
    """Return the mean and the maximum missed attention mass over sparse layers, or None for both if not measured."""
    selecting = [layer for layer in range(trace.layers) if layer not in dense_layers]
    if not trace.missed or not selecting:
        return None, None
    means = [sum(masses[layer] for _, masses in trace.missed) / len(trace.missed) for layer in selecting]
    return sum(means) / len(means), max(means)


@dataclass(frozen=True)
class Fractions:
    """Fractions of the context, as means over layers and tokens. Values named `sparse_...` cover only sparse layers.

    Attributes:
        fetched: Fraction of tokens whose KV was copied to the device.
        attended: Fraction of tokens that were attended to exactly.
    """

    fetched: float
    attended: float
    sparse_fetched: float
    sparse_attended: float

    @classmethod
    def of(cls, trace: Trace, dense_layers: frozenset[int]) -> Fractions:
        trace.flush_pending()
        selecting = [layer for layer in range(trace.layers) if layer not in dense_layers]
        layers, hits, tokens = range(trace.layers), trace.hit_shares(), trace.decoded_tokens
        sparse_hits = sum(hits[layer] for layer in selecting) / max(1, len(selecting))
        return cls(
            fetched=max(0.0, _mean(trace.fetched, layers, tokens) - sum(hits) / trace.layers),
            attended=_mean(trace.attended, layers, tokens),
            sparse_fetched=max(0.0, _mean(trace.fetched, selecting, tokens) - sparse_hits),
            sparse_attended=_mean(trace.attended, selecting, tokens),
        )


def _weight_and_peak_bytes(runner: Runner) -> tuple[int, int, int]:
    draft, weights, device = runner.draft, runner.weights, runner.adapter.device
    models = [runner.model] if draft is None else [runner.model, draft.model]
    total = sum(model.weight_bytes for model in models)
    on_device = total - sum(model.host_table.host_bytes for model in models if model.host_table is not None)
    on_device += 0 if weights is None else weights.device_bytes - weights.host_bytes
    if device.type == "cpu":
        return total, on_device, on_device + runner.transfer.device_bytes + runner.scoring_bytes
    return total, on_device, torch.accelerator.max_memory_allocated(device)


def _kv_bytes(runner: Runner, sequence: Sequence) -> tuple[int, int]:
    """Return the sizes in bytes of the sequence's KV in host memory and on disk."""
    kv_bytes = runner.pool.bytes_of(sequence.blocks)
    if runner.draft is not None and sequence.drafter is not None:
        kv_bytes += runner.draft.pool.bytes_of(sequence.drafter.blocks)
    file = runner.pool.file
    return (kv_bytes, 0) if file is None else (file.host_bytes, kv_bytes)


def _approximate_fraction(runner: Runner, sequence: Sequence, exact: float) -> float:
    used = sequence.state.approximate_bytes and sequence.trace.attended and runner.config.exact is None
    return 1 - exact if used else 0.0


def _disk_use(runner: Runner, trace: Trace) -> DiskUse:
    file, before = runner.pool.file, trace.disk_before
    return DiskUse() if file is None or before is None else file.use.since(before)


def sequence_stats(runner: Runner, sequence: Sequence) -> Stats:
    """Return the statistics of a sequence so far. Call this before the sequence is freed."""
    trace, adapter, config, dense = sequence.trace, runner.adapter, runner.config, runner.policy.dense_layers
    shares, (missed, worst) = Fractions.of(trace, dense), layer_means(trace, dense)
    weight_bytes, on_device, peak = _weight_and_peak_bytes(runner)
    kv_on_host, kv_on_disk = _kv_bytes(runner, sequence)
    steps, disk = trace.step_weights, _disk_use(runner, trace)
    transferred = trace.bytes_to_device + runner.transfer.loaded_bytes(sequence.blocks)
    return Stats(
        model=runner.model.name,
        policy=runner.policy.name,
        device=str(adapter.device),
        dtype=str(adapter.dtype).removeprefix("torch."),
        native_code=str(native_status()),
        dense_until=runner.policy.dense_until,
        prompt_tokens=trace.prompt_tokens,
        reused_tokens=trace.reused_tokens,
        recomputed_tokens=trace.recomputed_tokens,
        diverged_at=trace.diverged_at,
        new_tokens=len(sequence.tokens) - trace.prompt_tokens,
        prefill_seconds=trace.prefill_seconds,
        decode_seconds=trace.decode_seconds,
        h2d_bytes=transferred,
        h2d_bytes_steps=max(0, transferred - trace.prefill_bytes),
        d2h_bytes=trace.bytes_to_host,
        h2d_weight_bytes=trace.prefill_weights.bytes + steps.bytes,
        h2d_weight_bytes_steps=steps.bytes,
        kv_bytes_host=kv_on_host,
        kv_bytes_device=runner.transfer.device_bytes,
        scoring_bytes_device=sequence.state.device_bytes,
        scoring_bytes_host=sequence.state.host_bytes,
        approximate_bytes_device=sequence.state.approximate_bytes,
        weight_bytes=weight_bytes,
        weight_bytes_device=on_device,
        peak_device_bytes=peak,
        fetched_fraction=shares.fetched,
        exact_fraction=shares.attended,
        sparse_fetched_fraction=shares.sparse_fetched,
        sparse_exact_fraction=shares.sparse_attended,
        approximate_fraction=_approximate_fraction(runner, sequence, shares.sparse_attended),
        dense_layers=tuple(sorted(dense)),
        layers=adapter.geometry.layers,
        missed_mass=missed,
        missed_mass_worst_layer=worst,
        working_set_rows=config.working_set,
        working_set_bytes=runner.transfer.working_set_bytes(sequence.blocks),
        working_set_hit_rate=trace.hit_rate if config.working_set else None,
        drafted_tokens=trace.drafted,
        accepted_tokens=trace.accepted,
        verifications=0 if config.exact is None else len(trace.attended) - trace.draft_steps,
        draft_speedup=trace.draft_speedup,
        attended_by_step=trace.attended,
        missed_by_step=trace.missed,
        kv_bytes_disk=kv_on_disk,
        disk_bytes_read=disk.bytes_read,
        disk_bytes_written=disk.bytes_written,
        expert_hit_rate=steps.found / steps.chosen if steps.chosen else None,
        disk_hit_rate=disk.cached / disk.wanted if disk.wanted else None,
        device_kv_hit_rate=None if config.device_kv_memory is None else trace.hit_rate,
    )
