"""The shipped policies' options, registered by name. Nothing here imports torch: the command line makes its flags
from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, Literal, get_args

from ..config import SkewMethod, Source
from ..errors import ConfigError
from ..utils.config_fields import check, check_choice, option
from .registry import PolicyOptions, register_policy

Scorer = Literal["auto", "partial", "int8", "int4", "int2"]
Columns = Literal["calibration", "prompt"]
TailBits = Literal["off", "int4", "int2"]
Asked = Literal["auto", Source, "query"]


def _layers(named: Iterable[int]) -> tuple[int, ...]:
    """Layers as Python's own numbers. Raises ConfigError for what is no list of whole numbers."""
    try:
        if not isinstance(named, (str, bytes)):
            return tuple(index(layer) for layer in named)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"dense_layers={named!r:.80} is {type(named).__name__}; it must be a list of layers")


def _check_window(sinks: int, recent: int, dense_layers: tuple[int, ...]) -> None:
    check(sinks >= 0, f"sinks={sinks} must not be negative")
    check(recent >= 1, f"recent={recent} must be at least 1: the newest token is always resident")
    check(all(i >= 0 for i in dense_layers), f"dense_layers={dense_layers} must not be negative")


def _check_selects(budget: float, sinks: int, recent: int, context: int) -> None:
    """Raises ConfigError where sinks and recent window alone are more than a budget's share of `context` tokens."""
    check(
        budget * context >= sinks + recent + 1,
        f"budget={budget} of {context:,} tokens is {int(budget * context):,}, and sinks={sinks} and recent={recent} "
        f"are attended in any case: nothing would ever be selected; set a budget of {sinks + recent + 1:,} tokens or "
        "more, or smaller ones of these",
    )


@register_policy("full", "offload_rt.policies.full:Full")
@dataclass(frozen=True)
class FullOptions(PolicyOptions):
    """Policy "full" attends to everything and has no options."""


