"""Terminal tables of run statistics, skewing reports and memory plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ..models.shape import ModelShape
from ..outputs import Stats
from ..planning.device_plan import DevicePlan
from ..planning.memory_model import DiskPlan, Requirements, SystemMemory
from ..utils.units import format_size

if TYPE_CHECKING:
    from ..skewing.fold import SkewReport

Rows = list[tuple[str, str]]
"""Pairs of name and value."""


def _percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{fraction:.2%}"


def _rate(count: float, seconds: float) -> str:
    return f" ({count / seconds:,.1f} tokens/s)" if seconds > 0 and count else ""


def dense_layers(stats: Stats) -> str:
    """Format the dense layers: "all 6", "none of 6", "0, 1 of 6"."""
    if len(stats.dense_layers) == stats.layers:
        return f"all {stats.layers}"
    return f"{', '.join(map(str, stats.dense_layers)) or 'none'} of {stats.layers}"


def _on_device(stats: Stats) -> str:
    if stats.weight_bytes_device >= stats.weight_bytes:
        return ""
    return f", {format_size(stats.weight_bytes_device)} of it on the device"


def _present(name: str, size: int) -> Rows:
    """Return a row if `size` is not 0."""
    return [(name, format_size(size))] if size else []


def _weights_crossed(stats: Stats) -> Rows:
    """Rows for weights transferred from host memory and for the expert hit rate."""
    if not stats.h2d_weight_bytes:
        return []
    tokens = stats.decoded_tokens
    per_token = f" ({format_size(stats.h2d_weight_bytes_steps / tokens)} per decoded token)" if tokens else ""
    rows: Rows = [("host to device, weights", f"{format_size(stats.h2d_weight_bytes)}{per_token}")]
    if stats.expert_hit_rate is not None:
        rows.append(("  expert cache hit rate", _percent(stats.expert_hit_rate)))
    return rows


def _working_set(stats: Stats) -> Rows:
    if stats.working_set_hit_rate is None:
        return []
    size = f"{stats.working_set_rows:,} KV entries per layer and KV head, {format_size(stats.working_set_bytes)}"
    return [("working set", size), ("  hit rate of the selected KV entries", _percent(stats.working_set_hit_rate))]


def _disk(stats: Stats) -> Rows:
    if not stats.kv_bytes_disk:
        return []
    rows: Rows = [
        ("disk, read", format_size(stats.disk_bytes_read)),
        ("disk, written", format_size(stats.disk_bytes_written)),
    ]
    if stats.disk_hit_rate is not None:
        rows.append(("  selected KV entries in host memory", _percent(stats.disk_hit_rate)))
    return rows


def _estimated(stats: Stats) -> Rows:
    """Row for the fraction of KV entries with approximate attention."""
    return (
        [("  approximated from low-bit KV", _percent(stats.approximate_fraction))]
        if stats.approximate_bytes_device
        else []
    )


def _drafts(stats: Stats) -> Rows:
    """Rows for speculative decoding."""
    if stats.mean_accepted_length is None:
        return []
    rate = "no drafts" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.1%} of them accepted"
    faster = "" if stats.draft_speedup is None else f", {stats.draft_speedup:.2f} times as fast as without drafts"
    return [
        ("draft tokens", f"{stats.drafted_tokens:,} {rate}{faster}"),
        ("verification", f"{stats.verifications:,} passes, {stats.mean_accepted_length:.2f} tokens each"),
    ]


def _mass(stats: Stats) -> str:
    return "approximated attention mass" if stats.approximate_bytes_device else "missed attention mass"


TOO_MUCH = 0.1
"""Missed attention mass above which the text differs visibly from full attention."""


def _mass_in_words(stats: Stats) -> Rows:
    """Row that rates the missed attention mass and suggests how to reduce it."""
    if stats.missed_mass is None:
        return []
    if stats.approximate_bytes_device:
        return [("  usual range", "10 to 25 % on trained models; computed from low-bit KV, not lost")]
    if stats.missed_mass < TOO_MUCH:
        return [("  usual range", f"below {TOO_MUCH:.0%}")]
    cure = "raise the budget or max_fraction, or use approximate attention (infinigen's default)"
    return [("  too high", f"usually below {TOO_MUCH:.0%}: {cure}")]


def _nothing_selected(stats: Stats) -> str:
    # Sinks and the recent window may use up the whole budget of a policy.
    selecting = len(stats.dense_layers) < stats.layers and stats.working_set_hit_rate is None
    nothing = selecting and stats.attended_by_step and stats.sparse_fetched_fraction == 0 and stats.verifications == 0
    return " (sinks and recent window only, no tokens selected)" if nothing else ""


def _scoring(stats: Stats) -> str:
    return "low-bit KV on the device" if stats.approximate_bytes_device else "scoring keys on the device"


def _sections(stats: Stats) -> list[Rows]:
    tokens = stats.decoded_tokens
    per_token = f" ({format_size(stats.h2d_bytes / tokens)} per decoded token)" if tokens else ""
    parts = f", recomputed from token {stats.diverged_at:,}" if stats.diverged_at is not None else ""
    reused = f" ({stats.reused_tokens:,} reused{parts})" if stats.reused_tokens else ""
    return [
        [
            ("model", stats.model),
            ("policy", stats.policy),
            ("device, dtype", f"{stats.device}, {stats.dtype}"),
            ("CPU kernels", stats.native_code),
            ("dense layers", dense_layers(stats)),
        ],
        [
            ("prompt", f"{stats.prompt_tokens:,} tokens{reused}"),
            ("generated", f"{stats.new_tokens:,} tokens"),
            (
                "prefill",
                f"{stats.prefill_seconds:.2f} s"
                f"{_rate(stats.prompt_tokens - stats.reused_tokens, stats.prefill_seconds)}",
            ),
            ("decode", f"{stats.decode_seconds:.2f} s{_rate(tokens, stats.decode_seconds)}"),
            *_drafts(stats),
        ],
        [
            ("host to device, KV", f"{format_size(stats.h2d_bytes)}{per_token}"),
            ("device to host, KV", format_size(stats.d2h_bytes)),
            *_weights_crossed(stats),
            *_working_set(stats),
            *_disk(stats),
            ("fetched fraction", _percent(stats.fetched_fraction)),
            ("exact attention fraction", _percent(stats.exact_fraction)),
            ("  in sparse layers", f"{_percent(stats.sparse_exact_fraction)}{_nothing_selected(stats)}"),
            *_estimated(stats),
            (_mass(stats), _percent(stats.missed_mass)),
            ("  worst layer", _percent(stats.missed_mass_worst_layer)),
            *_mass_in_words(stats),
        ],
        [
            *_present("KV on disk", stats.kv_bytes_disk),
            ("KV in host memory", format_size(stats.kv_bytes_host)),
            ("KV on the device", format_size(stats.kv_bytes_device)),
            (_scoring(stats), format_size(stats.scoring_bytes_device)),
            *_present("scoring keys on the host", stats.scoring_bytes_host),
            ("weights", f"{format_size(stats.weight_bytes)}{_on_device(stats)}"),
            ("peak on the device", format_size(stats.peak_device_bytes)),
        ],
    ]


def table_of(title: str, *sections: Rows) -> Table:
    """Return a table with the columns name and value."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section in sections:
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    return table


