"""Check arguments of the public API."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import SupportsIndex

from ..errors import InputError
from ..sampling_params import SamplingParams


def shown(value: object) -> str:
    """Return a value (at most 80 characters) and its type for a message."""
    return f"{value!r:.80} is {type(value).__name__}"


def whole(name: str, value: object, least: int) -> int:
    """Return an integer of at least `least`, also from other libraries' types. Raise InputError for other values."""
    try:
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError
        number = index(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}={shown(value)}; it must be an integer") from None
    if number < least:
        raise InputError(f"{name}={number} must be at least {least}")
    return int(number)


def whole_or_none(name: str, value: object, least: int) -> int | None:
    """Return `whole`, or None if `value` is None."""
    return None if value is None else whole(name, value, least)


def salt(cache_salt: object) -> str:
    """Return the cache salt of a request. Raise InputError if it is not a string."""
    if not isinstance(cache_salt, str):
        raise InputError(
            f"cache_salt={shown(cache_salt)}; it must be a string; an empty one shares KV with all requests"
        )
    return cache_salt


def sampling(given: object, default: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of one request, or `default` if `given` is None. Raise InputError."""
    if given is None:
        return default
    if not isinstance(given, SamplingParams):
        raise InputError(f"sampling_params={shown(given)}; it must be a SamplingParams")
    return given


def sampling_of_each(given: object, prompts: int, default: SamplingParams) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt, from one for all or one per prompt. Raise InputError."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [sampling(given, default)] * prompts
    if len(given) != prompts:
        raise InputError(f"{len(given)} SamplingParams for {prompts} prompts: pass one, or one per prompt")
    return [sampling(one, default) for one in given]


def folder_path(name: str, value: object) -> Path:
    """Return a folder as a path with "~" expanded. Raise InputError if it is not a path."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise InputError(f"{name}={shown(value)}; it must be a path")
    try:
        os.fsencode(text)
        return Path(text).expanduser()
    except (RuntimeError, UnicodeEncodeError) as error:  # an unknown user; a lone surrogate
        raise InputError(f"{name}={value!r}: {error}") from None


def texts_or_ids(name: str, value: object) -> Sequence[object]:
    """Return a list of prompts. Raise InputError for a single text and for other types."""
    if isinstance(value, (str, bytes)):
        raise InputError(f"{name} is a single text: pass a list of texts")
    if hasattr(value, "tolist"):
        with suppress(TypeError, ValueError, RuntimeError):  # a tensor without data, which is refused below
            value = value.tolist()
    if not isinstance(value, Sequence):
        raise InputError(f"{name}={shown(value)}; it must be a list of texts or of token ids")
    return value
