"""Ablation: replace one component of the selection at a time, at a fixed budget, and measure quality and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...policies.infinigen.bases import kept_columns
from ...policies.options import InfiniGenOptions
from ...policies.registry import memory_demand
from ..core.figures import picture
from ..core.model_under_test import ModelUnderTest, Variant
from ..core.report import Column, Report, Row
from .perplexity import COST, WHAT, PerplexityConfig, about, measure_all


def parts(budget: float) -> list[tuple[str, Variant]]:
    """Return (replaced component, variant) pairs at one budget, beginning with the preset "rows".

    "bytes of int4" is the partial scorer with as many 16-bit columns as fit into the bytes of int4 keys.
    """
    base: dict[str, Any] = {"budget": budget}

    def ours(**options: Any) -> Variant:
        return Variant("infinigen", {"preset": "rows"} | base | options)

    def bytes_of(bits: int) -> float:
        return bits / 16

    return [
        ("nothing", ours()),
        ("true query, full keys (oracle)", Variant("oracle", base)),
        ("source: residual", ours(source="residual")),
        ("source: normed input", ours(source="normed_input")),
        ("source: attention input", ours(source="attention_input")),
        ("source: residual, not corrected", ours(source="residual", corrected=False)),
        ("source: normed input, not corrected", ours(source="normed_input", corrected=False)),
        ("source: attention input, not corrected (paper)", ours(source="attention_input", corrected=False)),
        ("scorer: partial 0.3 (paper)", ours(scorer="partial", partial_ratio=0.3)),
        ("scorer: int8 of those columns", ours(scorer="int8")),
        ("scorer: int4", ours(scorer="int4")),
        ("scorer: partial, bytes of int4", ours(scorer="partial", partial_ratio=bytes_of(4))),
        ("scorer: int2", ours(scorer="int2")),
        ("scorer: partial, bytes of int2", ours(scorer="partial", partial_ratio=bytes_of(2))),
        ("skew: svd, prompt's columns (paper)", ours(scorer="partial", columns="prompt", skew="svd")),
        ("skew: balanced, prompt's columns", ours(scorer="partial", columns="prompt", skew="balanced")),
        ("skew: none, prompt's columns", ours(scorer="partial", columns="prompt", skew="none")),
        ("window: 4 sinks, 64 recent", ours(sinks=4, recent=64)),
        ("window: 4 sinks, 16 recent", ours(sinks=4, recent=16)),
        ("window: 16 recent, no sinks", ours(sinks=0, recent=16)),
        ("window: none (paper)", ours(sinks=0, recent=1)),
        ("layer 0 selects too", ours(dense_layers=())),
        ("tail: int4", ours(tail="int4")),
        ("tail: int2", ours(tail="int2")),
        ("everything as in the paper", ours(preset="paper")),
    ]


def run_ablation(
    tested: ModelUnderTest,
    text: str,
    name: str,
    budgets: Sequence[float],
    config: PerplexityConfig,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Measure all components on `text` (called `name`) at every budget.

    Writes ablation.json, .csv, .md and a plot per budget to `out`. Rows already in `out` are reused.
    """
    named = [(what, variant) for budget in budgets for what, variant in parts(budget)]
    variants = [Variant("full"), *(variant for _, variant in named)]
    rows = measure_all(tested, text, name, variants, config, out, say)
    rows = [rows[0] | {"part": "full"}, *(r | {"part": what} for (what, _), r in zip(named, rows[1:], strict=True))]
    for variant, row in zip(variants, rows, strict=True):
        row["scoring_keys"] = scoring_share(tested, variant, config.context)
        if row["missed"] is not None:
            row |= {"caught": 1 - row["missed"], "caught_worst": 1 - row["missed_worst"]}
    title = f"Parts of the selection replaced, {tested.name} on {name}"
    report = Report("ablation", title, about(tested, text, name, config), COLUMNS, rows, NOTES)
    report.write(out)
    for budget in budgets:
        _draw(title, [r for r in rows if r["budget"] == budget], budget, out)
    return report


def scoring_share(tested: ModelUnderTest, variant: Variant, context: int) -> float | None:
    """Return the size of the scoring keys relative to the KV of the same layers.

    Both are computed for bfloat16 and `context` tokens; static scales are included. None if the policy has no scoring
    keys.
    """
    if variant.policy != "infinigen":
        return None
    options = dict(variant.options)
    options.pop("skew", None)  # does not affect the size
    chosen, geometry = InfiniGenOptions.preset(options.pop("preset", "default"), **options), tested.geometry
    layers = geometry.layers - len(chosen.dense_layers)
    demand = memory_demand("infinigen", chosen, geometry, torch.bfloat16)
    keys = demand.scoring_bytes(geometry.layers, context)
    if chosen.tail == "off" and chosen.keys != "partial":
        columns = kept_columns(chosen.partial_ratio if chosen.keys == "int8" else 1.0, geometry.head_dim)
        keys += layers * geometry.kv_heads * columns * 2 * torch.float32.itemsize  # mean and step size of each column
    return keys / (geometry.kv_bytes(context, torch.bfloat16) * layers / geometry.layers)


def _draw(title: str, rows: list[Row], budget: float, out: Path) -> None:
    """Plot captured attention mass (mean, worst layer) and output error of each component as bars."""
    data = {r["part"]: [r["caught"], r["caught_worst"], r["output_error"]] for r in rows}
    path = out / f"caught_mass_by_part_at_{round(100 * budget)}_percent.png"
    with picture(path, f"{title}, {budget:.0%} attended", data, panels=(1, 2)) as (left, right):
        left.barh(list(data), [v[0] for v in data.values()], color="#4c78a8", label="mean of the layers")
        left.plot([v[1] for v in data.values()], list(data), "o", color="#e45756", markersize=4, label="worst layer")
        left.set(xlabel="attention mass caught")
        right.barh(list(data), [v[2] for v in data.values()], color="#54a24b")
        right.set(xlabel="error of the attention output", yticklabels=[])
        for axis in (left, right):
            axis.invert_yaxis()
            axis.tick_params(labelsize=7)


COLUMNS = (
    *WHAT[:-1],
    Column("part", "part"),
    Column("budget", "budget", ".0%"),
    *COST,
    Column("scoring keys, of 16-bit KV", "scoring_keys", ".1%"),
    Column("caught mass", "caught", ".3f"),
    Column("worst layer", "caught_worst", ".3f"),
    Column("output error", "output_error", ".3f"),
    Column("worst layer", "output_error_worst", ".3f"),
    Column("perplexity", "perplexity", ".3f"),
    Column("against full [95 %]", "against_full_shown"),
)

NOTES = (
    "Every row keeps preset 'rows' in all parts but the named one. Caught mass: attention inside the attended rows;",
    "output error: |out - exact| / |exact| of the attention output; both over selecting layers. Intervals: paired",
    "bootstrap over windows. Scoring keys: with their scales, in a model of 16 bits a number, over K and V of the same",
    "layers.",
)
