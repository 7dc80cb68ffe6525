"""Parse variants (policies, budgets, options) from command-line arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ...policies.registry import policy_names
from ...utils.config_fields import check_choice
from .model_under_test import Variant, grid

ENGINE = ("host_memory", "eviction", "kv_cache_dtype")
"""Settings passed to `LLM` instead of the policy."""


def make_variants(
    policies: Sequence[str], budgets: Sequence[float], settings: Sequence[str], more: Sequence[str]
) -> list[Variant]:
    """Build the list of variants without duplicates.

    Args:
        policies: Policies to combine with every budget; `full` is always first.
        budgets: Budgets, as fractions of the context.
        settings: "key=value" options shared by all combined policies.
        more: Further variants, each as "POLICY key=value ...".
    """
    shared = read_settings(settings)
    made = grid(policies, budgets, shared)
    for text in more:
        policy, *words = text.split() or [""]
        made.append(_variant(policy, read_settings(words)))
    unique: list[Variant] = []
    for variant in made:
        if variant not in unique:
            unique.append(variant)
    return unique


def _variant(policy: str, settings: Mapping[str, Any]) -> Variant:
    check_choice("policy", policy, policy_names())
    engine = {key: value for key, value in settings.items() if key in ENGINE}
    return Variant(policy, {key: value for key, value in settings.items() if key not in engine}, engine)


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """Parse "key=value" settings, such as "recent=16".

    Values are JSON scalars or plain strings. `dense_layers` takes a list such as 0:1, or none for an empty list.
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} is no setting; write key=value, such as recent=16")
        found[key] = _layers(value) if key == "dense_layers" else _value(value)
    return found


def _layers(text: str) -> list[int]:
    try:
        return [] if text == "none" else [int(layer) for layer in text.replace(",", ":").split(":")]
    except ValueError:
        raise ConfigError(f"dense_layers={text!r} is no list of layers; write 0:1 or none") from None


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (dict, list)) else value
