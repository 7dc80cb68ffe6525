"""Configuration: frozen dataclasses, validated when they are made; unknown keys raise `ConfigError`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypeVar, get_args

from .errors import ConfigError

Source = Literal["attention_input", "normed_input", "residual"]
Scorer = Literal["partial", "int8", "int4", "int2"]
Columns = Literal["calibration", "prompt"]
SkewMethod = Literal["svd", "balanced"]
EarlyStopping = bool | Literal["never"]
KVFormatName = Literal["auto", "int8", "int4", "int2"]
Overflow = Literal["truncate", "error"]
DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024), ("", 1024))
}

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

T = TypeVar("T")


def parse_size(size: int | str, name: str = "size") -> int:
    """Bytes from an int or from a string such as "200GiB", "1.5GB", "512M" (bare K, M, G, T are binary).

    Raises ConfigError where it is no size or not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?(?:i?B)?|B)\s*", size, re.IGNORECASE)
        unit = next((u for u in _UNITS if match and u.lower() == match[2].lower()), None)
        if match is None or unit is None:
            raise ConfigError(f"{name}={size!r} is no size; write bytes or a number with a unit, such as '200GiB'")
        size = int(float(match[1]) * _UNITS[unit])
    if size <= 0:
        raise ConfigError(f"{name}={size} must be positive")
    return size


def parse_duration(duration: float | str, name: str = "duration") -> float:
    """Seconds from a number or from a string such as "90s", "30m", "12h", "7d", "2w".

    Raises ConfigError where it is no duration or not positive.
    """
    if isinstance(duration, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)\s*", duration, re.IGNORECASE)
        if match is None:
            raise ConfigError(f"{name}={duration!r} is no duration; write seconds, or a number with a unit as in '7d'")
        duration = float(match[1]) * _SECONDS[match[2].lower()]
    if not 0 < duration < math.inf:
        raise ConfigError(f"{name}={duration} must be positive and finite")
    return float(duration)


def format_duration(seconds: float) -> str:
    """`seconds` in the largest unit of which there are two or more: "45 s", "90 min", "36 h", "12 d"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_size(size: float) -> str:
    """`size` bytes in the largest binary unit that keeps it at 1 or above, three significant digits: "1.46 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:.0f} TiB"


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError, with the nearest spelling, where `value` is none of `choices`."""
    known = list(choices)
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        raise ConfigError(
            f"{name}={value!r} is unknown{f'; did you mean {near[0]!r}?' if near else ''} (one of: {', '.join(known)})"
        )


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def from_mapping(cls: type[T], options: Mapping[str, Any]) -> T:
    """An instance of the configuration dataclass `cls`; a key it does not have raises ConfigError."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in options:
        check_choice(f"option of {cls.__name__}", key, known)
    return cls(**options)


