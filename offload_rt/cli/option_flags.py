"""Command-line flags from the fields of a configuration class."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import Field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from ..config import Duration, Size
from ..utils.config_fields import field_types, option_of

_UNITS = {Size: "SIZE", Duration: "TIME"}


def add_option(
    group: Any,
    owner: type,
    field: Field[Any],
    *,
    prefix: str = "",
    help: str | None = None,
    metavar: str | None = None,
) -> None:
    """Add the flag of a dataclass field that was created by `config_fields.option`.

    A missing flag is None, so that defaults are defined only in the dataclass.

    Args:
        group: Parser or argument group.
        owner: Dataclass of the field.
        field: The field.
        prefix: Prefix of the name in the parsed arguments.
        help: Help text instead of the field's.
        metavar: Metavar instead of the field's.
    """
    option = option_of(field)
    kind = _without_none(field_types(owner)[field.name])
    arguments: dict[str, Any] = {"dest": prefix + field.name, "help": help or option.help, "default": None}
    if kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is Literal:
        arguments["metavar"] = metavar or option.metavar or "|".join(map(str, get_args(kind)))
    else:
        arguments |= {"metavar": metavar or option.metavar or _UNITS.get(kind), "type": _reader(kind)}
    group.add_argument(option.flag or f"--{field.name.replace('_', '-')}", **arguments)


def given_options(args: argparse.Namespace, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return the fields that are set by flags."""
    values = ((name, getattr(args, prefix + name, None)) for name in names)
    return {name: value for name, value in values if value is not None}


def _without_none(kind: Any) -> Any:
    """Return `X` for the type `X | None`."""
    if get_origin(kind) in (Annotated, Literal):
        return kind
    return next((part for part in get_args(kind) if part is not NoneType and get_origin(kind) is not tuple), kind)


def _reader(kind: Any) -> Any:
    """Return the converter of a flag value. Types that parse strings themselves (`config.Size`) get the string."""
    if get_origin(kind) is tuple:
        return _layers
    return kind if kind in (int, float, Path) else str


def _layers(text: str) -> tuple[int, ...]:
    """Parse layer numbers: "0,1", or "none" for no layer."""
    try:
        return () if text == "none" else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers: write for example 0,1, or none") from None