@register_policy("infinigen", "offload_rt.policies.infinigen.policy:InfiniGen")
@dataclass(frozen=True)
class InfiniGenOptions(PolicyOptions):
    """InfiniGen's token selection (paper §4.3) and what we add to it.

    alpha: a token is a candidate if its score is within alpha of its head's maximum; None takes the family's value
        (4 for OPT and GPT-2, 5 for Llama). `inf` makes everything a candidate.
    partial_ratio: share of the head dimension that scoring keys keep (scorers "partial" and "int8").
    max_fraction: the count of a layer never exceeds this share of its candidates.
    source: what predicts layer i's query: layer i-1's attention input (paper), layer i's own norm of layer i-1's
        input, or of layer i-1's residual after its attention; or nothing does, "query": the layer's own selects, too
        late to fetch ahead. "auto" is "attention_input" on a device, where layer i's rows then follow layer i-1's on
        the link without a pause (the residual guesses as well and comes a whole attention later), and "query" on a
        CPU, where nothing is on its way while layers compute: one product less, and the scores that select weigh the
        tail too.
    corrected: whether that guess is corrected channel by channel as calibration found it to be off (the paper: not).
    scorer: "partial" columns in the model's dtype, the same columns as int8 ("int8"), or all columns as int4 / int2.
        "auto" are the tail's 4-bit keys where there is a tail, else int8; any other needs tail="off".
    tail: with "int4" or "int2", low-bit copies of all rows stay on the device, keys in 4 bits and values in so many,
        and what is not selected is estimated from them: one softmax over exact rows and estimate. "off" leaves it out.
    columns: kept columns fixed at calibration, or chosen from each prompt (paper).
    skew: rotation fitted to queries alone (paper) or to queries and keys.
    max_missed_mass: with a number, layer i's true query scores again and rows are fetched until the estimated
        attention mass outside the attended set is at most this (mean over query heads); None never repairs.
    budget: with a number, layers select as many tokens as make this share of the visible context with the resident
        ones, instead of those above the threshold (to compare policies); `alpha` and `max_fraction` then only cap a
        repair.

    Preset "default" are the values below, what measures best on real models: 2 % of the rows exact, the others
    estimated from low-bit copies on the device (26 % of the 16-bit KV cache), no dense layer. "rows" does without the
    copies: selected rows alone, 10 % at most, layer 0 dense. "paper" is InfiniGen as published: no tail, no window,
    partial scorer, attention input, columns by prompt, layer 0 dense.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "rows": {"tail": "off", "max_fraction": 0.1, "dense_layers": (0,)},
        "paper": {
            "tail": "off",
            "partial_ratio": 0.3,
            "max_fraction": 0.2,
            "source": "attention_input",
            "corrected": False,
            "scorer": "partial",
            "columns": "prompt",
            "skew": "svd",
            "sinks": 0,
            "recent": 1,
            "dense_layers": (0,),
        },
    }

    alpha: float | None = option(None, help="threshold below a head's largest score", metavar="A")
    partial_ratio: float = option(0.3, help="share of the head dimension scored, (0, 1]", metavar="R")
    max_fraction: float = option(0.02, help="largest share of tokens fetched, (0, 1]", metavar="F")
    source: Asked = option("auto", help="what a layer's query is guessed from; auto: its own query on a CPU")
    corrected: bool = option(True, help="correct guesses as calibration found them to be off")
    scorer: Scorer = option("auto", help="how scoring keys are stored; auto: by the tail, or int8 without one")
    columns: Columns = option("calibration", help="who chooses the columns that are scored")
    skew: SkewMethod = option("balanced", help="how the skew is calibrated", flag="--skew-method")
    sinks: int = option(4, help="first tokens that stay on the device", metavar="N")
    recent: int = option(64, help="last tokens that stay on the device", metavar="N")
    dense_layers: tuple[int, ...] = option((), help="layers that attend to everything; 'none'", metavar="0,1")
    max_missed_mass: float | None = option(
        None, help="fetch more until the estimated mass left out is at most M", metavar="M"
    )
    budget: float | None = option(None, help="share of the context attended, (0, 1]", metavar="F")
    tail: TailBits = option("int4", help="estimate what is not selected from values of so many bits", neutral="off")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_layers", _layers(self.dense_layers))
        check(self.alpha is None or self.alpha >= 0, f"alpha={self.alpha} must not be negative")
        check(0 < self.partial_ratio <= 1, f"partial_ratio={self.partial_ratio} must be in (0, 1]")
        check(0 < self.max_fraction <= 1, f"max_fraction={self.max_fraction} must be in (0, 1]")
        check_choice("source", self.source, ("auto", *get_args(Source), "query"))
        check_choice("scorer", self.scorer, get_args(Scorer))
        check_choice("columns", self.columns, get_args(Columns))
        check_choice("tail", self.tail, get_args(TailBits))
        for name, value, own in (("scorer", self.scorer, "auto"), ("columns", self.columns, "calibration")):
            check(
                self.tail == "off" or value == own,
                f"{name}={value!r} needs tail='off' (or preset='rows'): tail={self.tail!r} scores with its own keys",
            )
        check(
            self.keys != "int8" or self.columns == "calibration",
            f"scorer='int8' scales its columns by calibration; columns={self.columns!r} needs scorer='partial'",
        )
        check_choice("skew", self.skew, get_args(SkewMethod))
        _check_window(self.sinks, self.recent, self.dense_layers)
        check(
            self.max_missed_mass is None or 0 < self.max_missed_mass < 1,
            f"max_missed_mass={self.max_missed_mass} must be in (0, 1)",
        )
        check(self.budget is None or 0 < self.budget <= 1, f"budget={self.budget} must be in (0, 1]")

    def check_context(self, context: int) -> None:
        """With a tail a budget below the window still says something: what estimates alone are worth."""
        if self.budget is not None and self.tail == "off":
            _check_selects(self.budget, self.sinks, self.recent, context)

    @property
    def keys(self) -> Scorer:
        """How scoring keys are stored where there is no tail."""
        return "int8" if self.scorer == "auto" else self.scorer

    @property
    def whole(self) -> int:
        """Contexts of up to so many tokens are attended to as a whole, on a device too."""
        return 0

    def lineage_value(self, name: str) -> Any:
        """Options that are the same as before there was "auto" have the same lineage, with a tail too."""
        if name == "source" and self.source == "auto":
            return "residual"
        return self.keys if name == "scorer" else super().lineage_value(name)


@register_policy("auto", "offload_rt.policies.auto:Auto")
@dataclass(frozen=True)
class AutoOptions(InfiniGenOptions):
    """Policy "auto": "infinigen", with its options, that attends to all of a context while that is cheaper.

    dense_until: contexts of up to so many tokens are attended to as a whole; None is what the model's shapes say
        (`select.auto`): on a CPU, where selecting has a price, and 0 on a device, where each row crosses the link.
    """

    dense_until: int | None = option(
        None, help="tokens up to which all are attended to (default: by cost)", metavar="N"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.dense_until is None or self.dense_until >= 0, f"dense_until={self.dense_until} must not be negative")

    @property
    def whole(self) -> int:
        """As `dense_until` says."""
        return self.dense_until or 0


@register_policy("h2o", "offload_rt.policies.h2o:H2O")
@register_policy("streaming", "offload_rt.policies.streaming:Streaming")
@register_policy("oracle", "offload_rt.policies.oracle:Oracle")
@dataclass(frozen=True)
class BudgetOptions(PolicyOptions):
    """A policy that attends to a fixed share of the visible context, resident tokens included. Sinks and recent window
    are always attended, even where they alone exceed the budget."""

    budget: float = option(0.1, help="share of the context attended, (0, 1]", metavar="F")
    sinks: int = option(4, help="first tokens that stay on the device", metavar="N")
    recent: int = option(64, help="last tokens that stay on the device", metavar="N")
    dense_layers: tuple[int, ...] = option((0,), help="layers that attend to everything; 'none'", metavar="0,1")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_layers", _layers(self.dense_layers))
        check(0 < self.budget <= 1, f"budget={self.budget} must be in (0, 1]")
        _check_window(self.sinks, self.recent, self.dense_layers)

    def check_context(self, context: int) -> None:
        """A budget below the window selects nothing."""
        _check_selects(self.budget, self.sinks, self.recent, context)


@register_policy("quest", "offload_rt.policies.quest:Quest")
@dataclass(frozen=True)
class QuestOptions(BudgetOptions):
    """Quest's page of tokens that share one pair of bounds (16 in the publication)."""

    page: int = option(16, help="tokens that share one pair of bounds", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.page >= 1, f"page={self.page} must be at least 1")