@dataclass(frozen=True)
class SamplingParams:
    """How new tokens are chosen. `temperature=0` is greedy; the filters apply in transformers' order: repetition
    penalty, temperature, top-k, top-p, min-p. The same seed gives the same text. `stop` is one string or several.

    n: completions of each prompt, which is computed once. Each has a seed of its own, made from `seed` and its number;
        the first one's is `seed` itself, so that it equals the completion of n=1.
    num_beams: above 1, beam search as transformers' `generate(num_beams=...)`, with `temperature=0` (it draws nothing);
        `n` of the beams are returned, best first.
    length_penalty: a beam's score is its log-probability over its length to this power: above 0 favours long ones.
    early_stopping: True stops when there are `num_beams` finished ones, False when better ones are unlikely, "never"
        when there cannot be any.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        _check(self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens} must be at least 1")
        _check(
            0 <= self.temperature < math.inf,
            f"temperature={self.temperature} must be finite and not negative; 0 is greedy",
        )
        _check(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k} must be at least 1")
        _check(self.top_p is None or 0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]")
        _check(self.min_p is None or 0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]")
        _check(
            0 < self.repetition_penalty < math.inf,
            f"repetition_penalty={self.repetition_penalty} must be positive; 1 is none",
        )
        _check(all(self.stop), "a stop string must not be empty")
        _check(self.n >= 1, f"n={self.n} must be at least 1")
        _check(self.num_beams >= 1, f"num_beams={self.num_beams} must be at least 1; 1 is no beam search")
        _check(math.isfinite(self.length_penalty), f"length_penalty={self.length_penalty} must be finite")
        _check(
            self.early_stopping in (True, False, "never"),
            f"early_stopping={self.early_stopping!r}: True, False, 'never'",
        )
        self._check_beams()

    def _check_beams(self) -> None:
        if self.num_beams > 1:
            _check(
                self.temperature == 0,
                f"num_beams={self.num_beams} with temperature={self.temperature}: beam search draws no random tokens; "
                "set temperature=0, or num_beams=1 and n completions",
            )
            _check(
                self.n <= self.num_beams, f"n={self.n} completions of num_beams={self.num_beams} beams: at most those"
            )
            return
        changed = self.length_penalty != 1.0 or self.early_stopping is not False
        _check(not changed, "length_penalty and early_stopping are for beam search: set num_beams above 1")
        _check(
            self.n == 1 or self.temperature > 0,
            f"n={self.n} greedy completions would all be the same: set temperature above 0, or num_beams",
        )


@dataclass(frozen=True)
class InfiniGenOptions:
    """InfiniGen's token selection (paper §4.3, DESIGN section 6) and what we add to it.

    alpha: a token is a candidate if its score is within alpha of its head's maximum; None takes the family's value
        (4 for OPT and GPT-2, 5 for Llama). `inf` makes everything a candidate.
    partial_ratio: share of the head dimension that scoring keys keep (scorers "partial" and "int8").
    max_fraction: the count of a layer never exceeds this share of its candidates.
    source: what predicts layer i's query: layer i-1's attention input (paper), layer i's own norm of layer i-1's
        input, or of layer i-1's residual after its attention.
    corrected: whether that guess is corrected channel by channel as calibration found it to be off (the paper: not).
    scorer: "partial" columns in the model's dtype, the same columns as int8 ("int8"), or all columns as int4 / int2.
    columns: kept columns fixed at calibration, or chosen from each prompt (paper).
    skew: rotation fitted to queries alone (paper) or to queries and keys.
    sinks, recent: tokens at the start and the end of the context that stay on the device and are always attended.
    dense_layers: layers that attend to everything.
    max_missed_mass: with a number, layer i's true query scores again and rows are fetched until the estimated
        attention mass outside the attended set is at most this (mean over query heads); None never repairs.
    budget: with a number, layers select as many tokens as make this share of the visible context with the resident
        ones, instead of those above the threshold (to compare policies); `alpha` and `max_fraction` then only cap a
        repair.
    """

    alpha: float | None = None
    partial_ratio: float = 0.3
    max_fraction: float = 0.1
    source: Source = "residual"
    corrected: bool = True
    scorer: Scorer = "int8"
    columns: Columns = "calibration"
    skew: SkewMethod = "balanced"
    sinks: int = 4
    recent: int = 64
    dense_layers: tuple[int, ...] = (0,)
    max_missed_mass: float | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        _check(self.alpha is None or self.alpha >= 0, f"alpha={self.alpha} must not be negative")
        _check(0 < self.partial_ratio <= 1, f"partial_ratio={self.partial_ratio} must be in (0, 1]")
        _check(0 < self.max_fraction <= 1, f"max_fraction={self.max_fraction} must be in (0, 1]")
        check_choice("source", self.source, get_args(Source))
        check_choice("scorer", self.scorer, get_args(Scorer))
        check_choice("columns", self.columns, get_args(Columns))
        _check(
            self.scorer != "int8" or self.columns == "calibration",
            f"scorer='int8' scales its columns by calibration; columns={self.columns!r} needs scorer='partial'",
        )
        check_choice("skew", self.skew, get_args(SkewMethod))
        _check(self.sinks >= 0, f"sinks={self.sinks} must not be negative")
        _check(self.recent >= 1, f"recent={self.recent} must be at least 1: the newest token is always resident")
        _check(all(i >= 0 for i in self.dense_layers), f"dense_layers={self.dense_layers} must not be negative")
        _check(
            self.max_missed_mass is None or 0 < self.max_missed_mass < 1,
            f"max_missed_mass={self.max_missed_mass} must be in (0, 1)",
        )
        _check(self.budget is None or 0 < self.budget <= 1, f"budget={self.budget} must be in (0, 1]")

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """Preset "default" (what measures best here) or "paper" (DESIGN section 6 as published: no window, partial
        scorer, attention input, columns by prompt, layer 0 dense), with `overrides` on top."""
        check_choice("preset", name, _PRESETS)
        return from_mapping(cls, _PRESETS[name] | overrides)


_PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
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


@dataclass(frozen=True)
class BudgetOptions:
    """A policy that attends to a fixed share of the context: oracle, streaming, h2o.

    budget: share of the visible context that a sparse layer attends to, resident tokens included.
    sinks, recent: tokens at the start and the end of the context that stay on the device and are always attended,
        even where they alone exceed the budget.
    dense_layers: layers that attend to everything.
    """

    budget: float = 0.1
    sinks: int = 4
    recent: int = 64
    dense_layers: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        _check(0 < self.budget <= 1, f"budget={self.budget} must be in (0, 1]")
        _check(self.sinks >= 0, f"sinks={self.sinks} must not be negative")
        _check(self.recent >= 1, f"recent={self.recent} must be at least 1: the newest token is always resident")
        _check(all(i >= 0 for i in self.dense_layers), f"dense_layers={self.dense_layers} must not be negative")


@dataclass(frozen=True)
class QuestOptions(BudgetOptions):
    """Quest's: `page` tokens share one pair of bounds (16 in the publication)."""

    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.page >= 1, f"page={self.page} must be at least 1")


