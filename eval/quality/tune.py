"""Chooses the options of `infinigen` that keep a limit on the missed attention mass at the fewest bytes, for one model
on one text.

Missed mass is true (exact scores of every decoded position of the text, beside what was attended), and the limit holds
for the worst layer's mean, hence for the mean of the layers. Bytes are what a decode step reads in the layers that
select: rows over the link, the scoring keys, and the resident window, the last two on the device, each once a step.

The search is staged, one option after another with the others kept: for each value of scorer, source, window and skew
the smallest `alpha` of a ladder that keeps the limit (without a cap) is found by bisection; then the tightest cap for
that alpha, a plain share instead of a threshold, and whether `repair` from a smaller alpha is cheaper still. What is
not on this path is not tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, InputError
from ...policies.budget import dense_layers
from ...policies.options import InfiniGenOptions
from ...policies.registry import memory_demand
from ...skewing.artifact import SkewArtifact
from ...skewing.tuned import ARTIFACT, POLICY, TunedPolicy
from ..core.model_under_test import ModelUnderTest, Text, Variant, text_digest
from ..core.report import Column, Report, Row, write_atomic

FRACTIONS = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
ALPHAS = (*(step / 2 for step in range(2, 17)), 9.0, 10.0, 12.0, 15.0, 20.0)
AIMS = (1.25, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25)
"""What `repair` aims at, by its own estimate, in units of the limit."""

REPAIR_FROM = (1.0, 2.0)
"""Alphas that repair starts from."""

STAGES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("scorer", ("int8", "int4", "int2", "partial")),
    ("source", ("residual", "normed_input", "attention_input")),
    ("recent", (64, 16, 256)),
    ("skew", ("balanced", "svd")),
)
"""The first value of each is where the search begins."""

UNLIMITED = 1e9
"""An alpha without effect, and a number in JSON."""

Options = dict[str, Any]


@dataclass(frozen=True)
class TuneConfig:
    """max_missed_mass: the limit. context: tokens of the text taken. scored: of them, the last ones, decoded and
    measured. dense_layers: not searched."""

    max_missed_mass: float = 0.01
    context: int = 2048
    scored: int = 128
    dense_layers: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not 0 < self.max_missed_mass < 1:
            raise ConfigError(f"max_missed_mass={self.max_missed_mass} must be in (0, 1)")
        if not 1 <= self.scored < self.context:
            raise ConfigError(f"scored={self.scored} must be between 1 and context - 1 = {self.context - 1}")


@dataclass(frozen=True)
class Trial:
    """One setting, measured. bytes: read per decode step in the layers that select (link, scoring keys, window)."""

    options: Options
    missed: float
    worst: float
    attended: float
    link_bytes: float
    scoring_bytes: float
    window_bytes: float

    @property
    def bytes(self) -> float:
        """The objective."""
        return self.link_bytes + self.scoring_bytes + self.window_bytes

    def keeps(self, limit: float) -> bool:
        """Whether mean and worst layer are within the limit."""
        return self.worst <= limit and self.missed <= limit

    def row(self, limit: float) -> Row:
        """For the table."""
        names = ("missed", "worst", "attended", "link_bytes", "scoring_bytes", "window_bytes", "bytes")
        shown = " ".join(f"{key}={value}" for key, value in self.options.items() if key not in ("dense_layers", "tail"))
        return {"setting": shown, "keeps": self.keeps(limit), **{name: getattr(self, name) for name in names}}


class Search:
    """Measures settings, each once, and walks the stages."""

    def __init__(self, tested: ModelUnderTest, text: Text, config: TuneConfig, done: Callable[[], None]) -> None:
        self.tested, self.text, self.config, self._done = tested, text, config, done
        self.trials: dict[str, Trial] = {}

    def measure(self, options: Options) -> Trial:
        """The setting on the text, every position from `decode_from` on decoded."""
        key = repr(sorted(options.items()))
        if key not in self.trials:
            (scored,) = self.tested.score(Variant("infinigen", options), [self.text])
            assert scored.missed is not None and scored.missed_worst is not None
            self.trials[key] = self._trial(options, scored.missed, scored.missed_worst, scored)
            self._done()
        return self.trials[key]

    def _trial(self, options: Options, missed: float, worst: float, scored: Any) -> Trial:
        geometry, dtype = self.tested.geometry, self.tested.loaded.adapter.dtype
        chosen = InfiniGenOptions(**options)
        demand = memory_demand("infinigen", chosen, geometry, dtype)
        context = (self.text.decode_from + 1 + len(self.text.tokens)) / 2
        layers = frozenset(range(geometry.layers)) - dense_layers(chosen.dense_layers, geometry)
        seen = context * len(layers)
        token = geometry.kv_bytes(1, dtype) / geometry.layers
        return Trial(
            options,
            missed,
            worst,
            scored.sparse_attended,
            link_bytes=scored.sparse_link * seen * token,
            scoring_bytes=float(demand.scoring_bytes(geometry.layers, int(context))),
            window_bytes=min(chosen.sinks + chosen.recent, context) * token * len(layers),
        )

    def cheapest(self, trials: Sequence[Trial]) -> Trial:
        """The one of fewest bytes among those that keep the limit; where none does, the one that misses least."""
        limit = self.config.max_missed_mass
        kept = [trial for trial in trials if trial.keeps(limit)]
        return min(kept, key=lambda t: t.bytes) if kept else min(trials, key=lambda t: t.worst)

    def smallest(self, options: Options, name: str, ladder: Sequence[float]) -> Trial:
        """The setting with the first value of `name` on the ladder that keeps the limit, by bisection: missed mass
        falls along it. Where none keeps it, the last."""
        low, high = 0, len(ladder) - 1
        while low < high:
            middle = (low + high) // 2
            if self.measure(options | {name: ladder[middle]}).keeps(self.config.max_missed_mass):
                high = middle
            else:
                low = middle + 1
        return self.measure(options | {name: ladder[low]})

    def run(self) -> Trial:
        """All stages; the setting chosen."""
        fixed: Options = {name: values[0] for name, values in STAGES}
        fixed |= {"dense_layers": self.config.dense_layers, "tail": "off"}
        best = self.smallest(fixed | {"max_fraction": 1.0}, "alpha", ALPHAS)
        for name, values in STAGES:
            for value in values[1:]:
                other = self.smallest(best.options | {name: value}, "alpha", ALPHAS)
                best = self.cheapest([best, other])
        return self._last_stage(best)

    def _last_stage(self, best: Trial) -> Trial:
        """The cap for the threshold found, a plain share in its place, and repair."""
        limit, start = self.config.max_missed_mass, best.options
        others = [
            self.smallest(start | {"alpha": alpha}, "max_fraction", FRACTIONS) for alpha in (start["alpha"], UNLIMITED)
        ]
        aims = [round(limit * aim, 9) for aim in AIMS if limit * aim < 1]
        others += [self.smallest(start | {"alpha": alpha}, "max_missed_mass", aims) for alpha in REPAIR_FROM]
        return self.cheapest([best, *others])


def most_trials() -> int:
    """An upper bound of settings measured, for progress bars."""

    def steps(ladder: Sequence[float]) -> int:
        return math.ceil(math.log2(len(ladder))) + 1

    fits = 1 + sum(len(values) - 1 for _, values in STAGES)
    return fits * steps(ALPHAS) + 2 * steps(FRACTIONS) + len(REPAIR_FROM) * steps(AIMS)


def cut_text(ids: Sequence[int], config: TuneConfig, positions: int) -> Text:
    """The first `context` tokens (at most the model's positions); the last `scored` of them are decoded. Raises
    InputError where the text is too short."""
    tokens = tuple(ids[: min(config.context, positions)])
    if len(tokens) <= config.scored + 1:
        raise InputError(f"the text has {len(tokens)} tokens, too few for {config.scored} scored ones after a prompt")
    start = len(tokens) - config.scored - 1
    return Text(tokens, start, start + 1)


def verify(tested: ModelUnderTest, trial: Trial, text: Text) -> Row:
    """The setting once more through `LLM.score`, step by step, the missed mass probed at every step."""
    (scored,) = tested.score_by_step(Variant("infinigen", trial.options, {"missed_mass_every": 1}), [text])
    return {
        "missed_mass": scored.missed,
        "missed_mass_worst_layer": scored.missed_worst,
        "sparse_exact_fraction": scored.sparse_attended,
        "sparse_fetched_fraction": scored.sparse_link,
        "nats_per_token": sum(scored.nats) / len(scored.nats),
    }


def run_tune(
    tested: ModelUnderTest, text: str, name: str, config: TuneConfig, out: Path, done: Callable[[], None] = lambda: None
) -> tuple[Report, TunedPolicy]:
    """Searches on `text` (called `name`), and writes skew.safetensors, policy.json and the table of all trials into
    `out`. The choice is written also where nothing keeps the limit (then it is what misses least), and says so.

    Raises InputError where the text is too short or `out` cannot be written, ConfigError for layers.
    """
    tokenizer = tested.loaded.tokenizer
    if tokenizer is None:
        raise InputError(f"{tested.model} has no tokenizer: there is no way to read the text")
    ids: Any = tokenizer(text)["input_ids"]
    cut = cut_text(list(ids), config, tested.geometry.max_positions)
    search = Search(tested, cut, config, done)
    best = search.run()
    limit = config.max_missed_mass
    through = verify(tested, best, cut)
    keeps = best.keeps(limit) and through["missed_mass_worst_layer"] <= limit
    measured = {
        "max_missed_mass": limit,
        "kept": keeps,
        "objective": "bytes read per decode step in the layers that select: link + scoring keys + resident window",
        "text": name,
        "text_digest": text_digest(text),
        "context": len(cut.tokens),
        "scored": config.scored,
        "trials": len(search.trials),
        "choice": best.row(limit),
        "through_llm_score": through,
    }
    tuned = TunedPolicy("infinigen", best.options, tested.loaded.fingerprint, measured)
    rows = [trial.row(limit) | {"chosen": trial is best} for trial in search.trials.values()]
    title = f"Tuning infinigen for {tested.loaded.name}: at most {limit:.2%} missed"
    report = Report("tune", title, {**tested.identity, **measured}, COLUMNS, rows, NOTES)
    _save(tested.artifact(InfiniGenOptions(**best.options).skew), tuned, report, out)
    return report, tuned


def _save(artifact: SkewArtifact, tuned: TunedPolicy, report: Report, out: Path) -> None:
    try:
        artifact.save(out / ARTIFACT)
    except OSError as error:
        raise InputError(f"cannot write to {str(out)!r}: {error.strerror}") from error
    write_atomic(out / POLICY, tuned.text())
    report.write(out)


COLUMNS = (
    Column("setting", "setting"),
    Column("chosen", "chosen"),
    Column("keeps the limit", "keeps"),
    Column("missed mass", "missed", ".4f"),
    Column("worst layer", "worst", ".4f"),
    Column("attended", "attended", ".1%"),
    Column("bytes per step", "bytes", ",.0f"),
    Column("link", "link_bytes", ",.0f"),
    Column("scoring keys", "scoring_bytes", ",.0f"),
    Column("window", "window_bytes", ",.0f"),
)

NOTES = (
    "Missed mass is true: attention outside the attended rows, mean over decoded positions, heads, layers that select.",
    "Bytes are read per decode step in the layers that select; the objective is their sum. Settings in order of trial.",
)