def stats_table(stats: Stats) -> Table:
    """Return the statistics of a run. Fractions are means over layers and decode steps."""
    return table_of("Statistics", *_sections(stats))


def skew_table(model: str, report: SkewReport) -> Table:
    made = [("artifact", str(report.artifact))]
    if report.folded is not None:
        made += [
            ("folded checkpoint", str(report.folded)),
            ("  largest logit difference", f"{report.logit_difference:.1e} of the largest logit"),
        ]
    energy = f"{report.energy_kept_plain:.1%} plain, {report.energy_kept_skewed:.1%} skewed"
    return table_of(
        f"Skewing of {model}",
        made,
        [
            ("method", report.method),
            ("calibrated on", report.calibration),
            ("model fingerprint", report.fingerprint),
            ("scores in 30 % of the columns", energy),
        ],
    )


def _host_weight_rows(shape: ModelShape) -> Rows:
    """Rows for experts and embedding in host memory."""
    rows: Rows = []
    if shape.placement.experts is not None and shape.sizes.experts is not None:
        experts = shape.sizes.experts
        there = f"{shape.placement.experts} of {experts.count} in each layer, {format_size(max(experts.each))} each"
        rows.append(("experts on the device", there))
        rows.append(("experts copied per token", f"at most {format_size(experts.chosen * sum(experts.each))}"))
    if shape.placement.embedding:
        rows.append(("embedding", f"in host memory, {format_size(shape.sizes.embedding)}"))
    return rows + _present("host: experts and embedding", shape.host_bytes)


