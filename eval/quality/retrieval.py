"""Needle retrieval: the fraction of hidden facts that a model finds under each policy.

Results are listed by the kind of needle, the length of the text and the distance of the fact, together with the
difference from full attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ...utils.config_fields import check_choice, option
from ..core.needles import KINDS, Haystack, Passage
from ..core.plots import lines, picture
from ..core.report import Column, Report, Row, RowStore
from ..core.stats import mean_or_none, paired_bootstrap, share_error
from ..core.variants import Variant, text_digest
from .perplexity import COST, WHAT, costs

if TYPE_CHECKING:
    from ..core.model_under_test import Evaluation, ModelUnderTest

NEAREST = 128
"""Upper limit, in tokens, of the first distance group. Each further group doubles the limit."""


@dataclass(frozen=True)
class RetrievalConfig:
    lengths: tuple[int, ...] = option((1024, 2048), help="tokens of a passage", metavar="1k,2k")
    passages: int = option(20, help="passages of each kind and length", metavar="N")
    kinds: tuple[str, ...] = option(tuple(KINDS), help="kinds of needles", metavar="A,B")
    seed: int = option(0, help="seed of the passages", metavar="N")
    # Fraction of a passage that is prefilled with full attention. The remaining tokens are decoded under the policy.
    # None means that everything before the first question is prefilled.
    prefilled: float | None = None

    def __post_init__(self) -> None:
        if self.prefilled is not None and not 0 <= self.prefilled < 1:
            raise ConfigError(f"prefilled={self.prefilled} must be in [0, 1)")
        for kind in self.kinds:
            check_choice("kind", kind, KINDS)
        if not self.lengths or min(self.lengths) < 64 or self.passages < 1 or not self.kinds:
            raise ConfigError(f"lengths must be at least 64, and passages and kinds must not be empty, got {self}")


def make_passages(haystack: Haystack, config: RetrievalConfig, length: int, kind: str) -> list[Passage]:
    """Build the passages for one length and kind.

    They depend neither on the policy nor on the other lengths and kinds.
    """
    rng = np.random.default_rng([config.seed, length, *kind.encode()])
    made = [haystack.hide(rng, kind, length) for _ in range(config.passages)]
    if config.prefilled is None:
        return made
    start = int(config.prefilled * length)
    return [replace(p, text=replace(p.text, decode_from=min(start, p.text.decode_from))) for p in made]


def measure(tested: ModelUnderTest, variant: Variant, passages: Sequence[Passage]) -> Row:
    """Measure a variant and return its row. The column `samples` contains [kind, distance, right] for each question.

    An answer is right if each of its tokens is the most probable token, so that greedy decoding would generate the
    answer.
    """
    scored = tested.score(variant, [passage.text for passage in passages])
    samples: list[tuple[str, int, bool]] = []
    for passage, score in zip(passages, scored, strict=True):
        first = passage.text.scored_from
        for question in passage.questions:
            right = all(score.is_greedy[position - first] for position in question.answers)
            samples.append((passage.kind, question.distance, right))
    return {**costs(scored), "samples": [list(sample) for sample in samples]}


def together(rows: Sequence[Row]) -> Row:
    found: Row = {"samples": [sample for row in rows for sample in row["samples"]]}
    for name in (key for key in rows[0] if key not in found):
        found[name] = mean_or_none(row[name] for row in rows)
    return found | accuracies(found["samples"])


def accuracies(samples: Sequence[Sequence[Any]]) -> Row:
    """Return the accuracy, its standard error and the number of questions: in total, by kind and by distance."""
    found: Row = _accuracy("", [right for _, _, right in samples])
    for kind in dict.fromkeys(kind for kind, _, _ in samples):
        found |= _accuracy(f" {kind}", [right for k, _, right in samples if k == kind])
    furthest = max(distance for _, distance, _ in samples)
    edges = [0, NEAREST]
    while edges[-1] <= furthest:
        edges.append(2 * edges[-1])
    for low, high in pairwise(edges):
        band = [right for _, distance, right in samples if low <= distance < high]
        if band:
            found |= _accuracy(f" at {low}-{high - 1}", band)
    return found


def _accuracy(name: str, rights: Sequence[bool]) -> Row:
    return {
        f"right{name}": sum(rights) / len(rights),
        f"error{name}": share_error(sum(rights), len(rights)),
        f"asked{name}": len(rights),
    }


def against(row: Row, base: Row) -> Row:
    """Return the difference in accuracy from `base`, with its paired 95 % interval over questions."""
    mine, other = ([float(right) for _, _, right in r["samples"]] for r in (row, base))
    change = paired_bootstrap(mine, other, np.ones(len(mine)))
    shown = f"{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    return {
        "against_full": change.value,
        "against_full_interval": [change.low, change.high],
        "against_full_shown": shown,
    }


def run_retrieval(evaluation: Evaluation, variants: Sequence[Variant], config: RetrievalConfig) -> Report:
    """Measure every variant at every length, and write retrieval.json, .csv, .md and two plots.

    All variants are compared with the first variant, which should be `full`. After the deadline, only the first variant
    is measured.
    """
    # Variants are the inner loop, so that a passage is prefilled only once for all of them.
    tested, store = evaluation.tested, RowStore(evaluation.out)
    haystack = Haystack(tested, evaluation.text)
    rows: list[Row] = []
    for length in config.lengths:
        found: dict[int, list[Row]] = {}
        for kind in config.kinds:
            passages = make_passages(haystack, config, length, kind)
            for i, variant in enumerate(variants):
                if i and evaluation.deadline_passed():
                    break
                row = _row(store, tested, variant, length, passages)
                found.setdefault(i, []).append(row)
                evaluation.say(f"{length} tokens, {kind}, {variant.label}: {_shown(row)}")
        whole = {i: together(by_kind) for i, by_kind in found.items() if len(by_kind) == len(config.kinds)}
        said = {"text": evaluation.name, "length": length}
        rows += [tested.describe(variants[i]) | said | row | against(row, whole[0]) for i, row in whole.items()]
    about = {**tested.identity, "book": evaluation.name, "book_digest": text_digest(evaluation.text), **asdict(config)}
    report = Report(
        "retrieval", f"Needles found by {tested.name} in {evaluation.name}", about, columns(rows), rows, NOTES
    )
    report.write(evaluation.out)
    draw(report, config.kinds, evaluation.out)
    return report


def _row(store: RowStore, tested: ModelUnderTest, variant: Variant, length: int, passages: Sequence[Passage]) -> Row:
    # The key contains a digest of the passages, so that rows are measured again if the wording changes.
    said = {"kind": passages[0].kind, "length": length, "passages": text_digest(repr(passages))}
    key = {"suite": "retrieval", **tested.identity, **said, "variant": tested.key(variant)}
    return store.once(key, partial(measure, tested, variant, passages))


def _shown(row: Row) -> str:
    rights = [right for _, _, right in row["samples"]]
    return f"{sum(rights)} of {len(rights)} right"


NOTES = (
    "Fraction of questions with all answer tokens right under greedy decoding; ± is the standard error. The difference",
    "from full is in percentage points, with a paired 95 % interval over questions. Questions are decoded with the",
    "policy; the text before them is prefilled with full attention.",
)


def columns(rows: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    names = dict.fromkeys(key[5:] for row in rows for key in row if key.startswith("right"))
    shares = [
        c for n in names for c in (Column(n.strip() or "right", f"right{n}", ".2f"), Column("±", f"error{n}", ".2f"))
    ]
    head = (
        *WHAT[:2],
        Column("length", "length"),
        WHAT[-1],
        *COST,
        Column("missed mass", "missed", ".3f"),
        Column("asked", "asked"),
    )
    return (*head, *shares[:2], Column("against full, points [95 %]", "against_full_shown"), *shares[2:])


def draw(report: Report, kinds: Sequence[str], out: Path) -> None:
    longest = max(row["length"] for row in report.rows)
    rows = [row for row in report.rows if row["length"] == longest]
    series: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["sparse_attended"]):
        if row["policy"] != "full":
            series.setdefault(row["policy"], []).append((row["sparse_attended"], row["right"]))
            errors.setdefault(row["policy"], []).append((row["error"], row["error"]))
    title = f"{report.title}, {longest:,} tokens"
    with picture(out / "needles_found_by_attended_share.png", title, series) as (axis,):
        lines(
            axis, series, x="attended share of the context in sparse layers", y="needles found", percent="xy",
            errors=errors,
        )  # fmt: skip
        axis.axhline(rows[0]["right"], color="#222222", linewidth=0.8, label=rows[0]["variant"])
    by_kind = {row["variant"]: [(float(i), row[f"right {kind}"]) for i, kind in enumerate(kinds)] for row in rows}
    with picture(out / "needles_found_by_kind.png", title, {"kinds": list(kinds), "series": by_kind}) as (axis,):
        lines(axis, by_kind, x="kind of needle", y="needles found", percent="y")
        axis.set_xticks(range(len(kinds)), kinds)
