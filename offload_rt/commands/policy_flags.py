"""The flags that choose a policy and its options, and the limits of the pool."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from ..config import EvictionOptions, KVFormatName, check_choice, from_mapping
from ..errors import ConfigError
from .common import given

OPTIONS = (
    "preset", "budget", "alpha", "partial_ratio", "max_fraction", "max_missed_mass", "source", "corrected",
    "scorer", "columns", "skew", "sinks", "recent", "dense_layers", "page",
)  # fmt: skip
"""Options of policies, as their dataclasses call them; each policy refuses those it does not have."""


def policy_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for the policy, checked before a model is loaded. Raises ConfigError."""
    from ..select.registry import POLICIES, parse_options

    check_choice("policy", args.policy, POLICIES)
    options = given(args, OPTIONS)
    parse_options(args.policy, options)
    return options


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
    """The policy and every option that any policy has."""
    from ..select.registry import POLICIES

    parser.add_argument("--policy", default="infinigen", metavar="|".join(POLICIES))
    group = parser.add_argument_group("options of policies (infinigen has all but --page, full has none)")
    group.add_argument("--budget", type=float, metavar="F", help="share of the context attended, (0, 1]")
    group.add_argument("--sinks", type=int, metavar="N", help="first tokens that stay on the device")
    group.add_argument("--recent", type=int, metavar="N", help="last tokens that stay on the device")
    group.add_argument("--dense-layers", type=_layers, metavar="0,1", help="layers that attend to everything; 'none'")
    group.add_argument("--page", type=int, metavar="N", help="quest: tokens that share one pair of bounds")
    group = parser.add_argument_group("options of infinigen alone")
    group.add_argument("--preset", metavar="default|paper")
    group.add_argument("--alpha", type=float, metavar="A", help="threshold below a head's largest score")
    group.add_argument("--partial-ratio", type=float, metavar="R", help="share of the head dimension scored, (0, 1]")
    group.add_argument("--max-fraction", type=float, metavar="F", help="largest share of tokens fetched, (0, 1]")
    group.add_argument(
        "--max-missed-mass", type=float, metavar="M", help="fetch more until the estimated mass left out is at most M"
    )
    group.add_argument("--source", metavar="attention_input|normed_input|residual")
    group.add_argument(
        "--corrected", action=argparse.BooleanOptionalAction, help="correct guesses as calibration found them to be off"
    )
    group.add_argument("--scorer", metavar="partial|int8|int4|int2")
    group.add_argument("--columns", metavar="calibration|prompt", help="who chooses the columns that are scored")
    group.add_argument("--skew-method", dest="skew", metavar="svd|balanced", help="how the skew is calibrated")


def _layers(text: str) -> tuple[int, ...]:
    """Layer numbers from "0,1"; "none" for no layer."""
    try:
        return () if text == "none" else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write 0,1 or none") from None
