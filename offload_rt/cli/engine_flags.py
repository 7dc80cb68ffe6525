"""Engine flags, made from `EngineConfig` and from the options of the registered policies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any

from ..config import DraftOptions, EngineConfig, EvictionOptions
from ..errors import ConfigError
from ..policies.registry import PolicyOptions, options_class, parse_options, policy_names
from ..utils.config_fields import configured, option_of
from .option_flags import add_option, given_options

POLICY_OPTION = "policy_option_"
"""Prefix of policy options in the parsed arguments, because the engine and a policy both have an option `skew`."""


def add_engine_flags(parser: argparse.ArgumentParser, config: type[EngineConfig] = EngineConfig) -> None:
    """Add all fields of `config` that have a group, and all policy options."""
    _add_fields(parser, config, [field for field in fields(config) if option_of(field).group])
    _add_policy_options(parser)


def add_plan_flags(parser: argparse.ArgumentParser, config: type[EngineConfig] = EngineConfig) -> None:
    """Add the fields of `config` that affect memory requirements, and all policy options."""
    _add_fields(
        parser, config, [field for field in fields(config) if option_of(field).group and option_of(field).plans]
    )
    _add_policy_options(parser)


def engine_config(args: argparse.Namespace, config: type[EngineConfig] = EngineConfig, **more: Any) -> EngineConfig:
    """Return the configuration set by the flags and the fields in `more`. Raises ConfigError."""
    options = given_options(args, ["preset", *_options_of(policy_names())], POLICY_OPTION)
    settings = given_options(args, [field.name for field in fields(config)]) | _eviction(args) | _exact(args)
    chosen = configured(config, None, {**settings, "policy_options": options, **more})
    parse_options(chosen.policy, options)
    return chosen


def _eviction(args: argparse.Namespace) -> dict[str, Any]:
    given = given_options(args, [field.name for field in fields(EvictionOptions)], "eviction_")
    if "protect" in given and "policy" not in given:
        raise ConfigError(f"--protect {given['protect']} requires eviction: add --eviction fifo|lru|counter")
    return {"eviction": given} if given else {}


def _exact(args: argparse.Namespace) -> dict[str, Any]:
    """Return the field `exact` if --exact or one of its options is given."""
    given = given_options(args, [field.name for field in fields(DraftOptions)], "exact_")
    return {"exact": given or True} if given or getattr(args, "exact", None) else {}


def _add_fields(parser: argparse.ArgumentParser, config: type, chosen: Sequence[Field[Any]]) -> None:
    groups: dict[str, Any] = {}
    for field in chosen:
        option = option_of(field)
        assert option.group is not None
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group = groups[option.group]
        if field.name == "policy":
            add_option(group, config, field, metavar="|".join(policy_names()))
        elif field.name == "eviction":
            for part in fields(EvictionOptions):
                add_option(group, EvictionOptions, part, prefix="eviction_")
        elif field.name == "exact":
            group.add_argument("--exact", action="store_true", default=None, help=option.help)
            for part in fields(DraftOptions):
                add_option(group, DraftOptions, part, prefix="exact_")
        else:
            add_option(group, config, field)


def _options_of(policies: Sequence[str]) -> dict[str, tuple[type[PolicyOptions], Field[Any]]]:
    """Return the options of the policies by name, each with the first class that defines it."""
    found: dict[str, tuple[type[PolicyOptions], Field[Any]]] = {}
    for policy in policies:
        owner = options_class(policy)
        found |= {field.name: (owner, field) for field in fields(owner) if field.name not in found}
    return found


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all policies, grouped by policy."""
    groups: dict[str, Any] = {}
    for name, (owner, field) in _options_of(policy_names()).items():
        owners = [policy for policy in policy_names() if name in _options_of([policy])]
        title = f"options of policy {owners[0]}" if len(owners) == 1 else "options of several policies"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        shared = f" ({', '.join(owners)})" if len(owners) > 1 else ""
        add_option(groups[title], owner, field, prefix=POLICY_OPTION, help=option_of(field).help + shared)
    presets = {policy: options_class(policy).presets for policy in policy_names() if options_class(policy).presets}
    parser.add_argument(
        "--preset",
        dest=f"{POLICY_OPTION}preset",
        metavar="|".join(dict.fromkeys(name for named in presets.values() for name in named)),
        help=f"predefined values of several options ({', '.join(presets)})",
    )
