"""Measure the perplexity of a text under each policy.

Every scored token is predicted by a decode step. Each window of the text is compared with the result for the same
window under `full`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError, InputError
from ...utils.config_fields import option
from ..core.plots import lines, picture
from ..core.report import Column, Report, Row, RowStore
from ..core.stats import mean_or_none, paired_bootstrap, perplexity_change, ratio_error
from ..core.variants import Scored, Text, Variant, text_digest

if TYPE_CHECKING:
    from ..core.model_under_test import Evaluation, ModelUnderTest

LN2 = math.log(2)

CHUNK = 256
"""Number of scored tokens per section of a window ("decoding chunk" in Figure 12 of the paper)."""


@dataclass(frozen=True)
class PerplexityConfig:
    """Settings of the perplexity evaluation.

    In each window, the tokens after `decode_from` are decoded with the policy and scored. `margin` is skipped at both
    ends of the text, to leave out title pages and licences.
    """

    context: int = option(2048, help="tokens per window", metavar="N")
    windows: int = option(32, help="windows, evenly spaced over the text", metavar="N")
    decode_from: int | None = option(
        None, help="tokens of a window prefilled with full attention; 1 decodes all (three quarters)", metavar="N"
    )
    margin: float = option(0.01, help="fraction of the text skipped at either end", metavar="F")

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ConfigError(f"context={self.context} must be at least 2 tokens")
        if self.windows < 1:
            raise ConfigError(f"windows={self.windows} must be at least 1")
        if not 0 <= self.start <= self.context - 2:
            raise ConfigError(f"decode_from={self.decode_from} must be between 0 and context - 2 = {self.context - 2}")
        if not 0 <= self.margin < 0.5:
            raise ConfigError(f"margin={self.margin} must be in [0, 0.5)")

    @property
    def start(self) -> int:
        return self.context * 3 // 4 if self.decode_from is None else self.decode_from


@dataclass(frozen=True)
class Window:
    text: Text
    bytes: int


def cut_windows(tested: ModelUnderTest, text: str, config: PerplexityConfig) -> list[Window]:
    """Cut up to `config.windows` evenly spaced windows from the text. Each window begins with the special tokens (BOS).

    If the text is long enough, `config.margin` is skipped at both ends. Raises InputError if the text is shorter than a
    window.
    """
    ids, ends, lead = tested.encode(text)
    body = config.context - len(lead)
    if len(ids) < body:
        raise InputError(f"the text has {len(ids)} tokens, fewer than one window of {body}; lower --context")
    edge = int(config.margin * len(ids))
    edge = edge if len(ids) - 2 * edge >= body else 0
    windows = min(config.windows, max(1, (len(ids) - 2 * edge) // body))
    scored_from = max(config.start + 1, len(lead))
    found = []
    for begin in np.linspace(edge, len(ids) - edge - body, windows).astype(int).tolist():
        tokens = (*lead, *ids[begin : begin + body])
        before = ends[begin + scored_from - len(lead) - 1] if begin + scored_from > len(lead) else 0
        found.append(Window(Text(tokens, config.start, scored_from), ends[begin + body - 1] - before))
    return found


def measure(tested: ModelUnderTest, variant: Variant, windows: Sequence[Window]) -> Row:
    """Measure a variant on all windows and return its row.

    The column `samples` contains the nats, tokens and bytes of each window.
    """
    scored = tested.score(variant, [window.text for window in windows])
    samples: dict[str, list[Any]] = {
        "nats": [sum(score.nats) for score in scored],
        "tokens": [len(score.nats) for score in scored],
        "bytes": [window.bytes for window in windows],
        "chunks": [_chunks(score.nats) for score in scored],
    }
    return {
        "windows": len(windows),
        "scored_tokens": sum(samples["tokens"]),
        **costs(scored),
        **summary(samples),
        "samples": samples,
    }


def _chunks(nats: Sequence[float]) -> list[float]:
    """Return the mean nats per token for each complete section of `CHUNK` tokens.

    If the window is shorter, it is one section.
    """
    whole = max(1, len(nats) // CHUNK)
    size = min(CHUNK, len(nats))
    return [sum(nats[i * size : (i + 1) * size]) / size for i in range(whole)]


def costs(scored: Sequence[Scored]) -> Row:
    """Return the cost columns, averaged over texts: exact attention fraction, fetched fraction and missed attention
    mass.
    """
    found: Row = {}
    columns = {name: name for name in ("attended", "fetched", "sparse_attended", "sparse_fetched", "missed")}
    for column, name in (columns | {"missed_worst": "worst_layer"}).items():
        found[column] = mean_or_none(getattr(score, name) for score in scored)
    return found


def summary(samples: dict[str, list[Any]]) -> Row:
    nats, tokens, sizes = (np.asarray(samples[name], float) for name in ("nats", "tokens", "bytes"))
    per_token, error = nats.sum() / tokens.sum(), ratio_error(nats, tokens)
    return {
        "nats_per_token": float(per_token),
        "perplexity": math.exp(per_token),
        "perplexity_error": math.exp(per_token) * error,
        "bits_per_byte": float(nats.sum() / sizes.sum() / LN2),
        "bits_per_byte_error": ratio_error(nats, sizes) / LN2,
    }


def compare(row: Row, base: Row, name: str) -> Row:
    """Return the relative change in perplexity from `base`, with a 95 % bootstrap interval that is paired over windows.

    The column names begin with `name`. The column `{name}_shown` contains the text for tables.
    """
    mine, other = row["samples"], base["samples"]
    change = paired_bootstrap(mine["nats"], other["nats"], mine["tokens"], change=perplexity_change)
    return {
        f"{name}_perplexity": change.value,
        f"{name}_perplexity_low": change.low,
        f"{name}_perplexity_high": change.high,
        f"{name}_shown": f"{change.value:+.2%} [{change.low:+.2%}, {change.high:+.2%}]",
    }


def measure_all(evaluation: Evaluation, variants: Sequence[Variant], config: PerplexityConfig) -> list[Row]:
    """Measure every variant.

    Compare it with the first variant, which should be `full`, and with `infinigen` at the same budget.

    After the deadline, only existing rows are returned.
    """
    tested, store = evaluation.tested, RowStore(evaluation.out)
    windows = cut_windows(tested, evaluation.text, config)
    shared = {"suite": "perplexity", **tested.identity, "text": text_digest(evaluation.text), **asdict(config)}
    rows: list[Row] = []
    for variant in variants:
        key = shared | {"variant": tested.key(variant)}
        if evaluation.deadline_passed() and store.get(key) is None:
            continue
        row = store.once(key, partial(measure, tested, variant, windows))
        row = tested.describe(variant) | {"text": evaluation.name, "context": config.context} | row
        rows.append(row | compare(row, rows[0] if rows else row, "against_full"))
        evaluation.say(
            f"{variant.label}: {row['bits_per_byte']:.4f} bits per byte, {row['sparse_attended']:.1%} attended"
        )
    _against_rivals(rows)
    return rows


def run_perplexity(evaluation: Evaluation, variants: Sequence[Variant], config: PerplexityConfig) -> Report:
    rows = measure_all(evaluation, variants, config)
    title = f"Perplexity of {evaluation.tested.name} on {evaluation.name}"
    about = evaluation.about(config) | {"decode_from": config.start, "bootstrap_seed": 0}
    report = Report("perplexity", title, about, COLUMNS, rows, NOTES)
    report.write(evaluation.out)
    draw(report, evaluation.out / "perplexity_by_attended_share.png")
    draw_chunks(report, evaluation.out / "perplexity_along_the_text.png")
    return report


def _against_rivals(rows: list[Row]) -> None:
    """Add the columns `against_infinigen_*`, which compare each row with `infinigen` at the same budget and dense
    layers.
    """
    for row in rows:
        same = [r for r in rows if all(r[key] == row[key] for key in ("budget", "dense_layers"))]
        mine = [r for r in same if r["policy"] == "infinigen" and r["budget"] is not None]
        if mine and row["policy"] != "infinigen":
            row |= compare(row, mine[0], "against_infinigen")


WHAT = (Column("model", "model"), Column("text", "text"), Column("context", "context"), Column("policy", "variant"))

COST = (
    Column("dense layers", "dense_layers"),
    Column("attended", "attended", ".1%"),
    Column("of sparse layers", "sparse_attended", ".1%"),
    Column("fetched", "fetched", ".1%"),
    Column("of sparse layers", "sparse_fetched", ".1%"),
)
"""Cost columns. In every table, they follow the accuracy columns."""

COLUMNS = (
    *WHAT,
    *COST,
    Column("missed mass", "missed", ".3f"),
    Column("worst layer", "missed_worst", ".3f"),
    Column("bits per byte", "bits_per_byte", ".4f"),
    Column("± SE", "bits_per_byte_error", ".4f"),
    Column("perplexity", "perplexity", ".3f"),
    Column("± SE", "perplexity_error", ".3f"),
    Column("perplexity against full [95 %]", "against_full_shown"),
    Column("against infinigen of the same budget [95 %]", "against_infinigen_shown"),
)

NOTES = (
    "Attended and fetched are fractions of the visible KV entries, means over layers and decoded positions. Missed",
    "mass is attention to tokens that are not attended, over sparse layers. Standard errors and paired bootstrap",
    "intervals (10,000 draws) are over windows. The margins at both ends of the text are not used.",
)


def draw(report: Report, path: Path) -> None:
    series: dict[str, list[tuple[float, float]]] = {}
    errors: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(report.rows, key=lambda row: row["sparse_attended"]):
        if row["policy"] == "full":
            continue
        extra = {k: v for k, v in row["options"].items() if k != "budget"} | row["engine"]
        name = " ".join([row["policy"], *(f"{k}={v}" for k, v in extra.items())])
        value, low, high = (row[f"against_full_perplexity{end}"] for end in ("", "_low", "_high"))
        series.setdefault(name, []).append((row["sparse_attended"], value))
        errors.setdefault(name, []).append((value - low, high - value))
    with picture(path, report.title, {"perplexity_against_full_by_attended_share": series}) as (axis,):
        lines(
            axis,
            series,
            x="attended share of the context in sparse layers",
            y="perplexity against full",
            percent="xy",
            errors=errors,
        )
        axis.axhline(0, color="#222222", linewidth=0.8)
        axis.axhline(0.01, color="#222222", linewidth=0.8, linestyle=":")


def draw_chunks(report: Report, path: Path) -> None:
    start = report.about["decode_from"]
    series = {}
    for row in report.rows:
        chunks = np.exp(np.array(row["samples"]["chunks"]).mean(0))
        series[row["variant"]] = [(start + CHUNK * (i + 0.5), float(value)) for i, value in enumerate(chunks)]
    with picture(path, f"{report.title}, by decoding chunk", series) as (axis,):
        lines(axis, series, x=f"token of the window (chunks of {CHUNK})", y="perplexity")