def _disk_rows(disk: DiskPlan, needed: Requirements) -> Rows:
    shares = disk.shares
    kept = shares.slots * shares.slot_bytes
    rest = 3 * shares.staged + shares.chunks
    return [
        ("disk: limit", format_size(disk.limit)),
        ("host: KV cache of the disk", f"{format_size(kept)} ({kept / needed.kv_host:.0%} of the context)"),
        ("host: staging and incomplete blocks", format_size(rest)),
    ]


def _plan_rows(plan: DevicePlan) -> Rows:
    """Rows for the placement of weights and scoring keys, and for the transfers of a decode step."""
    costs, layers = plan.costs, plan.costs.shape.geometry.layers
    keys = "on the host" if plan.keys_on_host else "on the device" if costs.demand.key_bytes else "none"
    streamed = ", ".join(map(str, plan.streamed))
    streamed += f" ({format_size(plan.streamed_bytes)} in host memory)" if streamed else "none"
    rows = costs.h2d_bytes(plan.context)
    return [
        ("plan: device limit", format_size(plan.limit)),
        ("plan: resident layers", f"{layers - len(plan.streamed)} of {layers}"),
        ("plan: streamed layers", streamed),
        ("plan: scoring keys", keys),
        ("plan: weights copied per step", format_size(plan.streamed_bytes)),
        ("plan: KV copied per step", f"at most {format_size(rows)}"),
    ]


def requirements_table(
    model: str,
    policy: str,
    needed: Requirements,
    machine: SystemMemory,
    plan: DevicePlan | None = None,
    disk: DiskPlan | None = None,
    shape: ModelShape | None = None,
) -> Table:
    """Return the memory requirements of one sequence, the free memory, and the placement by a device memory plan.

    `shape` adds the weights in host memory.
    """
    free = [("host memory", f"{format_size(machine.host_free)}, for KV {format_size(machine.pool_limit)}")]
    if machine.device_free is not None:
        free.append((f"on {machine.device}", format_size(machine.device_free)))
    return table_of(
        f"{model}, policy {policy}, {needed.context:,} tokens",
        [
            (f"{'host' if disk is None else 'disk'}: KV of one token", format_size(needed.kv_per_token)),
            (f"{'host' if disk is None else 'disk'}: KV of the context", format_size(needed.kv_host)),
            *([] if disk is None else _disk_rows(disk, needed)),
        ],
        [
            ("device: weights", format_size(needed.weights)),
            ("device: scoring keys", format_size(needed.scoring)),
            ("device: sinks and recent window", format_size(needed.resident)),
            *_present("device: working set", needed.working_set),
            ("device: fetched KV", format_size(needed.staging)),
            ("device: activations of a step", format_size(needed.decode)),
            *_present("device: CUDA graphs, at most", needed.graphs),
            ("device: prefill, temporarily", format_size(needed.prefill)),
            ("device: peak", format_size(needed.device)),
        ],
        [] if shape is None else _host_weight_rows(shape),
        [] if plan is None else _plan_rows(plan),
        [(f"free: {name}", value) for name, value in free],
    )
