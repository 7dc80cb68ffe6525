"""Choose options of the policy `infinigen` for one model and one text.

The search minimizes the bytes that the sparse layers read in a decode step: KV fetched from the host, and scoring keys
and resident KV on the device. The missed attention mass is measured at every decoded position in every layer, and it
must stay within a limit.

The search is greedy and handles one option at a time: scorer, source, window, skew. For each value of an option, it
finds by bisection the smallest `alpha` that meets the limit. The last stage starts from the best setting so far. It
tries a smaller `max_fraction`, with and without a threshold, and then `max_missed_mass` with a smaller alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, InputError
from ...policies.options import InfiniGenOptions
from ...policies.registry import memory_demand
from ...utils.config_fields import option
from ..core.report import Column, Report, Row, write_text
from ..core.variants import Scored, Text, Variant, text_digest

if TYPE_CHECKING:
    from ...skewing.artifact import SkewArtifact
    from ...skewing.tuned import TunedPolicy
    from ..core.model_under_test import ModelUnderTest

FRACTIONS = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
ALPHAS = (*(step / 2 for step in range(2, 17)), 9.0, 10.0, 12.0, 15.0, 20.0)
AIMS = (1.25, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.35, 0.25)
"""Values of `max_missed_mass` to try, relative to the limit of the search."""

REPAIR_FROM = (1.0, 2.0)
"""Values of `alpha` to try together with `max_missed_mass`."""

STAGES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("scorer", ("int8", "int4", "int2", "partial")),
    ("source", ("residual", "normed_input", "attention_input")),
    ("recent", (64, 16, 256)),
    ("skew", ("balanced", "svd")),
)
"""The options in search order, each with the values to try. The search starts with the first value of each option."""

UNLIMITED = 1e9
"""Value of `alpha` that has no effect. It is finite because JSON has no infinity."""

Options = dict[str, Any]


@dataclass(frozen=True)
class TuneConfig:
    max_missed_mass: float = option(0.01, help="limit on the missed attention mass of the worst layer", metavar="M")
    context: int = option(2048, help="tokens taken from the text", metavar="N")
    scored: int = option(128, help="tokens at their end that are decoded and measured", metavar="N")
    dense_layers: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not 0 < self.max_missed_mass < 1:
            raise ConfigError(f"max_missed_mass={self.max_missed_mass} must be in (0, 1)")
        if not 1 <= self.scored < self.context:
            raise ConfigError(f"scored={self.scored} must be between 1 and context - 1 = {self.context - 1}")


@dataclass(frozen=True)
class Trial:
    """One setting of the options and the results measured with it. Numbers of bytes are per decode step."""

    options: Options
    missed: float  # missed attention mass, mean over the sparse layers
    worst: float  # missed attention mass of the layer with the largest value
    attended: float  # exact attention fraction
    fetched_bytes: float  # bytes of KV copied from the host
    scoring_bytes: float  # bytes of scoring keys read on the device
    window_bytes: float  # bytes of resident KV read on the device

    @property
    def bytes(self) -> float:
        return self.fetched_bytes + self.scoring_bytes + self.window_bytes

    def keeps(self, limit: float) -> bool:
        return self.worst <= limit and self.missed <= limit

    def row(self, limit: float) -> Row:
        names = ("missed", "worst", "attended", "fetched_bytes", "scoring_bytes", "window_bytes", "bytes")
        shown = " ".join(
            f"{key}={value}" for key, value in self.options.items() if key not in ("dense_layers", "approximate_kv")
        )
        return {"setting": shown, "keeps": self.keeps(limit), **{name: getattr(self, name) for name in names}}


class Search:
    def __init__(self, tested: ModelUnderTest, text: Text, config: TuneConfig, done: Callable[[], None]) -> None:
        self.tested, self.text, self.config, self._done = tested, text, config, done
        self.trials: dict[str, Trial] = {}

    def measure(self, options: Options) -> Trial:
        key = repr(sorted(options.items()))
        if key not in self.trials:
            (scored,) = self.tested.score(Variant("infinigen", options, {"missed_mass_every": 1}), [self.text])
            self.trials[key] = self._trial(options, scored)
            self._done()
        return self.trials[key]

    def _trial(self, options: Options, scored: Scored) -> Trial:
        from ...policies.rule import dense_layers

        assert scored.missed is not None and scored.worst_layer is not None
        geometry, dtype = self.tested.geometry, self.tested.loaded.adapter.dtype
        chosen = InfiniGenOptions(**options)
        demand = memory_demand("infinigen", chosen, geometry, dtype)
        context = (self.text.decode_from + 1 + len(self.text.tokens)) / 2
        layers = frozenset(range(geometry.layers)) - dense_layers(chosen.dense_layers, geometry)
        seen = context * len(layers)
        token = geometry.full_rows.bytes(dtype)
        return Trial(
            options,
            scored.missed,
            scored.worst_layer,
            scored.sparse_attended,
            fetched_bytes=scored.sparse_fetched * seen * token,
            scoring_bytes=float(demand.scoring_bytes(demand.scored_layers(geometry), int(context))),
            window_bytes=min(chosen.sinks + chosen.recent, context) * token * len(layers),
        )

    def cheapest(self, trials: Sequence[Trial]) -> Trial:
        """Return the trial with the fewest bytes among those that meet the limit.

        If none does, return the trial with the lowest `worst`.
        """
        limit = self.config.max_missed_mass
        kept = [trial for trial in trials if trial.keeps(limit)]
        return min(kept, key=lambda t: t.bytes) if kept else min(trials, key=lambda t: t.worst)

    def smallest(self, options: Options, name: str, ladder: Sequence[float]) -> Trial:
        """Try values in `ladder` for the option `name`. Return the trial for the first value that meets the limit.

        If no value meets the limit, return the trial for the last value. The search is a bisection, so the missed
        attention mass must decrease along `ladder`.
        """
        low, high = 0, len(ladder) - 1
        while low < high:
            middle = (low + high) // 2
            if self.measure(options | {name: ladder[middle]}).keeps(self.config.max_missed_mass):
                high = middle
            else:
                low = middle + 1
        return self.measure(options | {name: ladder[low]})

    def run(self) -> Trial:
        fixed: Options = {name: values[0] for name, values in STAGES}
        fixed |= {"dense_layers": self.config.dense_layers, "approximate_kv": "off"}
        best = self.smallest(fixed | {"max_fraction": 1.0}, "alpha", ALPHAS)
        for name, values in STAGES:
            for value in values[1:]:
                other = self.smallest(best.options | {name: value}, "alpha", ALPHAS)
                best = self.cheapest([best, other])
        return self._last_stage(best)

    def _last_stage(self, best: Trial) -> Trial:
        limit, start = self.config.max_missed_mass, best.options
        others = [
            self.smallest(start | {"alpha": alpha}, "max_fraction", FRACTIONS) for alpha in (start["alpha"], UNLIMITED)
        ]
        aims = [round(limit * aim, 9) for aim in AIMS if limit * aim < 1]
        others += [self.smallest(start | {"alpha": alpha}, "max_missed_mass", aims) for alpha in REPAIR_FROM]
        return self.cheapest([best, *others])


def most_trials() -> int:
    """Return the maximum number of trials in a search, for progress bars."""

    def steps(ladder: Sequence[float]) -> int:
        return math.ceil(math.log2(len(ladder))) + 1

    fits = 1 + sum(len(values) - 1 for _, values in STAGES)
    return fits * steps(ALPHAS) + 2 * steps(FRACTIONS) + len(REPAIR_FROM) * steps(AIMS)


def cut_text(ids: Sequence[int], config: TuneConfig, positions: int) -> Text:
    """Return the first `context` tokens of a text, but at most `positions` tokens.

    The last `scored` of them are scored.

    Raises InputError if the text is too short.
    """
    tokens = tuple(ids[: min(config.context, positions)])
    if len(tokens) <= config.scored + 1:
        raise InputError(f"the text has {len(tokens)} tokens, too few for scored={config.scored}: use a longer text")
    start = len(tokens) - config.scored - 1
    return Text(tokens, start, start + 1)


def run_tune(
    tested: ModelUnderTest, text: str, name: str, config: TuneConfig, out: Path, done: Callable[[], None] = lambda: None
) -> tuple[Report, TunedPolicy]:
    """Search options using `text`, which results call `name`.

    Write skew.safetensors, policy.json and all trials to `out`.

    If no setting meets the limit, the setting with the lowest missed attention mass is written, marked with "kept":
    false.

    Raises:
        InputError: The text is too short, or `out` cannot be written.
        ConfigError: `dense_layers` is invalid for the model.
    """
    from ...skewing.calibrate import cached_artifact
    from ...skewing.tuned import TunedPolicy

    tokenizer = tested.loaded.tokenizer
    if tokenizer is None:
        raise InputError(f"{tested.model} has no tokenizer, which is needed to read the text")
    ids: Any = tokenizer(text)["input_ids"]
    cut = cut_text(list(ids), config, tested.geometry.max_positions)
    search = Search(tested, cut, config, done)
    best = search.run()
    limit = config.max_missed_mass
    measured = {
        "max_missed_mass": limit,
        "kept": best.keeps(limit),
        "objective": "bytes read per decode step in sparse layers: fetched KV + scoring keys + resident window",
        "text": name,
        "text_digest": text_digest(text),
        "context": len(cut.tokens),
        "scored": config.scored,
        "trials": len(search.trials),
        "choice": best.row(limit),
    }
    tuned = TunedPolicy("infinigen", best.options, tested.loaded.fingerprint, measured)
    rows = [trial.row(limit) | {"chosen": trial is best} for trial in search.trials.values()]
    title = f"Tuning infinigen for {tested.loaded.name}: at most {limit:.2%} missed"
    report = Report("tune", title, {**tested.identity, **measured}, COLUMNS, rows, NOTES)
    _save(cached_artifact(tested.loaded, InfiniGenOptions(**best.options).skew), tuned, report, out)
    return report, tuned


def _save(artifact: SkewArtifact, tuned: TunedPolicy, report: Report, out: Path) -> None:
    from ...skewing.tuned import ARTIFACT, POLICY

    try:
        artifact.save(out / ARTIFACT)
    except OSError as error:
        raise InputError(f"cannot write to {str(out)!r}: {error.strerror}") from error
    write_text(out / POLICY, tuned.text())
    report.write(out)


COLUMNS = (
    Column("setting", "setting"),
    Column("chosen", "chosen"),
    Column("keeps the limit", "keeps"),
    Column("missed attention mass", "missed", ".4f"),
    Column("worst layer", "worst", ".4f"),
    Column("attended", "attended", ".1%"),
    Column("bytes per step", "bytes", ",.0f"),
    Column("fetched", "fetched_bytes", ",.0f"),
    Column("scoring keys", "scoring_bytes", ",.0f"),
    Column("window", "window_bytes", ",.0f"),
)

NOTES = (
    "Missed attention mass is measured on unattended tokens: mean over decoded positions, heads and sparse layers.",
    "Bytes are read per decode step in the sparse layers; the objective is their sum. Settings are in order of trial.",
)
