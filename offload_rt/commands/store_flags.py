"""The flags of a store of sessions: where it is, what it may take, what leaves it."""

from __future__ import annotations

import argparse
from typing import Any

from ..config import LIVE_POLICIES, StoreOptions, from_mapping, parse_duration, parse_size


def add_store_flags(parser: argparse.ArgumentParser) -> None:
    """Where sessions are stored, and for how long."""
    group = parser.add_argument_group("store")
    group.add_argument("--store", required=True, metavar="DIR", help="folder of stored sessions")
    group.add_argument("--store-limit", metavar="SIZE", help="most bytes of its files, such as 50GiB (default: none)")
    group.add_argument(
        "--store-policy", metavar="|".join(LIVE_POLICIES), help="what leaves it first (default: lookahead, here lru)"
    )
    group.add_argument("--store-ttl", metavar="TIME", help="give up rows not used for so long, such as 7d or 12h")
    group.add_argument(
        "--overflow",
        metavar="truncate|error",
        help="before a turn that outgrows the model: forget the oldest half (default), or refuse it",
    )


def store_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of `StoreOptions`, checked before a model is loaded. Raises ConfigError."""
    options: dict[str, Any] = {}
    if args.store_limit is not None:
        options["limit"] = parse_size(args.store_limit, "--store-limit")
    if args.store_ttl is not None:
        options["ttl"] = parse_duration(args.store_ttl, "--store-ttl")
    options |= {
        key: value for key, value in (("policy", args.store_policy), ("overflow", args.overflow)) if value is not None
    }
    from_mapping(StoreOptions, options)
    return options
