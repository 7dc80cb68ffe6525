"""Command-line flags from the fields of a configuration: name, type, metavar and help are read from the field."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import Field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ..config import Duration, Size
from ..utils.config_fields import option_of

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
    """Adds the flag of a field that `config_fields.option` made in the dataclass `owner` to a parser or a group. Its
    value is stored under the field's name behind `prefix`; a flag that is not given leaves None, so that defaults stay
    where they are defined. `help` and `metavar` take the place of the field's own."""
    said = option_of(field)
    kind = _without_none(get_type_hints(owner, include_extras=True)[field.name])
    arguments: dict[str, Any] = {"dest": prefix + field.name, "help": help or said.help, "default": None}
    if kind is bool:
        arguments["action"] = argparse.BooleanOptionalAction
    elif get_origin(kind) is Literal:
        arguments["metavar"] = metavar or said.metavar or "|".join(map(str, get_args(kind)))
    else:
        arguments |= {"metavar": metavar or said.metavar or _UNITS.get(kind), "type": _reader(kind)}
    group.add_argument(said.flag or f"--{field.name.replace('_', '-')}", **arguments)


def given_options(args: argparse.Namespace, names: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """The fields that were given as flags, by name."""
    values = ((name, getattr(args, prefix + name, None)) for name in names)
    return {name: value for name, value in values if value is not None}


def _without_none(kind: Any) -> Any:
    """The type that is meant by `X | None`."""
    if get_origin(kind) in (Annotated, Literal):
        return kind
    return next((part for part in get_args(kind) if part is not NoneType and get_origin(kind) is not tuple), kind)


def _reader(kind: Any) -> Any:
    """What makes a value of a flag's text; a type that parses text itself (`config.Size`) is given the text."""
    if get_origin(kind) is tuple:
        return _layers
    return kind if kind in (int, float, Path) else str


def _layers(text: str) -> tuple[int, ...]:
    """Layer numbers from "0,1"; "none" for no layer."""
    try:
        return () if text == "none" else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers; write 0,1 or none") from None