@dataclass(frozen=True)
class EvictionOptions:
    """What gives way when a sequence outgrows the pool (paper §4.4, DESIGN section 7).

    policy: "fifo", "lru", or "counter" (saturating counts of selections, per step that a token could be selected).
    protect: "window" spares sinks and recent tokens; "none" spares only the recent ones, as the paper's FIFO.
    """

    policy: Literal["fifo", "lru", "counter"] = "counter"
    protect: Literal["window", "none"] = "window"

    def __post_init__(self) -> None:
        check_choice("eviction", self.policy, ("fifo", "lru", "counter"))
        check_choice("protect", self.protect, ("window", "none"))


def eviction_options(eviction: str | Mapping[str, Any] | None) -> EvictionOptions | None:
    """`LLM(eviction=...)`: a policy's name, or all options. Raises ConfigError for what does not exist."""
    if eviction is None:
        return None
    return from_mapping(EvictionOptions, {"policy": eviction} if isinstance(eviction, str) else eviction)


@dataclass(frozen=True)
class EngineConfig:
    """What a runtime is built from, besides the model and the policy's own options.

    host_memory: bytes of KV the host pool may hold (a hard limit); None takes half of the memory that is free.
    eviction: None makes a full pool an error.
    prefill_slice: tokens whose queries, attention and MLP are computed together in prefill; bounds device memory.
    prefill_tokens: prompt tokens prefilled per step while others decode (at least one layer of one prompt).
    missed_mass_every: decode steps between two measurements of the missed attention mass; 0 never measures.
    working_set: rows of each KV head, in each layer that selects and for each sequence, that stay on the device after
        they were fetched, those used most and latest: only other rows cross the link. 0 is none.
    prefix_sharing: keep the KV of prompts in a prefix tree and reuse it where another prompt begins alike. Reused rows
        are exact: a result does not depend on what ran before.
    progress: show a progress bar for prefills that take more than two seconds.
    device_memory: bytes the compute device may hold (a hard limit: weights, scoring keys, resident and fetched rows,
        activations); None takes what there is and keeps everything there.
    max_context: tokens of one sequence that the limit is planned for; None takes all positions of the model that the
        host pool can hold.
    cuda_graphs: capture decode steps as CUDA graphs where all that they launch can be repeated
        (`forward/cuda_graphs.py`). It has not yet run on a device.
    """

    host_memory: int | None = None
    eviction: EvictionOptions | None = None
    prefill_slice: int = 512
    prefill_tokens: int = 512
    missed_mass_every: int = 16
    working_set: int = 0
    prefix_sharing: bool = True
    progress: bool = False
    device_memory: int | None = None
    max_context: int | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for name in ("device_memory", "max_context"):
            value = getattr(self, name)
            _check(value is None or value > 0, f"{name}={value} must be positive")
        _check(self.host_memory is None or self.host_memory > 0, f"host_memory={self.host_memory} must be positive")
        _check(self.prefill_slice >= 1, f"prefill_slice={self.prefill_slice} must be at least 1")
        _check(self.prefill_tokens >= 1, f"prefill_tokens={self.prefill_tokens} must be at least 1")
        _check(self.missed_mass_every >= 0, f"missed_mass_every={self.missed_mass_every} must not be negative")
        _check(
            self.working_set >= 0,
            f"working_set={self.working_set} must not be negative: rows per layer and KV head, 0 is none",
        )


LIVE_POLICIES = ("lookahead", "lru", "fifo")
"""What orders a store that runs (`storage/policies.py`); the simulator has Belady's oracle besides."""


@dataclass(frozen=True)
class StoreOptions:
    """The tiers behind sessions (CachedAttention §3.3, DESIGN section 9).

    limit: most bytes of all files of the store's folder; None is no limit.
    policy: "lookahead" spares what waiting turns will use (least recently used first otherwise, so without a queue it
        is "lru"); "lru" and "fifo" do not look ahead and fetch nothing early.
    ttl: seconds after the last use from which stored chunks are given up, and parked sessions leave host memory; None
        is for ever.
    free_host: share of the host pool that parked sessions leave free, for fetching without waiting for an eviction.
    overflow: "truncate" forgets the oldest half of a conversation (all but its first tokens, with nothing computed
        again) before a turn that would outgrow the model's positions; "error" refuses the turn. Models whose stored
        keys do not allow it (absolute positions, sliding windows) are never truncated.
    """

    limit: int | None = None
    policy: Literal["lookahead", "lru", "fifo"] = "lookahead"
    ttl: float | None = None
    free_host: float = 0.1
    overflow: Overflow = "truncate"

    def __post_init__(self) -> None:
        check_choice("store policy", self.policy, LIVE_POLICIES)
        _check(self.limit is None or self.limit > 0, f"limit={self.limit} must be positive")
        _check(self.ttl is None or self.ttl > 0, f"ttl={self.ttl} must be positive (seconds), or None")
        check_choice("overflow", self.overflow, get_args(Overflow))
        _check(0 <= self.free_host < 1, f"free_host={self.free_host} must be a share in [0, 1)")
