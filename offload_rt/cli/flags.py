"""Create command-line flags from the fields of configuration classes, and configurations from parsed flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from ..config import DraftOptions, EngineConfig, EvictionOptions
from ..errors import ConfigError
from ..policies.registry import PolicyOptions, options_class, parse_options, policy_names
from ..sampling_params import SamplingParams
from ..storage.options import StoreOptions
from ..utils.config_fields import Duration, Size, configured, field_types, from_mapping, option_of

if TYPE_CHECKING:
    from ..llm import LLM

POLICY_OPTION = "policy_option_"
"""Prefix of policy options in the parsed arguments.

It is needed because the engine and the policies both have an option `skew`.
"""

COMMON = ("policy", "exact", "device", "device_memory", "host_memory", "tokenizer")
"""Fields of `EngineConfig` whose flags come first in `--help`."""

SAMPLED = {"temperature": 0.8, "top_p": 0.95}
"""Default sampling parameters on the command line for checkpoints that do not define any."""

STORE_OPTION = "store_option_"
SAMPLING = "sampling_"

_UNITS = {Size: "SIZE", Duration: "TIME"}

Groups = dict[str, Any]
"""Argument groups of a parser, by title."""


def group_of(parser: argparse.ArgumentParser, groups: Groups, title: str) -> Any:
    if title not in groups:
        groups[title] = parser.add_argument_group(title)
    return groups[title]


def add_option(
    group: Any,
    owner: type,
    field: Field[Any],
    *,
    prefix: str = "",
    suffix: str = "",
    metavar: str | None = None,
) -> None:
    """Add a flag for a field of the configuration class `owner`.

    The parsed value is None if the user does not set the flag.

    Args:
        prefix: Prefix of the field's name in the parsed arguments.
        suffix: Text to append to the field's help.
        metavar: Metavar to use instead of that of the field's `Option`.
    """
    option = option_of(field)
    kind = _without_none(field_types(owner)[field.name])
    shown = option.help + suffix + _default_text(field, option.help)
    arguments: dict[str, Any] = {"dest": prefix + field.name, "help": shown, "default": None}
    if kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    elif kind == tuple[str, ...]:
        arguments |= {"metavar": option.metavar, "action": "append"}
    elif get_origin(kind) is Literal:
        arguments["metavar"] = metavar or option.metavar or "|".join(map(str, get_args(kind)))
    else:
        arguments |= {"metavar": metavar or option.metavar or _UNITS.get(kind), "type": _reader(kind)}
    group.add_argument(flag_of(field), **arguments)


def _default_text(field: Field[Any], help: str) -> str:
    """Return " (default: X)", or "" if the default is missing or empty, or if `help` already describes it."""
    if field.default in (None, MISSING, ()) or "default" in help:
        return ""
    plain = {True: "yes", False: "no"}.get(field.default) if isinstance(field.default, bool) else str(field.default)
    return f" (default: {plain})"


def given_options(args: argparse.Namespace, owner: type, prefix: str = "") -> dict[str, Any]:
    return given(args, [field.name for field in fields(owner)], prefix)


def given(args: argparse.Namespace, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return the values of those arguments in `names` that the user has set.

    In `args`, their names begin with `prefix`.
    """
    values = ((name, getattr(args, prefix + name, None)) for name in names)
    return {name: value for name, value in values if value is not None}


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Annotated, Literal):
        return kind
    return next((part for part in get_args(kind) if part is not NoneType and get_origin(kind) is not tuple), kind)


