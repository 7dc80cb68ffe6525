"""Options of the built-in policies, registered by name.

This module does not import torch, because the command line builds its flags from these options.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar, Literal

from ..config import SkewMethod, Source
from ..errors import ConfigError
from ..utils.config_fields import check, option
from .registry import PolicyOptions, register_policy

Scorer = Literal["auto", "partial", "int8", "int4", "int2"]
Columns = Literal["calibration", "prompt"]
ApproximateKVBits = Literal["off", "int4", "int2"]
SourceOption = Literal["auto", Source, "query"]


def _layers(named: Iterable[int]) -> tuple[int, ...]:
    try:
        if not isinstance(named, (str, bytes)):
            return tuple(index(layer) for layer in named)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"dense_layers={named!r:.80} is {type(named).__name__}; expected a list of layer indices")


def _check_window(recent: int, dense_layers: tuple[int, ...]) -> None:
    check(recent >= 1, f"recent={recent} must be at least 1: the newest token is always resident")
    check(all(i >= 0 for i in dense_layers), f"dense_layers={dense_layers} must not be negative")


def _check_selects(budget: float, sinks: int, recent: int, context: int) -> None:
    check(
        budget * context >= sinks + recent + 1,
        f"budget={budget} of {context:,} tokens is {int(budget * context):,} tokens, which sinks={sinks} and "
        f"recent={recent} use up, so nothing would be selected; set a budget of at least {sinks + recent + 1:,} "
        "tokens, or reduce sinks or recent",
    )


@register_policy("full", "offload_rt.policies.full:Full")
@dataclass(frozen=True)
class FullOptions(PolicyOptions): ...


@register_policy("infinigen", "offload_rt.policies.infinigen.policy:InfiniGen")
@dataclass(frozen=True)
class InfiniGenOptions(PolicyOptions):
    """Options of InfiniGen's token selection (paper §4.3) and its extensions.

    The preset "default" has the default values of the fields, which gave the best results in measurements on real
    models. It attends exactly to 2 % of the tokens, and approximately to all others. Approximate KV takes 26 % of the
    size of the 16-bit KV cache. No layer is dense.

    The preset "rows" has no approximate KV. It attends only to the selected tokens, which are at most 10 %. Layer 0 is
    dense.

    The preset "paper" is InfiniGen as published: no approximate KV, no recent window, scorer "partial", source
    "attention_input", and columns that are chosen from the prompt. Layer 0 is dense.

    Attributes:
        alpha: A token is selected if its score is within `alpha` of the largest score of its head. None uses the
            default of the model family (4 for OPT and GPT-2, 5 for Llama). With `inf`, only `max_fraction` limits the
            selection.
        partial_ratio: Fraction of the head dimension that scoring keys keep (scorers "partial" and "int8").
        max_fraction: Maximum fraction of the candidates that a layer selects.
        source: Input that is used to predict the query of layer i: the attention input of layer i-1
            ("attention_input", paper), the input of layer i-1 with the norm of layer i ("normed_input"), or the
            residual after the attention of layer i-1 ("residual"). "query" is the true query of layer i, which leaves
            no time to prefetch. "auto" means "query" on a CPU and "attention_input" otherwise.
        ahead: If set, the query of layer i is predicted from the input of the decoder layer that comes `ahead` layers
            earlier, with the norm of layer i. Inputs before attention layer i-1 are never used. For models without
            recurrent layers, this equals the source "normed_input". A small value finds more important tokens, while a
            large value leaves more time for the transfer. None uses `source`.
        corrected: Whether to correct the predicted attention input with a calibrated slope and offset per channel (not
            in the paper).
        scorer: Format of the scoring keys: some columns in the model's dtype ("partial") or as int8 ("int8"), or all
            columns as int4 or int2 ("int4", "int2"). "auto" uses the 4-bit keys of the approximate KV if it is enabled,
            and "int8" otherwise. All values except "auto" require `approximate_kv="off"`.
        approximate_kv: "int4" or "int2" keeps approximate KV of all tokens on the device, with 4-bit keys and 4-bit or
            2-bit values. A single softmax covers the selected tokens and the estimate for all other tokens. With "off",
            tokens that are not selected are ignored.
        columns: Whether the columns of scoring keys are chosen at calibration or from each prompt (paper).
        skew: Whether the rotation is fitted only to queries (paper) or to both queries and keys.
        max_missed_mass: More tokens, scored with the true query, are fetched until the estimated missed attention mass
            (mean over query heads) is at most this value. None disables this repair.
        budget: Fraction of the visible context to attend to, including resident tokens. If set, it replaces the
            threshold, so that policies can be compared at equal cost. `alpha` and `max_fraction` then limit only
            repairs.
    """

    # The meaning of source="auto" depends on the device. On a GPU, "attention_input" lets the transfers for layer i
    # start right after the transfers for layer i-1. "residual" is just as accurate, but is available only after the
    # attention of layer i-1. On a CPU, KV is not prefetched, so "query" is used: it saves one matrix product, and its
    # scores also serve as weights for approximate KV.

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "rows": {"approximate_kv": "off", "max_fraction": 0.1, "dense_layers": (0,)},
        "paper": {
            "approximate_kv": "off",
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

    alpha: float | None = option(None, help="threshold below a head's largest score", metavar="A", least=0)
    partial_ratio: float = option(0.3, help="fraction of the head dimension that is scored, (0, 1]", metavar="R")
    max_fraction: float = option(0.02, help="largest fraction of tokens fetched, (0, 1]", metavar="F")
    source: SourceOption = option("auto", help="where a layer's query is predicted from; auto: its own query on a CPU")
    ahead: int | None = option(
        None, help="hybrid models: predict queries N decoder layers before (default: in the attention layer before)",
        metavar="N", neutral=None, least=1,
    )  # fmt: skip
    corrected: bool = option(True, help="correct predicted queries as calibrated")
    scorer: Scorer = option("auto", help="storage of scoring keys; auto: approximate KV if kept, else int8")
    columns: Columns = option("calibration", help="when the scored columns are chosen")
    skew: SkewMethod = option("balanced", help="method of fitting the skew", flag="--skew-method")
    sinks: int = option(4, help="first tokens that stay on the device", metavar="N", least=0)
    recent: int = option(64, help="last tokens that stay on the device", metavar="N")
    dense_layers: tuple[int, ...] = option((), help="layers that attend to all tokens; 'none'", metavar="0,1")
    max_missed_mass: float | None = option(
        None, help="fetch more tokens until the estimated missed attention mass is at most M", metavar="M"
    )
    budget: float | None = option(None, help="fraction of the context attended, (0, 1]", metavar="F")
    approximate_kv: ApproximateKVBits = option(
        "int4",
        help="bits of the values in the approximate KV of tokens not selected",
        neutral="off",
        stored_name="tail",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_layers", _layers(self.dense_layers))
        check(0 < self.partial_ratio <= 1, f"partial_ratio={self.partial_ratio} must be in (0, 1]")
        check(0 < self.max_fraction <= 1, f"max_fraction={self.max_fraction} must be in (0, 1]")
        check(
            self.ahead is None or self.source == "auto",
            f"ahead={self.ahead} replaces source={self.source!r}; leave one of them out",
        )
        for name, value, required in (("scorer", self.scorer, "auto"), ("columns", self.columns, "calibration")):
            check(
                self.approximate_kv == "off" or value == required,
                f"{name}={value!r} needs approximate_kv='off' (or preset='rows'): "
                f"approximate_kv={self.approximate_kv!r} scores with its own keys",
            )
        check(
            self.keys != "int8" or self.columns == "calibration",
            f"columns={self.columns!r} needs scorer='partial': scorer='int8' scales its columns at calibration",
        )
        _check_window(self.recent, self.dense_layers)
        check(
            self.max_missed_mass is None or 0 < self.max_missed_mass < 1,
            f"max_missed_mass={self.max_missed_mass} must be in (0, 1)",
        )
        check(self.budget is None or 0 < self.budget <= 1, f"budget={self.budget} must be in (0, 1]")

    def check_context(self, context: int) -> None:
        # With approximate KV, a budget smaller than the window is allowed, in order to measure the estimate alone.
        if self.budget is not None and self.approximate_kv == "off":
            _check_selects(self.budget, self.sinks, self.recent, context)

    @property
    def keys(self) -> Scorer:
        """Format of the scoring keys that is used if there is no approximate KV."""
        return "int8" if self.scorer == "auto" else self.scorer

    @property
    def always_dense_until(self) -> int:
        """Length in tokens of the longest context for which every layer attends to all tokens on any device."""
        return 0

    def provenance_value(self, name: str) -> Any:
        # For "auto", return the same text as for the earlier defaults, so that existing KV provenance keys stay valid.
        if name == "source" and self.source == "auto":
            return "residual"
        return self.keys if name == "scorer" else super().provenance_value(name)


@register_policy("auto", "offload_rt.policies.auto:Auto")
@dataclass(frozen=True)
class AutoOptions(InfiniGenOptions):
    """Options of the policy "auto", which attends to all tokens as long as this is cheaper than selection."""

    # Length in tokens of the longest context in which every layer attends to all tokens. If None, it is measured once
    # per processor on a CPU (`engine.selection_cost`). On a GPU, None means 0, because otherwise all KV would have to
    # be transferred.
    dense_until: int | None = option(
        None, help="attend to all tokens of contexts up to N tokens (default: by cost)", metavar="N", least=0
    )

    @property
    def always_dense_until(self) -> int:
        return self.dense_until or 0


@register_policy("h2o", "offload_rt.policies.h2o:H2O")
@register_policy("streaming", "offload_rt.policies.streaming:Streaming")
@register_policy("oracle", "offload_rt.policies.oracle:Oracle")
@dataclass(frozen=True)
class BudgetOptions(PolicyOptions):
    """Options of policies that attend to a fixed fraction of the visible context, including resident tokens.

    The sinks and the recent window are always attended to, even if they exceed the budget.
    """

    budget: float = option(0.1, help="fraction of the context attended, (0, 1]", metavar="F")
    sinks: int = option(4, help="first tokens that stay on the device", metavar="N", least=0)
    recent: int = option(64, help="last tokens that stay on the device", metavar="N")
    dense_layers: tuple[int, ...] = option((0,), help="layers that attend to all tokens; 'none'", metavar="0,1")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dense_layers", _layers(self.dense_layers))
        check(0 < self.budget <= 1, f"budget={self.budget} must be in (0, 1]")
        _check_window(self.recent, self.dense_layers)

    def check_context(self, context: int) -> None:
        _check_selects(self.budget, self.sinks, self.recent, context)


@register_policy("quest", "offload_rt.policies.quest:Quest")
@dataclass(frozen=True)
class QuestOptions(BudgetOptions):
    """Options of the policy "quest". The paper uses pages of 16 tokens."""

    page: int = option(16, help="tokens of a page, which share one pair of bounds", metavar="N", least=1)
