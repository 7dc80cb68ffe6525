"""Fields of configurations: what each says of itself, checks of their values, and configurations from mappings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from numbers import Real
from operator import index
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError

T = TypeVar("T")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises ConfigError, with the nearest spelling, where `value` is none of `choices`."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        raise ConfigError(
            f"{name}={value!r:.80} is unknown{f'; did you mean {near[0]!r}?' if near else ''} "
            f"(one of: {', '.join(known)})"
        )


LARGEST: Final = 1 << 1000
"""Whole numbers beyond are no floats."""

NEVER: Final = object()
"""The neutral value of an option that never had one: equal to no value."""


@dataclass(frozen=True)
class Option:
    """What a field of a configuration says of itself: the command line's flags, `info` and the documentation read it.

    help: one line, with the unit.
    metavar: what stands for the value in a usage text, such as "SIZE"; None: the choices of the field's type.
    flag: its name on the command line where that is not the field's own.
    group: the heading under which commands that run a model have it as a flag; None: only Python has it.
    plans: whether `info` asks for it, because what will be needed depends on it.
    neutral: of an option added after stores had been written: the value with which everything is as before it.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    group: str | None = None
    plans: bool = False
    neutral: Any = NEVER


def option(default: Any, *, help: str, repr: bool = True, **more: Any) -> Any:
    """A dataclass field with a default, described by an `Option` of the other arguments. repr: whether it is shown."""
    return field(default=default, repr=repr, metadata={"option": Option(help, **more)})


def option_of(described: Field[Any]) -> Option:
    """What a field that was made by `option` says of itself."""
    return described.metadata["option"]  # type: ignore[no-any-return]


def check(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_types(config: Any) -> None:
    """Raises ConfigError where a field of a frozen dataclass that is a number, a text or a truth value by its
    annotation holds something else. Numbers of other libraries become Python's own; fields that parse text (`Size`) see
    to themselves."""
    kind: Any = type(config)
    hints = _hints(kind)
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
    """The number that another library's stands for, or None: a whole one also where `kinds` want a float."""
    try:
        if kinds & {int, float} and hasattr(type(value), "__index__") and type(value) is not bool:
            number = index(value)
            return number if abs(number) < LARGEST or float not in kinds else None
        if float in kinds and isinstance(value, Real) and not hasattr(type(value), "__index__"):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several numbers, or of none
        pass
    return None


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The annotations of a class, evaluated once: parameters of a request are checked with every request."""
    return get_type_hints(kind, include_extras=True)


_CALLED = {bool: "True or False", int: "a whole number", float: "a number", str: "text", NoneType: "None"}


def _scalars(hint: Any) -> set[type] | None:
    """The types of a union of plain ones, those of literals included; None where other ones are among them."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    if get_origin(hint) in (Union, UnionType):
        parts = [_scalars(part) for part in get_args(hint)]
        return None if None in parts else {kind for part in parts if part for kind in part}
    return {hint} if hint in _CALLED else None


def configured(cls: type[T], config: T | None, options: Mapping[str, Any]) -> T:
    """`config`, or the defaults of `cls` where it is None, with the fields `options` on top. Raises ConfigError for a
    key that is no field."""
    if config is None:
        return from_mapping(cls, options)
    check(isinstance(config, cls), f"{config!r:.80} is {type(config).__name__}; it must be {cls.__name__}")
    check_keys(type(config), options)
    return replace(config, **options)  # type: ignore[type-var]


def check_mapping(name: str, options: object) -> None:
    """Raises ConfigError where `options` are no mapping."""
    mapping = isinstance(options, Mapping)
    check(mapping, f"{name}={options!r:.80} is {type(options).__name__}; it must be a mapping of names to values")


def check_keys(cls: type, options: Mapping[str, Any]) -> None:
    """Raises ConfigError, with the nearest name, where a key of `options` is no field of the dataclass `cls`."""
    known = [f.name for f in fields(cls)]
    for key in options:
        check_choice(f"option of {cls.__name__}", key, known)


def from_mapping(cls: type[T], options: Mapping[str, Any]) -> T:
    """An instance of the configuration dataclass `cls`; what is no mapping, or has a key that it does not have, raises
    ConfigError."""
    check_mapping(cls.__name__, options)
    check_keys(cls, options)
    return cls(**options)
