"""Tables for the terminal: run statistics, skewing reports and memory plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..models.shape import ModelShape
from ..outputs import Stats
from ..planning.device_plan import DevicePlan
from ..planning.memory_model import DiskPlan, Requirements, SystemMemory
from ..utils.prefixes import common_prefix
from ..utils.units import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..eval.quality.comparison import Comparison
    from ..skewing.fold import SkewReport

Rows = list[tuple[str, str]]


def _percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{fraction:.2%}"


def _per_token(size: float, tokens: int) -> str:
    return f" ({format_size(size / tokens)} per decoded token)" if tokens else ""


def _rate(count: float, seconds: float) -> str:
    return f" ({count / seconds:,.1f} tokens/s)" if seconds > 0 and count else ""


def _if(condition: object, *rows: tuple[str, str]) -> Rows:
    return list(rows) if condition else []


def _size(name: str, size: int) -> Rows:
    return _if(size, (name, format_size(size)))


def _fraction(name: str, fraction: float | None) -> Rows:
    return _if(fraction is not None, (name, _percent(fraction)))


def _run_rows(stats: Stats) -> Rows:
    chosen = ", ".join(map(str, stats.dense_layers)) or "none"
    dense = f"all {stats.layers}" if len(stats.dense_layers) == stats.layers else f"{chosen} of {stats.layers}"
    return [
        ("model", stats.model),
        ("policy", stats.policy),
        ("device, dtype", f"{stats.device}, {stats.dtype}"),
        ("CPU kernels", stats.native_code),
        ("dense layers", dense),
        *_if(stats.dense_until, ("full attention", f"in contexts of up to {stats.dense_until:,} tokens")),
    ]


def _time_rows(stats: Stats) -> Rows:
    parts = f", recomputed from token {stats.diverged_at:,}" if stats.diverged_at is not None else ""
    if stats.recomputed_tokens:
        parts = f", {stats.recomputed_tokens:,} computed again after the last snapshot of the recurrent state{parts}"
    reused = f" ({stats.reused_tokens:,} reused{parts})" if stats.reused_tokens or stats.recomputed_tokens else ""
    prefill = _rate(stats.prompt_tokens - stats.reused_tokens, stats.prefill_seconds)
    rows = [
        ("prompt", f"{stats.prompt_tokens:,} tokens{reused}"),
        ("generated", f"{stats.new_tokens:,} tokens"),
        ("prefill", f"{stats.prefill_seconds:.2f} s{prefill}"),
        ("decode", f"{stats.decode_seconds:.2f} s{_rate(stats.decoded_tokens, stats.decode_seconds)}"),
    ]
    if stats.mean_accepted_length is not None:
        rate = "no drafts" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.1%} of them accepted"
        speedup = stats.draft_speedup
        faster = "" if speedup is None else f", {speedup:.2f} times as fast as without drafts"
        rows += [
            ("draft tokens", f"{stats.drafted_tokens:,} {rate}{faster}"),
            ("verification", f"{stats.verifications:,} passes, {stats.mean_accepted_length:.2f} tokens each"),
        ]
    return rows


def _transfer_rows(stats: Stats) -> Rows:
    tokens, copied = stats.decoded_tokens, stats.h2d_weight_bytes
    weights = f"{format_size(copied)}{_per_token(stats.h2d_weight_bytes_steps, tokens)}"
    kept = f"{stats.working_set_rows:,} KV entries per layer and KV head, {format_size(stats.working_set_bytes)}"
    read, written = format_size(stats.disk_bytes_read), format_size(stats.disk_bytes_written)
    return [
        ("host to device, KV", f"{format_size(stats.h2d_bytes)}{_per_token(stats.h2d_bytes_steps, tokens)}"),
        ("device to host, KV", format_size(stats.d2h_bytes)),
        *_if(copied, ("host to device, weights", weights)),
        *_fraction("  expert cache hit rate", stats.expert_hit_rate if copied else None),
        *_if(stats.working_set_hit_rate is not None, ("working set", kept)),
        *_fraction("  hit rate of the selected KV entries", stats.working_set_hit_rate),
        *_fraction("  KV entries read from copies on the device", stats.device_kv_hit_rate),
        *_if(stats.kv_bytes_disk, ("disk, read", read), ("disk, written", written)),
        *_fraction("  selected KV entries in host memory", stats.disk_hit_rate if stats.kv_bytes_disk else None),
    ]


TOO_MUCH = 0.1
"""If the missed attention mass is higher than this, the text usually differs from that of full attention."""


def _attention_rows(stats: Stats) -> Rows:
    # If sinks and the recent window use up the whole budget of a policy, no layer selects tokens.
    selecting = len(stats.dense_layers) < stats.layers and stats.working_set_hit_rate is None
    nothing = selecting and stats.attended_by_step and stats.sparse_fetched_fraction == 0 and stats.verifications == 0
    why = " (sinks and recent window only, no tokens selected)" if nothing else ""
    approximate, missed = bool(stats.approximate_bytes_device), stats.missed_mass
    cure = "raise the budget or max_fraction, or use approximate KV (infinigen's default)"
    rows = [
        ("fetched fraction", _percent(stats.fetched_fraction)),
        ("exact attention fraction", _percent(stats.exact_fraction)),
        ("  in sparse layers", f"{_percent(stats.sparse_exact_fraction)}{why}"),
        *_if(approximate, ("  attended through approximate KV", _percent(stats.approximate_fraction))),
        (f"{'approximated' if approximate else 'missed'} attention mass", _percent(missed)),
        ("  worst layer", _percent(stats.missed_mass_worst_layer)),
    ]
    if missed is None:
        return rows
    if approximate:
        return [*rows, ("  usual range", "10 to 25 % on trained models; estimated from approximate KV, not lost")]
    if missed < TOO_MUCH:
        return [*rows, ("  usual range", f"below {TOO_MUCH:.0%}")]
    return [*rows, ("  too high", f"usually below {TOO_MUCH:.0%}: {cure}")]


def _memory_rows(stats: Stats) -> Rows:
    keys = "approximate KV" if stats.approximate_bytes_device else "scoring keys"
    resident = stats.weight_bytes_device
    part = f", {format_size(resident)} of it on the device" if resident < stats.weight_bytes else ""
    return [
        *_size("KV on disk", stats.kv_bytes_disk),
        ("KV in host memory", format_size(stats.kv_bytes_host)),
        ("KV on the device", format_size(stats.kv_bytes_device)),
        (f"{keys} on the device", format_size(stats.scoring_bytes_device)),
        *_size("scoring keys on the host", stats.scoring_bytes_host),
        ("weights", f"{format_size(stats.weight_bytes)}{part}"),
        ("peak on the device", format_size(stats.peak_device_bytes)),
    ]


def _table(title: str, *sections: Rows) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section in sections:
        for name, value in section:
            table.add_row(name, value)
        table.add_section()
    return table


def summary_table(stats: Stats) -> Table:
    selects = len(stats.dense_layers) < stats.layers
    per_token = stats.h2d_bytes_per_token
    whole = per_token / stats.fetched_fraction if stats.fetched_fraction else 0
    times = f" ({whole / per_token:.0f} times less than all KV)" if per_token and whole > 1.5 * per_token else ""
    rest = ", the rest through approximate KV" if stats.approximate_bytes_device else ", the rest is ignored"
    attended = f"{_percent(stats.exact_fraction)} of the context{rest if selects and stats.exact_fraction < 1 else ''}"
    if not stats.decoded_tokens:
        attended = "100.00% of the context (prefill only)"
    device = stats.kv_bytes_device + stats.scoring_bytes_device
    return _table(
        "Statistics (--stats shows all)",
        [
            *[row for row in _time_rows(stats) if row[0] in ("prompt", "prefill", "decode")],
            ("exact attention fraction", attended),
            ("host to device, KV", f"{format_size(per_token)} per token{times}"),
            ("KV", f"{format_size(stats.kv_bytes_host)} in host memory, {format_size(device)} on the device"),
        ],
    )


def stats_table(stats: Stats) -> Table:
    """Return a table with all statistics of a run. Fractions are averaged over layers and decode steps."""
    rows = (_run_rows, _time_rows, _transfer_rows, _attention_rows, _memory_rows)
    return _table("Statistics", *(make(stats) for make in rows))


def texts_table(policy: str, tokenizer: PreTrainedTokenizerBase, written: Sequence[int], full: Sequence[int]) -> Table:
    """Return a table with two texts side by side: `written` is the policy's, and `full` is that of full attention.

    In both, the text from the first different token on is bold.
    """
    same = common_prefix(written, full)
    table = Table(title=f"The first {same:,} new tokens are the same", title_justify="left")
    cells = []
    for name, tokens in ((policy, written), ("full attention", full)):
        table.add_column(name, ratio=1)
        common, whole = (str(tokenizer.decode(list(part))) for part in (tokens[:same], tokens))
        cells.append(Text.assemble(common, (whole.removeprefix(common), "bold")))
    table.add_row(*cells)
    return table


CLOSE, VISIBLE = 0.01, 0.1
"""KL divergences in nats. Below CLOSE, sampled texts hardly differ. Above VISIBLE, they differ visibly."""


def comparison_table(found: Comparison) -> Table:
    """Return a table that compares a policy with full attention: quality, speed, transfers and memory."""
    policy, full = found.policy, found.full
    kl = "below 0.001" if found.kl < 0.001 else f"{found.kl:.3f}"
    same = f"at {found.top_1:.1%} of {found.scored:,} positions"
    speed = f"{policy.tokens_per_second:.0f} tokens/s, full attention {full.tokens_per_second:.0f}"
    if policy.device == "cpu":
        speed += " (nothing is copied on a CPU: expect a speed-up on a GPU)"
    copied = f"{format_size(policy.h2d_bytes_per_token)} per token, full attention "
    where = ", as counted for a GPU" if policy.device == "cpu" else ""
    return _table(
        "Compared with full attention",
        [
            ("same most probable token", same),
            ("KL divergence", f"{kl} nats per token"),
            ("speed", speed),
            ("host to device, KV", f"{copied}{format_size(full.h2d_bytes_per_token)}{where}"),
            ("KV on the device", f"{format_size(_on_device(policy))}, all KV {format_size(policy.kv_bytes_host)}"),
        ],
    )


def verdict(found: Comparison) -> str:
    """Return one sentence that says what a policy saves and how similar its results are to those of full attention."""
    policy, full = found.policy, found.full
    if not policy.decoded_tokens:
        return (
            "The policies cannot be compared: all of them compute the first new token with full attention. Generate at "
            "least two tokens."
        )
    if policy.device == "cpu" or not full.h2d_bytes_per_token:
        savings = f"attends exactly to {_share(policy.exact_fraction)} of the tokens"
    else:
        copied = _share(policy.h2d_bytes_per_token / full.h2d_bytes_per_token)
        kept = _share(_on_device(policy) / max(1, policy.kv_bytes_host))
        savings = f"copies {copied} of the KV cache per token, keeps {kept} of its size on the device"
    if found.kl < CLOSE:
        lead = "It worked"
        quality = f"predicts the same token as full attention at {found.top_1:.1%} of the positions"
    elif found.kl < VISIBLE:
        lead = "It worked in part"
        quality = "predicts almost like full attention; a larger budget comes closer"
    else:
        lead = "It changed the text"
        quality = "predicts other tokens than full attention: raise the budget, or use --exact"
    return f"{lead}: policy {policy.policy} {savings}, and {quality}."


def _on_device(stats: Stats) -> int:
    return stats.kv_bytes_device + stats.scoring_bytes_device


def _share(part: float) -> str:
    return "less than 1%" if 0 < part < 0.005 else f"{part:.0%}"


def skew_table(model: str, report: SkewReport) -> Table:
    made = [("artifact", str(report.artifact))]
    if report.folded is not None:
        made += [
            ("folded checkpoint", str(report.folded)),
            ("  largest logit difference", f"{report.logit_difference:.1e} of the largest logit"),
        ]
    energy = f"{report.energy_kept_plain:.1%} plain, {report.energy_kept_skewed:.1%} skewed"
    qualities = ", ".join(
        f"{source if isinstance(source, str) else f'ahead={source}'} {share:.1%}"
        for source, share in report.predictions.items()
    )
    return _table(
        f"Skewing of {model}",
        made,
        [
            ("method", report.method),
            ("calibrated on", report.calibration),
            ("model fingerprint", report.fingerprint),
            ("scores in 30 % of the columns", energy),
            *([("attention found by predicted queries", qualities)] if qualities else ()),
        ],
    )


def _host_weight_rows(shape: ModelShape) -> Rows:
    rows: Rows = []
    if shape.placement.experts is not None and shape.sizes.experts is not None:
        experts = shape.sizes.experts
        there = (
            f"{shape.placement.experts} of {experts.count} in each layer, {format_size(max(experts.one_expert))} each"
        )
        rows.append(("experts on the device", there))
        rows.append(("experts copied per token", f"at most {format_size(experts.top_k * sum(experts.one_expert))}"))
    if shape.placement.embedding:
        rows.append(("embedding", f"in host memory, {format_size(shape.sizes.embedding)}"))
    if shape.host_table:
        rows.append(("embeddings of each layer", f"in host memory, {format_size(shape.host_table)}"))
    return rows + _size("host: experts and embeddings", shape.host_bytes)


def _disk_rows(disk: DiskPlan, needed: Requirements) -> Rows:
    budget = disk.budget
    kept = budget.slots * budget.slot_bytes
    rest = 3 * budget.staged + budget.blocks
    return [
        ("disk: limit", format_size(disk.limit)),
        ("host: KV cache of the disk", f"{format_size(kept)} ({kept / needed.kv_host:.0%} of the context)"),
        ("host: staging and incomplete blocks", format_size(rest)),
    ]


def _plan_rows(plan: DevicePlan) -> Rows:
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
    """Return a table with the memory that one sequence needs, the free memory, and the device memory plan."""
    free = [("host memory", f"{format_size(machine.host_free)}, for KV {format_size(machine.pool_limit)}")]
    if machine.device_free is not None:
        free.append((f"on {machine.device}", format_size(machine.device_free)))
    return _table(
        f"{model}, policy {policy}, {needed.context:,} tokens",
        [
            (f"{'host' if disk is None else 'disk'}: KV of one token", format_size(needed.kv_per_token)),
            (f"{'host' if disk is None else 'disk'}: KV of the context", format_size(needed.kv_host)),
            *_size("host: snapshots of recurrent state", needed.snapshots),
            *([] if disk is None else _disk_rows(disk, needed)),
        ],
        [
            ("device: weights", format_size(needed.weights)),
            ("device: scoring keys", format_size(needed.scoring)),
            ("device: sinks and recent window", format_size(needed.resident)),
            *_size("device: working set", needed.working_set),
            *_size("device: copies of KV", needed.device_kv),
            *_size("device: recurrent state", needed.states),
            ("device: fetched KV", format_size(needed.staging)),
            ("device: activations of a step", format_size(needed.decode)),
            *_size("device: CUDA graphs, at most", needed.graphs),
            ("device: prefill, temporarily", format_size(needed.prefill)),
            ("device: peak", format_size(needed.device)),
        ],
        [] if shape is None else _host_weight_rows(shape),
        [] if plan is None else _plan_rows(plan),
        [(f"free: {name}", value) for name, value in free],
    )
