"""Describe and check the fields of configuration dataclasses, and create instances from mappings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import ConfigError

T = TypeVar("T")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigError if `value` is not in `choices`. The message suggests a similar choice."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        raise ConfigError(
            f"{name}={value!r:.80} is unknown{f'; did you mean {near[0]!r}?' if near else ''} "
            f"(one of: {', '.join(known)})"
        )


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
    stored_name: str | None = None  # earlier name of the field, which KV provenance keys use, or None


def option(default: Any, *, help: str, repr: bool = True, **more: Any) -> Any:
    """Return a dataclass field described by an `Option` that has `help` and the fields `more`."""
    return field(default=default, repr=repr, metadata={"option": Option(help, **more)})


def option_of(described: Field[Any]) -> Option:
    return described.metadata["option"]  # type: ignore[no-any-return]


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_types(config: Any) -> None:
    """Check those fields of a frozen dataclass whose type is bool, int, float, str, None or a union of these.

    Numbers from other libraries, such as numpy, are converted, and so are integers in fields of type float. Fields of
    other types are not checked.

    Raises:
        ConfigError: A field has a value of another type.
    """
    kind: Any = type(config)
    hints = field_types(kind)
    for each in fields(config):
        value, kinds = getattr(config, each.name), _scalars(hints[each.name])
        if kinds is None or type(value) in kinds:
            continue
        number = _number(value, kinds)
        if number is None:
            wanted = " or ".join(_CALLED[kind] for kind in (bool, int, float, str, NoneType) if kind in kinds)
            raise ConfigError(f"{each.name}={value!r:.80} is {type(value).__name__}; it must be {wanted}")
        object.__setattr__(config, each.name, number)


def _number(value: Any, kinds: set[type]) -> int | float | None:
    """Convert a number from another library to int or float.

    Return None if this is impossible, or if the resulting type is not in `kinds`.
    """
    try:
        if kinds & {int, float} and hasattr(type(value), "__index__") and type(value) is not bool:
            number = index(value)
            if int in kinds:
                return number if abs(number) < LARGEST or float not in kinds else None
            return float(number) if abs(number) < LARGEST else None  # transformers refuses an int temperature
        if float in kinds and isinstance(value, Real) and not hasattr(type(value), "__index__"):
            return float(value)
    # for example because `value` is an array with several elements
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    return None


@cache  # sampling parameters are checked per request
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
