"""Arguments of calls, checked where they enter: what is wrong says what it was, and what is wanted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import SupportsIndex

from .errors import InputError
from .sampling_params import SamplingParams


def shown(value: object) -> str:
    """A value as a message says it: at most 80 characters, and its type."""
    return f"{value!r:.80} is {type(value).__name__}"


def whole(name: str, value: object, least: int) -> int:
    """A whole number of at least `least`: Python's own or another library's, but no truth value. Raises InputError."""
    try:
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError
        number = index(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}={shown(value)}; it must be a whole number") from None
    if number < least:
        raise InputError(f"{name}={number} must be at least {least}")
    return int(number)


def whole_or_none(name: str, value: object, least: int) -> int | None:
    """`whole`, or None where nothing was given."""
    return None if value is None else whole(name, value, least)


def salt(cache_salt: object) -> str:
    """Return the cache salt of a request. Raises InputError if it is not a text."""
    if not isinstance(cache_salt, str):
        raise InputError(f"cache_salt={shown(cache_salt)}; it must be a text, empty to share KV with all requests")
    return cache_salt


def sampling(given: object, default: SamplingParams) -> SamplingParams:
    """The sampling parameters of one request; `default` where none are given. Raises InputError."""
    if given is None:
        return default
    if not isinstance(given, SamplingParams):
        raise InputError(f"sampling_params={shown(given)}; it must be a SamplingParams")
    return given


def sampling_of_each(given: object, prompts: int, default: SamplingParams) -> list[SamplingParams]:
    """Those of `prompts` prompts: one for all, or a list with one for each. Raises InputError."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [sampling(given, default)] * prompts
    if len(given) != prompts:
        raise InputError(f"{len(given)} SamplingParams for {prompts} prompts: give one, or one per prompt")
    return [sampling(one, default) for one in given]


def folder_path(name: str, value: object) -> Path:
    """A folder as a path without "~". Raises InputError for what is no path."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise InputError(f"{name}={shown(value)}; it must be a path")
    try:
        os.fsencode(text)
        return Path(text).expanduser()
    except (RuntimeError, UnicodeEncodeError) as error:  # of a user that nobody knows, of half a character
        raise InputError(f"{name}={value!r}: {error}") from None


def texts_or_ids(name: str, value: object) -> Sequence[object]:
    """A list of prompts. Raises InputError where it is one text, or no list."""
    if isinstance(value, (str, bytes)):
        raise InputError(f"{name} is a text, which would be read letter by letter: give a list of texts")
    if hasattr(value, "tolist"):
        with suppress(TypeError, ValueError, RuntimeError):  # of a tensor without numbers, which is refused below
            value = value.tolist()
    if not isinstance(value, Sequence):
        raise InputError(f"{name}={shown(value)}; it must be a list of texts or of token ids")
    return value
