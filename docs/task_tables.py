"""The table of task scores for the results page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from result_rows import DEFAULT, Row, load, setting
from tables import table

from offload_rt.eval.core.stats import paired_bootstrap

FULL = "`full`"

COMPARED = (DEFAULT, "5%, no approximate KV", "`landmarks`, 5%", "`quest`, 5%", "`full`, int4 KV cache")
"""Settings that are compared with full attention, one column each."""

ENOUGH = 10
"""Number of documents from which on a bootstrap interval is shown."""


@dataclass(frozen=True)
class Tasks:
    """A row of the table: tasks of one result file."""

    model: str
    name: str
    file: str
    metric: str | None = None  # None: the only metric of the tasks
    only: tuple[str, ...] = ("",)  # beginnings of the names of the tasks

    def by_setting(self) -> dict[str, dict[str, Row]]:
        """Return the measured rows by setting and task."""
        found: dict[str, dict[str, Row]] = {}
        for row in load(self.file):
            if row["task"].startswith(self.only):
                found.setdefault(setting(row), {})[row["task"]] = row
        return found

    def scores(self, rows: Mapping[str, Row], tasks: Sequence[str]) -> list[float]:
        """Return the scores of all documents of `tasks` in percent."""
        metrics = [sample["metrics"] for task in tasks for sample in rows[task]["samples"]]
        return [100 * float(next(iter(m.values())) if self.metric is None else m[self.metric]) for m in metrics]


def _choices(model: str, folder: str) -> list[Tasks]:
    """Return the rows of multiple-choice tasks. The score of a random choice is in parentheses."""
    groups = {
        "piqa (50)": ("piqa",),
        "copa, winogrande, rte (50)": ("copa", "winogrande", "rte"),
        "openbookqa (25)": ("openbookqa",),
    }
    return [Tasks(model, name, f"{folder}/questions", "acc", only) for name, only in groups.items()]


TASKS = (
    Tasks("Qwen", "RULER, 4,096 tokens", "qwen/ruler"),
    Tasks("Qwen", "RULER, 8,192 tokens", "qwen/ruler_8192"),
    Tasks("Qwen", "RULER, 16,384 tokens", "qwen/ruler_16384"),
    Tasks("Qwen", "RULER, 32,000 tokens", "qwen/ruler_32000"),
    Tasks("Gemma 3", "RULER, 4,096 tokens", "gemma/ruler"),
    Tasks("Qwen", "Text2JSON, 16 records", "qwen/extraction", "f1"),
    Tasks("Qwen 1.5B", "Text2JSON, 64 records", "qwen15/extraction_64", "f1"),
    Tasks("Qwen 1.5B", "Text2JSON, 128 records", "qwen15/extraction_128", "f1"),
    *_choices("Qwen", "qwen"),
    *_choices("SmolLM2", "smollm2"),
)


def tasks() -> str:
    """Task scores with full attention, and the change of each setting in percentage points."""
    rows = []
    for each in TASKS:
        found = each.by_setting()
        full = found[FULL]
        scores = each.scores(full, list(full))
        cells = [each.model, each.name, str(len(scores)), f"{sum(scores) / len(scores):.1f}"]
        changes = [_change(each, found.get(name, {}), full) for name in COMPARED]
        rows.append([*cells, *changes, f"{_same(found[DEFAULT].values()):.0%}"])
    return table(("model", "task", "documents", FULL, *COMPARED, "default: same response"), rows)


def _same(rows: Collection[Row]) -> float:
    """Return the fraction of documents with the same response as full attention."""
    return sum(row["agreement"] * row["documents"] for row in rows) / sum(row["documents"] for row in rows)


def _change(each: Tasks, rows: Mapping[str, Row], full: Mapping[str, Row]) -> str:
    """Format the change from full attention, over the tasks of both, with its interval."""
    shared = [task for task in full if task in rows]
    if not shared:
        return ""
    mine, base = each.scores(rows, shared), each.scores(full, shared)
    change = paired_bootstrap(mine, base, [1.0] * len(mine))
    shown = f"{change.value:+.1f}" + (f" [{change.low:+.1f}, {change.high:+.1f}]" if len(mine) >= ENOUGH else "")
    return shown.replace("+0.0", "0.0").replace("-0.0", "0.0")
