"""Read rows from `eval/results`, and name them for the results page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"

Row = Mapping[str, Any]

NAMES = {
    "qwen": "Qwen2.5-Coder-0.5B",
    "smollm2": "SmolLM2-135M",
}
"""Names of models on the page."""


NOVEL = "war_and_peace.txt"
DEFAULT = "default"


def load(name: str) -> list[Row]:
    """Return the rows of `eval/results/NAME.json`."""
    rows: list[Row] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def setting(row: Row) -> str:
    """Describe the policy and options of `row` in words."""
    options, policy = dict(row["options"]), row["policy"]
    share = f"{options['budget']:.0%}" if options.get("budget", 0) >= 0.01 else ""
    stored = row["engine"].get("kv_format") or row["engine"].get("kv_cache_dtype")
    if stored:
        return f"`{policy}`, {stored} KV cache" + (f", {share}" if share else "")
    if policy != "infinigen":
        return f"`{policy}`" + (f", {share}" if share else "")
    if "preset" in options:
        return DEFAULT if options["preset"] == "default" else f'`preset="{options["preset"]}"`'
    none = "no approximate KV"
    stored = {"int4": "4-bit approximate KV", "int2": "4-bit keys, 2-bit values", "off": none, None: none}
    return f"{share or 'no selected tokens'}, {stored[options.get('approximate_kv')]}"


def change(row: Row) -> str:
    """Format the change in perplexity relative to full attention, with its 95 % interval."""
    low, high = row["against_full_perplexity_low"], row["against_full_perplexity_high"]
    shown = f"{row['against_full_perplexity']:+.1%} [{100 * low:+.1f}, {100 * high:+.1f}]"
    return re.sub(r"[+-](0\.0\b)", r"\1", shown)


def most_windows(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """Return one row for each text, context and setting.

    If there are several measurements, use the one with the most windows.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["text"], row["context"], setting(row))
        if key not in found or row["windows"] > found[key]["windows"]:
            found[key] = row
    return found
