"""Describe and check the fields of configuration dataclasses, and create instances from mappings."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from numbers import Real
from operator import index
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError, InputError
from .home import expand_user
from .units import parse_duration, parse_size

T = TypeVar("T")

Size = Annotated[int, "bytes"]
"""Size in bytes. A configuration also accepts text such as "200GiB"."""

Duration = Annotated[float, "seconds"]
"""Duration in seconds. A configuration also accepts text such as "7d"."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a part of an error message that suggests the known name most similar to `name`, or ""."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigError if `value` is not in `choices`. The message suggests a similar choice."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        hint = suggestion(str(value), known)
        raise ConfigError(f"{name}={value!r:.80} is unknown{hint} (one of: {', '.join(known)})")


LARGEST: Final = 1 << 1000  # larger integers cannot be converted to float

NEVER: Final = object()  # `neutral` of an option without a neutral value


@dataclass(frozen=True)
class Option:
    """Description of a configuration field, from which command-line flags and documentation are generated."""

    help: str  # one line, with the unit
    # Placeholder for the value in usage texts, such as "SIZE". If it is None, the usage text lists the possible values.
    metavar: str | None = None
    flag: str | None = None  # name of the flag if it differs from the name of the field
    # Heading under which the flag is listed in the help of commands that run a model. None if only Python has the
    # option.
    group: str | None = None
    plans: bool = False  # Whether memory demand depends on the option. If so, the command `info` has the flag.
    # Value that has no effect. It is left out of KV provenance keys, so that earlier keys stay valid.
    neutral: Any = NEVER
    least: int | None = None  # smallest allowed value of a number
    stored_name: str | None = None  # earlier name of the field, which KV provenance keys use, or None


def option(default: Any, *, help: str, repr: bool = True, **more: Any) -> Any:
    """Return a dataclass field described by an `Option` that has `help` and the fields `more`."""
    return field(default=default, repr=repr, metadata={"option": Option(help, **more)})


def option_of(described: Field[Any]) -> Option:
    return described.metadata["option"]  # type: ignore[no-any-return]


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_fields(config: Any) -> None:
    """Parse and check the fields of a frozen dataclass by their types.

    Fields of type `Size`, `Duration` and `Path` are parsed. Fields of type bool, int, float, str, None or a union of
    these are checked, and numbers from other libraries, such as numpy, are converted. Fields of a `Literal` type must
    have one of its values. Fields of other types are not checked. Numbers must be at least `Option.least`.

    Raises:
        ConfigError: A field has a value of another type, or a value that is not allowed.
    """
    cls: Any = type(config)
    for name, rule in _rules(cls).items():
        value = getattr(config, name)
        if rule.parse is not None and not (rule.optional and value is None):
            value = rule.parse(value, name)
            object.__setattr__(config, name, value)
        if rule.kinds is not None and type(value) not in rule.kinds:
            number = _number(value, rule.kinds)
            if number is None:
                wanted = " or ".join(_CALLED[kind] for kind in (bool, int, float, str, NoneType) if kind in rule.kinds)
                raise ConfigError(f"{name}={value!r:.80} is {type(value).__name__}; it must be {wanted}")
            value = number
            object.__setattr__(config, name, value)
        if rule.choices and not (rule.optional and value is None):
            check_choice(name, value, rule.choices)
        if rule.least is not None and value is not None and not value >= rule.least:
            wanted = f"be at least {rule.least}" if rule.least else "not be negative"
            raise ConfigError(f"{name}={value} must {wanted}")


class _Rule(NamedTuple):
    """How `check_fields` treats a field."""

    parse: Callable[[Any, str], Any] | None
    optional: bool
    kinds: set[type] | None
    choices: tuple[str, ...]
    least: int | None


@cache  # sampling parameters are checked per request
def _rules(cls: Any) -> dict[str, _Rule]:
    rules, hints = {}, field_types(cls)
    for each in fields(cls):
        hint = hints[each.name]
        parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        parse = next((_PARSERS[part] for part in parts if part in _PARSERS), None)
        literals = [part for part in parts if part is not NoneType]
        choices = get_args(literals[0]) if [get_origin(part) for part in literals] == [Literal] else ()
        least = each.metadata["option"].least if "option" in each.metadata else None
        rules[each.name] = _Rule(parse, NoneType in parts, _scalars(hint), choices, least)
    return rules


def _parse_path(path: object, name: str) -> Path:
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise ConfigError(f"{name}={path!r:.80} is {type(path).__name__}; it must be a path")
    try:
        return expand_user(text)
    except InputError as error:
        raise ConfigError(f"{name}={error}") from None


_PARSERS: Mapping[Any, Callable[[Any, str], Any]] = {Size: parse_size, Duration: parse_duration, Path: _parse_path}


def _number(value: Any, kinds: set[type]) -> int | float | None:
    """Convert a number from another library to int or float.

    Return None if this is impossible, or if the resulting type is not in `kinds`.
    """
    try:
        if kinds & {int, float} and hasattr(type(value), "__index__") and type(value) is not bool:
            number = index(value)
            return number if abs(number) < LARGEST or float not in kinds else None
        if float in kinds and isinstance(value, Real) and not hasattr(type(value), "__index__"):
            return float(value)
    # for example because `value` is an array with several elements
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    return None


@cache
def field_types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


_CALLED = {bool: "True or False", int: "an integer", float: "a number", str: "a string", NoneType: "None"}


def _scalars(hint: Any) -> set[type] | None:
    """Return the scalar types that an annotation allows, or None if it also allows types that are not scalar."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    if get_origin(hint) in (Union, UnionType):
        parts = [_scalars(part) for part in get_args(hint)]
        return None if None in parts else {kind for part in parts if part for kind in part}
    return {hint} if hint in _CALLED else None


def configured(cls: type[T], config: T | None, options: Mapping[str, Any]) -> T:
    """Return `config` (or a default `cls` if it is None) with the fields in `options` replaced.

    Raises ConfigError for unknown fields.
    """
    if config is None:
        return from_mapping(cls, options)
    check(isinstance(config, cls), f"{config!r:.80} is {type(config).__name__}; it must be {cls.__name__}")
    check_keys(type(config), options)
    return replace(config, **options)  # type: ignore[type-var]


def check_mapping(name: str, options: object) -> None:
    mapping = isinstance(options, Mapping)
    check(mapping, f"{name}={options!r:.80} is {type(options).__name__}; it must be a mapping of names to values")


def check_keys(cls: type, options: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(cls)]
    for key in options:
        check_choice(f"option of {cls.__name__}", key, known)


def from_mapping(cls: type[T], options: Mapping[str, Any]) -> T:
    """Return `cls(**options)`. Raises ConfigError if a key is unknown, or if `options` is not a mapping."""
    check_mapping(cls.__name__, options)
    check_keys(cls, options)
    return cls(**options)
