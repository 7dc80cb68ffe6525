"""Tables and pictures of store simulations, and what they say about look-ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...storage.policies import POLICIES
from ..core.figures import lines, picture
from ..core.report import Column, Report, Row
from .store import label

COLUMNS = (
    Column("host", "host_size"), Column("disk", "disk_size"), Column("prefill tokens/s", "prefill_rate", "g"),
    Column("speed", "speed", "g"), Column("policy", "policy"), Column("hit", "hit", ".1%"),
    Column("from host", "host_hit", ".1%"), Column("from disk", "disk_hit", ".1%"),
    Column("tokens saved", "tokens_saved", ",d"), Column("stall s", "stall_seconds", ".1f"),
    Column("mean wait s", "mean_wait", ".1f"), Column("TTFT p50 s", "ttft_p50", ".2f"),
    Column("TTFT p99 s", "ttft_p99", ".1f"), Column("longest queue", "longest_queue", "d"),
    Column("$ GPU", "dollars_gpu", ".2f"), Column("$ storage", "dollars_storage", ".2f"),
)  # fmt: skip


def write_report(rows: Sequence[Row], about: dict[str, Any], out: Path) -> list[Path]:
    """`out`/store.{json,csv,md} and two pictures; their paths."""
    from ...utils.units import format_size

    shown = [
        row | {"host_size": format_size(row["host"]), "disk_size": format_size(row["disk"]) if row["disk"] else "none"}
        for row in rows
    ]
    report = Report("store", "Session store: replay of a request trace", about, COLUMNS, shown, findings(rows))
    paths = report.write(out)
    if any(len({row[key] for row in rows}) > 1 for key in ("host", "disk")):
        paths.append(_plot_sizes(rows, out / "store_sizes.png"))
    if len({row["speed"] / row["prefill_rate"] for row in rows}) > 1:
        paths.append(_plot_load(rows, out / "store_load.png"))
    return paths


def findings(rows: Sequence[Row]) -> tuple[str, ...]:
    """Where look-ahead beats LRU by a hundredth of all tokens or more, in hits or in hits from host memory, and where
    it does not."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(label(row), {})[row["policy"]] = row
    pairs = [
        (name, both["lookahead"], both["lru"]) for name, both in found.items() if {"lookahead", "lru"} <= set(both)
    ]
    if not pairs:
        return ()
    gains = [(ahead["hit"] - lru["hit"], ahead["host_hit"] - lru["host_hit"], name) for name, ahead, lru in pairs]
    notes = [
        f"Look-ahead over LRU: hits {min(g[0] for g in gains):+.1%} to {max(g[0] for g in gains):+.1%} of all input "
        f"tokens, from host memory {min(g[1] for g in gains):+.1%} to {max(g[1] for g in gains):+.1%}."
    ]
    vanished = [name for hit, host, name in gains if max(hit, host) < 0.01]
    if vanished:
        notes.append("Look-ahead gains less than 1 % of tokens in either at: " + "; ".join(vanished) + ".")
    lost = [f"{name} ({hit:+.1%})" for hit, _, name in gains if hit < -0.001]
    if lost:
        notes.append("Look-ahead loses hits at: " + "; ".join(lost) + ".")
    return tuple(f"- {note}" for note in notes)


def _by_policy(rows: Sequence[Row], x: Callable[[Row], float], y: str) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for policy in POLICIES:
        points = sorted((x(row), row[y]) for row in rows if row["policy"] == policy)
        if points:
            series[policy] = points
    return series


def _plot_sizes(rows: Sequence[Row], path: Path) -> Path:
    """Hits over the size of host memory, a panel for each size of disk, at the first load."""
    load = (rows[0]["speed"], rows[0]["prefill_rate"])
    chosen = [row for row in rows if (row["speed"], row["prefill_rate"]) == load]
    disks = sorted({row["disk"] for row in chosen})
    title = f"Share of input tokens reused (speed {load[0]:g}, {load[1]:g} prefill tokens/s)"
    with picture(path, title, chosen, panels=(2, len(disks))) as axes:
        for i, disk in enumerate(disks):
            here = [row for row in chosen if row["disk"] == disk]
            for axis, key in ((axes[i], "hit"), (axes[len(disks) + i], "host_hit")):
                series = _by_policy(here, lambda row: row["host"] / (1 << 30), key)
                heading = "any tier" if key == "hit" else "host memory"
                lines(axis, series, x=f"host memory, GiB (disk {disk >> 30} GiB)", y=f"hits, {heading}", percent="y")
                axis.set_xscale("log", base=2)
    return path


def _plot_load(rows: Sequence[Row], path: Path) -> Path:
    """Hits and waiting over the speed of arrival, at the size with the most speeds."""
    sizes = [(row["host"], row["disk"], row["prefill_rate"]) for row in rows]
    size = max(sizes, key=lambda s: len({r["speed"] for r in rows if (r["host"], r["disk"], r["prefill_rate"]) == s}))
    chosen = [row for row in rows if (row["host"], row["disk"], row["prefill_rate"]) == size]
    title = f"Load: {size[0] >> 30} GiB host, {size[1] >> 30} GiB disk, {size[2]:g} prefill tokens/s"
    with picture(path, title, chosen, panels=(2, 2)) as axes:
        for axis, key, heading in zip(
            axes,
            ("hit", "host_hit", "mean_wait", "stall_seconds"),
            ("hits, any tier", "hits, host memory", "mean wait, s", "stalled, s"),
            strict=True,
        ):
            series = _by_policy(chosen, lambda row: row["speed"], key)
            lines(axis, series, x="speed of arrival", y=heading, percent="y" if "hit" in key else "")
            axis.set_xscale("log", base=2)
    return path