def _reader(kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return _layers
    return kind if kind in (int, float, Path) else str  # the configuration parses other types, such as `Size`


def _layers(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers: write for example 0,1, or none") from None


def add_engine_flags(
    parser: argparse.ArgumentParser, config: type[EngineConfig] = EngineConfig, *, plan: bool = False
) -> None:
    """Add flags for all fields of `config` that have a group, and for all policy options.

    If `plan` is set, add only flags that affect memory requirements.
    """
    groups: Groups = {}
    common = group_of(parser, groups, "common engine options")
    for field in fields(config):
        option = option_of(field)
        if not option.group or (plan and not option.plans):
            continue
        group = common if field.name in COMMON else group_of(parser, groups, option.group)
        if field.name == "policy":
            add_option(group, config, field, metavar="|".join(policy_names()))
        elif field.name == "eviction":
            for part in fields(EvictionOptions):
                add_option(group, EvictionOptions, part, prefix="eviction_")
        elif field.name == "exact":
            group.add_argument("--exact", action="store_true", default=None, help=option.help)
            for part in fields(DraftOptions):
                add_option(group_of(parser, groups, "lossless mode"), DraftOptions, part, prefix="exact_")
        else:
            add_option(group, config, field)
    _add_policy_options(parser, common)


def engine_config(args: argparse.Namespace, config: type[EngineConfig] = EngineConfig, **more: Any) -> EngineConfig:
    """Return a configuration made from the user's flags and the fields `more`. Raises ConfigError."""
    options = given(args, ["preset", *_options_of(policy_names())], POLICY_OPTION)
    eviction, exact = given_options(args, EvictionOptions, "eviction_"), given_options(args, DraftOptions, "exact_")
    if "protect" in eviction and "policy" not in eviction:
        raise ConfigError(f"--protect {eviction['protect']} requires eviction: add --eviction fifo|lru|counter")
    settings = given_options(args, config) | ({"eviction": eviction} if eviction else {})
    settings |= {"exact": exact} if exact else {}
    _check_policy_options(settings.get("policy", config.policy), options)
    chosen = configured(config, None, {**settings, "policy_options": options, **more})
    parse_options(chosen.policy, options)
    return chosen


def _check_policy_options(policy: str, options: Iterable[str]) -> None:
    known = {field.name: flag_of(field) for field in fields(options_class(policy))}
    for wrong in options:
        if wrong not in known and wrong != "preset":
            flag, its = flag_of(_options_of(policy_names())[wrong][1]), ", ".join(known.values()) or "none"
            owners = ", ".join(other for other in policy_names() if wrong in _options_of([other]))
            raise ConfigError(f"{flag} is an option of {owners}, not of policy {policy!r} (its options: {its})")


def flag_of(field: Field[Any]) -> str:
    return option_of(field).flag or f"--{field.name.replace('_', '-')}"


def _options_of(policies: Sequence[str]) -> dict[str, tuple[type[PolicyOptions], Field[Any]]]:
    found: dict[str, tuple[type[PolicyOptions], Field[Any]]] = {}
    for policy in policies:
        owner = options_class(policy)
        found |= {field.name: (owner, field) for field in fields(owner) if field.name not in found}
    return found


def _add_policy_options(parser: argparse.ArgumentParser, common: Any) -> None:
    groups: Groups = {}
    for name, (owner, field) in _options_of(policy_names()).items():
        owners = [policy for policy in policy_names() if name in _options_of([policy])]
        title = f"options of policy {owners[0]}" if len(owners) == 1 else "options of several policies"
        suffix = f" ({', '.join(owners)})" if len(owners) > 1 else ""
        add_option(group_of(parser, groups, title), owner, field, prefix=POLICY_OPTION, suffix=suffix)
    presets = {policy: options_class(policy).presets for policy in policy_names() if options_class(policy).presets}
    common.add_argument(
        "--preset",
        dest=f"{POLICY_OPTION}preset",
        metavar="|".join(dict.fromkeys(name for named in presets.values() for name in named)),
        help=f"predefined values of several options ({', '.join(presets)})",
    )


def in_flags(message: str, args: argparse.Namespace) -> str:
    """Replace the names of Python parameters in an error message with flags.

    Examples: "top_k=-2" becomes "--top-k -2", and "`exact`" becomes "--exact".
    """
    flags: dict[str, str] = {}
    actions = [] if (parser := getattr(args, "parser", None)) is None else parser._actions
    # If two options have the same name, use the flag that the user has set.
    for action in sorted(actions, key=lambda action: getattr(args, action.dest, None) is not None):
        name = "eviction" if action.dest == "eviction_policy" else action.dest
        for prefix in (POLICY_OPTION, STORE_OPTION, SAMPLING, "server_", "eviction_", "exact_"):
            name = name.removeprefix(prefix)
        if action.option_strings:
            flags[name] = action.option_strings[0]

    def named(found: re.Match[str]) -> str:
        quoted, name, equals = found[1], found[1] or found[2], found[3]
        known = name in flags and (quoted or equals or "_" in name)
        return found[0] if not known else f"{flags[name]} " if equals else flags[name]

    return re.sub(r"`([a-z_]+)`|(?<![\w'\"./-])([a-z][a-z_]*)(=?)(?![\w]*\()", named, message)


def add_store_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--store`, whose help describes its `default`, `--no-store` and flags for `StoreOptions`."""
    group = parser.add_argument_group("store")
    group.add_argument(
        "--store",
        metavar="DIR",
        help=f"folder of stored KV and sessions (default: {default})",
    )
    group.add_argument("--no-store", action="store_true", help="store nothing on disk")
    for field in fields(StoreOptions):
        if option_of(field).group:
            add_option(group, StoreOptions, field, prefix=STORE_OPTION)


def store_options(args: argparse.Namespace) -> StoreOptions:
    return from_mapping(StoreOptions, given_options(args, StoreOptions, STORE_OPTION))


def add_sampling_flags(parser: argparse.ArgumentParser, *, several: bool, max_tokens: str | None = None) -> None:
    """Add the sampling flags. If `several` is set, include the flags for several outputs per prompt.

    `max_tokens` replaces the help text of `--max-new-tokens`.
    """
    group = parser.add_argument_group("sampling")

    def add(flag: str, name: str, kind: type, metavar: str, help: str | None = None) -> None:
        group.add_argument(flag, dest=SAMPLING + name, type=kind, metavar=metavar, help=help)

    add("--max-new-tokens", "max_tokens", int, "N", max_tokens or "maximum number of new tokens (default: 256)")
    own, temperature, top_p = "default: the model's", SAMPLED["temperature"], SAMPLED["top_p"]
    add("--temperature", "temperature", float, "T", f"0 is greedy ({own}, else {temperature})")
    add("--top-p", "top_p", float, "P", f"sample from the smallest set of this probability ({own}, else {top_p})")
    add("--top-k", "top_k", int, "K", f"sample from the K most probable tokens ({own}, else all)")
    add("--min-p", "min_p", float, "P", f"drop tokens below P times the largest probability ({own}, else 0)")
    add("--seed", "seed", int, "S", "the same seed gives the same text (default: random)")
    add("--repetition-penalty", "repetition_penalty", float, "R", f"above 1 avoids repetition ({own}, else 1)")
    add("--presence-penalty", "presence_penalty", float, "P", "subtracted from logits of generated tokens (default: 0)")
    add("--frequency-penalty", "frequency_penalty", float, "P", "subtracted for each occurrence (default: 0)")
    more = "end before this text; may be repeated"
    group.add_argument("--stop", dest=f"{SAMPLING}stop", action="append", metavar="TEXT", help=more)
    more = "continue after the end-of-text token"
    group.add_argument("--ignore-eos", dest=f"{SAMPLING}ignore_eos", action="store_true", default=None, help=more)
    if several:  # several outputs cannot be streamed
        add("-n", "n", int, "N", "number of texts, printed when complete (default: 1)")
        add("--num-beams", "num_beams", int, "N", "beam search of this width")
        add("--length-penalty", "length_penalty", float, "P", "above 0 favours long beams")


def sampling_for(llm: LLM, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters `given`. Add `SAMPLED` if neither the user nor the checkpoint says how to sample.

    In Python, the default is to sample without filters, but small models then generate poor texts.
    """
    known, unchanged = llm.get_default_sampling_params(), SamplingParams()
    filters = ("temperature", "top_k", "top_p", "min_p")
    chosen = any(name in given or getattr(known, name) != getattr(unchanged, name) for name in filters)
    return {**({} if chosen else SAMPLED), **given}


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that the user has set. Raises ConfigError."""
    found = given_options(args, SamplingParams, SAMPLING)
    SamplingParams(**found)
    return found
