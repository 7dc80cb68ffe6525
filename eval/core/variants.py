"""Texts to score, and the variants under which they are scored. This module imports no large packages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import ConfigError
from ...policies.registry import policy_names
from ...utils.config_fields import check_choice
from .rival_options import register_rivals

ENGINE = ("host_memory", "eviction", "kv_cache_dtype", "quantize")
"""Settings that are passed to `LLM` and not to the policy."""


@dataclass(frozen=True)
class Variant:
    """A policy, its options, and other arguments of `LLM` (`host_memory`, `eviction`, ...), as plain JSON values."""

    policy: str = "full"
    options: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        parts = [f"{key}={_plain(value)}" for key, value in (*self.options.items(), *self.engine.items())]
        return " ".join([self.policy, *parts])

    @property
    def key(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


@dataclass(frozen=True)
class Text:
    tokens: tuple[int, ...]  # token ids, N in total
    decode_from: int  # the tokens `[0, decode_from)` are prefilled with full attention
    scored_from: int  # the tokens `[scored_from, N)` are scored

    def __post_init__(self) -> None:
        assert 0 <= self.decode_from < self.scored_from < len(self.tokens)


@dataclass(frozen=True)
class Scored:
    """Scores and costs of one text."""

    nats: list[float]  # negative log-probability of each scored token, `[n]`
    is_greedy: list[bool]  # whether each scored token is the most probable one, `[n]`
    attended: float  # exact attention fraction, mean over all layers and decoded positions
    fetched: float  # fetched fraction, mean over all layers and decoded positions
    sparse_attended: float  # like `attended`, but only over the sparse layers
    sparse_fetched: float  # like `fetched`, but only over the sparse layers
    missed: float | None  # Missed attention mass, averaged over the sparse layers. None if it was not measured.
    worst_layer: float | None  # missed attention mass of the layer with the largest value, or None


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def grid(policies: Sequence[str], budgets: Sequence[float], options: Mapping[str, Any] | None = None) -> list[Variant]:
    """Return the variants to compare: `full`, and every other policy at every budget, with the given options.

    If `budgets` is empty, each policy uses its default budget.
    """
    variants, shared = [Variant("full")], dict(options or {})
    for policy in policies:
        if policy != "full":
            sized = [Variant(policy, shared | {"budget": budget}) for budget in budgets]
            variants += sized or [Variant(policy, shared)]
    return variants


def make_variants(
    policies: Sequence[str], budgets: Sequence[float], settings: Sequence[str], more: Sequence[str]
) -> list[Variant]:
    """Create variants from command-line arguments. Duplicates are removed.

    Args:
        policies: Policies to combine with every budget. `full` is always the first variant.
        budgets: Budgets, as fractions of the context.
        settings: "key=value" options that apply to all policies in `policies`.
        more: Further variants, each as "POLICY key=value ...".
    """
    made = grid(policies, budgets, read_settings(settings))
    for text in more:
        policy, *words = text.split() or [""]
        made.append(_variant(policy, read_settings(words)))
    return [variant for i, variant in enumerate(made) if variant not in made[:i]]


def _variant(policy: str, settings: Mapping[str, Any]) -> Variant:
    register_rivals()
    check_choice("policy", policy, policy_names())
    engine = {key: value for key, value in settings.items() if key in ENGINE}
    return Variant(policy, {key: value for key, value in settings.items() if key not in engine}, engine)


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse "key=value" settings, such as "recent=16".

    Values are JSON scalars or plain strings. `dense_layers` is a list such as "0:1", or "none" for an empty list.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is not a setting; write key=value, such as recent=16")
        found[key] = _layers(value) if key == "dense_layers" else _value(value)
    return found


def _layers(text: str) -> list[int]:
    try:
        return [] if text == "none" else [int(layer) for layer in text.replace(",", ":").split(":")]
    except ValueError:
        raise ConfigError(f"dense_layers={text!r} is not a list of layers; write 0:1 or none") from None


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (dict, list)) else value
