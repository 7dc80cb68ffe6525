"""The flags that choose a policy and its options, and the limits of the pool."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import Field, fields
from typing import Any, get_args

from ..config import EvictionOptions, KVFormatName, check_choice, from_mapping, option_of
from ..errors import ConfigError
from ..select.registry import PolicyOptions, options_class, parse_options, policy_names
from .common import given
from .option_flags import add_option


def policy_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the policy, checked before a model is loaded. Raises ConfigError."""
    options = given(args, ["preset", *_options_of(policy_names())])
    parse_options(args.policy, options)
    return options


def _options_of(policies: Sequence[str]) -> dict[str, tuple[type[PolicyOptions], Field[Any]]]:
    """Every option that one of the policies has, by name, and the first class that has it."""
    found: dict[str, tuple[type[PolicyOptions], Field[Any]]] = {}
    for policy in policies:
        owner = options_class(policy)
        found |= {field.name: (owner, field) for field in fields(owner) if field.name not in found}
    return found


def pool_options(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of `LLM` about the pool, checked. Raises ConfigError."""
    check_choice("kv_format", args.kv_format, get_args(KVFormatName))
    settings: dict[str, Any] = {"host_memory": args.host_memory, "kv_format": args.kv_format}
    settings["prefix_sharing"] = not args.no_prefix_sharing
    if args.eviction is None:
        if args.protect is not None:
            raise ConfigError(f"--protect {args.protect} says what eviction spares: give --eviction fifo|lru|counter")
        return settings
    eviction = {"policy": args.eviction, **given(args, ("protect",))}
    from_mapping(EvictionOptions, eviction)
    return settings | {"eviction": eviction}


def device_options(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of `LLM` about the device."""
    settings = {"device": args.device, "device_memory": args.device_memory, "max_context": args.max_context}
    return settings | given(args, ("working_set",))


def add_device_flags(parser: argparse.ArgumentParser, *, max_context: bool = True) -> None:
    """Where to run, and how much host and device memory to take."""
    parser.add_argument("--host-memory", metavar="SIZE", help="limit of KV in host memory, such as 200GiB")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda")
    parser.add_argument(
        "--device-memory", metavar="SIZE", help="limit of all that is on the device: weights beyond it stream"
    )
    parser.add_argument(
        "--working-set", type=int, metavar="ROWS", help="fetched rows per layer and KV head that stay on the device"
    )
    if max_context:
        parser.add_argument(
            "--max-context", type=int, metavar="N", help="tokens that --device-memory is planned for (default: all)"
        )


def add_pool_flags(parser: argparse.ArgumentParser) -> None:
    """What is kept in the pool and what gives way."""
    group = parser.add_argument_group("pool")
    group.add_argument("--eviction", metavar="fifo|lru|counter", help="what gives way when the pool is full")
    group.add_argument("--protect", metavar="window|none", help="what eviction spares (window: sinks and recent)")
    group.add_argument("--kv-format", default="auto", metavar="auto|int8|int4|int2", help="rows in host memory")
    group.add_argument("--no-prefix-sharing", action="store_true", help="compute and keep every prompt by itself")


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    """The policy, and every option that a registered policy has."""
    parser.add_argument("--policy", default="infinigen", metavar="|".join(policy_names()))
    groups: dict[str, Any] = {}
    for name, (owner, field) in _options_of(policy_names()).items():
        owners = [policy for policy in policy_names() if name in _options_of([policy])]
        title = f"options of policy {owners[0]}" if len(owners) == 1 else "options of several policies"
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        shared = f" ({', '.join(owners)})" if len(owners) > 1 else ""
        add_option(groups[title], owner, field, option_of(field).help + shared)
    presets = [preset for policy in policy_names() for preset in options_class(policy).presets]
    named = ", ".join(policy for policy in policy_names() if options_class(policy).presets)
    parser.add_argument("--preset", metavar="|".join(dict.fromkeys(presets)), help=f"values of many options ({named})")
