"""Write the GPU section of the documentation from `eval/results/gpu/*.json`: `offload-rt eval gpu-readme`.

The section includes a plot that shows time per token over context length, with a line per baseline.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..core.plots import lines, picture
from ..core.report import write_atomic
from .gpu_parts import PARTS

BEGIN, END = "<!-- gpu: begin (written by eval/suites/gpu_readme.py) -->", "<!-- gpu: end -->"

PICTURE = "time_per_token.png"

Record = Mapping[str, Any]


def load(folder: Path) -> dict[str, Record]:
    """Load the results of all parts, by part. Raises InputError if a file is not a result of `make gpu`."""
    found: dict[str, Record] = {}
    for name in PARTS:
        path = folder / f"{name}.json"
        if path.exists():
            try:
                found[name] = json.loads(path.read_text("utf-8"))
                found[name]["machine"]["bandwidth"], found[name]["results"]
            except (ValueError, KeyError, TypeError):
                raise InputError(
                    f"{str(path)!r} is not a result of `make gpu`: delete it and run the part again"
                ) from None
    return found


def section(records: Mapping[str, Record], folder: str) -> str:
    """Return the section as Markdown. `folder` is the path of the results relative to the page."""
    if not records:
        return "No GPU was available, so nothing was measured on one. Run `make gpu` on a machine with a GPU."
    parts = [_machine(next(iter(records.values()))["machine"])]
    for name, record in records.items():
        results = record["results"]
        if name in WRITERS and all(wanted in results for wanted in WRITERS[name][1]):
            parts.append(WRITERS[name][0](results))
        if name == "decode" and "rows" in results:
            parts.append(f"![Time per token over context]({folder}/{PICTURE})")
        if "failed" in results:
            parts.append(f"`{name}` did not get further: {results['failed'].splitlines()[0]}")
    missing = [name for name in PARTS if name not in records]
    if missing:
        parts.append(f"Not run: {', '.join(missing)}.")
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _machine(about: Record) -> str:
    gpu, rates = about.get("gpu", {}), about["bandwidth"]
    link = f"PCIe {gpu.get('pcie.link.gen.max', '?')} x{gpu.get('pcie.link.width.max', '?')}"
    return (
        f"One {gpu.get('name', 'GPU')}, driver {gpu.get('driver_version', '?')}, {link}: measured "
        f"{rates['host_to_device'] / 1e9:.1f} GB/s to the device and {rates['device_to_host'] / 1e9:.1f} GB/s back "
        f"through pinned memory, {rates['device'] / 1e12:.2f} TB/s device memory; torch {about['versions']['torch']}, "
        f"CUDA {about.get('cuda', '?')}, commit {about['commit']}, {about['finished'][:10]}."
    )


def _tests(results: Record) -> str:
    cells = []
    for name, found in results.items():
        if isinstance(found, str):
            cells.append([name, found.splitlines()[0], "", ""])
        elif "passed" in found:
            cells.append([name, str(found["passed"]), str(found.get("failures", 0) + found.get("errors", 0)),
                          str(found["exit_code"])])  # fmt: skip
    return table(("tests", "passed", "failed", "exit code"), cells)


def _decode(results: Record) -> str:
    contexts = sorted({row["context"] for row in results["rows"]})
    by_name: dict[str, dict[int, float]] = {}
    for row in results["rows"]:
        by_name.setdefault(row["name"], {})[row["context"]] = row["median"]
    rows = [[name, *(f"{at[c]:.1f}" if c in at else "–" for c in contexts)] for name, at in by_name.items()]
    shape, config = next(iter(results["about"]["shapes"].values())), results["about"]["config"]
    about = (
        f"**A decode step**, ms a token, {shape['layers']} layers, hidden {shape['hidden']}, {shape['kv_heads']} KV "
        f"heads, {shape['dtype']}, {config['fraction']:.0%} of the tokens planted (medians):"
    )
    return f"{about}\n\n{table(('', *(f'{c:,} tokens' for c in contexts)), rows)}"


def _kernels(results: Record) -> str:
    rows = [
        [r["kernel"], f"{r['bytes'] / 1e6:.1f}", "PCIe" if r["over_link"] else "device", f"{1e3 * r['ms']:.0f}",
         "–" if r["replayed_ms"] is None else f"{1e3 * r['replayed_ms']:.0f}", f"{1e3 * r['floor_ms']:.0f}",
         f"{r['times_floor']:.1f}", f"{r['error']:.2f}"]
        for r in results["rows"]
    ]  # fmt: skip
    head = ("kernel", "MB", "memory", "launched µs", "graph µs", "bound µs", "x bound", "error / tolerance")
    return f"**Kernels**, one layer at {results['size']['tokens']:,} tokens:\n\n{table(head, rows)}"


def _prefill(results: Record) -> str:
    rows = []
    for r in results["rows"]:
        peak = r.get("peak_device_bytes")
        memory = [f"{peak / 2**30:.1f}", f"{(peak - r['weight_bytes']) / 2**30:.2f}"] if peak else ["–", "–"]
        # Results of before 2026-11-26 are prefills of an 8B shape with `full`.
        what = [r.get("shape", "llama-8b"), r.get("program", "full"), f"{r['tokens']:,}"]
        rows.append([*what, f"{r['seconds']:.2f}", f"{r['tokens'] / r['seconds']:,.0f}", *memory])
    head = ("shape", "program", "tokens", "seconds", "tokens/s", "device peak, GiB", "without weights, GiB")
    return f"**Prefill**:\n\n{table(head, rows)}"


def _sessions(results: Record) -> str:
    rows = [[f"{r['history']:,}", r["source"], f"{r['seconds']:.3f}", f"{r['speedup']:.1f}"] for r in results["rows"]]
    return f"**First token of a session's next turn**:\n\n{table(('history', 'KV from', 'seconds', 'speed-up'), rows)}"


def _accuracy(results: Record) -> str:
    """Return the table of models and policies with perplexity and the fraction of needles found."""
    cells = []
    for model in (name for name in results if name != "text"):
        reports = [results[model].get(report, {}) for report in ("perplexity", "retrieval")]
        rows: list[dict[str, Any]] = [row for report in reports for row in report.get("rows", ())]
        for policy in dict.fromkeys(row["policy"] for row in rows):
            own = {name: value for row in rows if row["policy"] == policy for name, value in row.items()}
            perplexity, right = own.get("perplexity"), own.get("right")
            cells.append([
                model, policy, "–" if perplexity is None else f"{perplexity:.3f}",
                "–" if right is None else f"{right:.2f}",
            ])  # fmt: skip
    head = ("model", "policy", "perplexity", "needles")
    return f"**Accuracy** on {results['text']}, bf16:\n\n{table(head, cells)}"


WRITERS: Mapping[str, tuple[Callable[[Record], str], tuple[str, ...]]] = {
    "tests": (_tests, ()),
    "kernels": (_kernels, ("rows",)),
    "decode": (_decode, ("rows",)),
    "prefill": (_prefill, ("rows",)),
    "accuracy": (_accuracy, ("text",)),
    "sessions": (_sessions, ("rows",)),
}
"""Formatter of each part, and the result keys that it needs. Keys may be missing if the part failed."""


def draw(results: Record, path: Path) -> None:
    """Plot the time per token over the context length, with quartiles as error bars.

    Lower bounds ("floor") are left out.
    """
    series: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in results["rows"]:
        if row["name"] != "ideal" and not row["name"].startswith("floor"):
            series.setdefault(row["name"], []).append((row["context"], row["median"]))
            errors.setdefault(row["name"], []).append((row["median"] - row["lower"], row["upper"] - row["median"]))
    with picture(path, "Decode step", series) as [axis]:
        lines(axis, series, x="tokens in context", y="ms a token", errors=errors)
        axis.set(xscale="log", yscale="log")


def write_readme(readme: Path, folder: Path) -> None:
    """Replace the text between the two markers in `readme`. Raises InputError if the markers are missing."""
    text = readme.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{str(readme)!r} has no lines {BEGIN!r} and {END!r}")
    records = load(folder)
    place = Path(os.path.relpath(folder.resolve(), readme.resolve().parent)).as_posix()
    if "rows" in records.get("decode", {}).get("results", {}):
        draw(records["decode"]["results"], folder / PICTURE)
    write_atomic(readme, f"{before}{BEGIN}\n{section(records, place)}\n{END}{after}")
