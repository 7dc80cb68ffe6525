"""Measure how many selected KV entries a working set would find on the device, from the selections of a trained model.

The policy decodes a text. Each selection is looked up in working sets of several sizes, with the code of the runtime
(`transfer.working_set`). Working sets do not change selections, so one run measures all sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch

from ...core import RowShape
from ...errors import ConfigError
from ...transfer.working_set import LayerSet, look_up
from ..core.report import Column, Report, Row, RowStore
from ..core.variants import Text, Variant, text_digest
from .perplexity import PerplexityConfig, cut_windows

if TYPE_CHECKING:
    from ..core.model_under_test import Evaluation, ModelUnderTest


class Replay:
    """Looks up selections in empty working sets with `capacities` entries per layer and KV head.

    Attributes:
        entries: Number of selected KV entries.
        hits: How many of them each working set contained.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        self.entries, self.hits = 0, [0] * len(capacities)
        self._capacities = capacities
        self._sets: dict[int, list[LayerSet]] = {}

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        if layer not in self._sets:
            shape = RowShape(len(tokens), 0)
            self._sets[layer] = [
                LayerSet.empty(shape, capacity, torch.uint8, tokens.device) for capacity in self._capacities
            ]
        self.entries += tokens.numel()
        for i, each in enumerate(self._sets[layer]):
            self.hits[i] += int(look_up(each.table, tokens).hits.sum())


def measure(tested: ModelUnderTest, variant: Variant, text: Text, capacities: Sequence[int]) -> Row:
    replay = Replay(capacities)
    scored = tested.score_observed(variant, text, lambda row: None, replay)
    return {"entries": replay.entries, "hits": replay.hits, "selected": scored.sparse_fetched}


def run_working_set(
    evaluation: Evaluation, variants: Sequence[Variant], config: PerplexityConfig, shares: Sequence[float]
) -> Report:
    """Measure working sets that hold the fractions `shares` of the context."""
    tested, store = evaluation.tested, RowStore(evaluation.out)
    capacities = [max(1, round(share * config.context)) for share in shares]
    shared = {"suite": "working_set", **tested.identity, "text": text_digest(evaluation.text), **asdict(config)}
    windows = cut_windows(tested, evaluation.text, config)
    rows: list[Row] = []
    for variant in variants:
        found: list[Row] = []
        for number, window in enumerate(windows):
            key = shared | {"variant": tested.key(variant), "window": number, "capacities": capacities}
            found.append(store.once(key, partial(measure, tested, variant, window.text, capacities)))
            evaluation.say(f"window {number}, {variant.label}: {found[-1]}")
        if not any(row["entries"] for row in found):
            raise ConfigError(f"{variant.label} selects no tokens of a text this short: raise --context")
        for i, share in enumerate(shares):
            rate = sum(row["hits"][i] for row in found) / sum(row["entries"] for row in found)
            selected = sum(row["selected"] for row in found) / len(found)
            rows.append(tested.describe(variant) | {
                "text": evaluation.name, "context": config.context, "windows": len(found), "share": share,
                "hit_rate": rate, "selected": selected, "transferred": selected * (1 - rate),
            })  # fmt: skip
    title = f"Working sets with selections of {tested.name}"
    report = Report(f"working_set_{config.context}", title, evaluation.about(config), COLUMNS, rows)
    report.write(evaluation.out)
    return report


COLUMNS = (
    Column("policy", "variant"),
    Column("context", "context"),
    Column("windows", "windows"),
    Column("selected", "selected", ".1%"),
    Column("working set", "share", ".1%"),
    Column("hit rate", "hit_rate", ".1%"),
    Column("transferred", "transferred", ".2%"),
)
