"""Check the arguments of the public API, and check that the model supports the given requests and options."""

from __future__ import annotations

import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import index
from pathlib import Path
from typing import SupportsIndex

import torch

from ..config import EngineConfig
from ..errors import ConfigError, InputError, ModelError, PoolFullError
from ..models.loading import LoadedModel
from ..policies.base import Policy
from ..sampling_params import SamplingParams
from ..utils.home import expand_user

WIDEST_ON_GPU = 576
"""Maximum head dimension on a GPU, which is the width of the keys in latent attention.

The limit exists because kernels hold whole vectors in registers and shared memory.
"""


def check_kernels(head_dim: int, device: torch.device, name: str) -> None:
    if device.type == "cuda" and head_dim > WIDEST_ON_GPU:
        raise ModelError(
            f"the cached keys of {name} have {head_dim} dimensions, and the GPU kernels support at most "
            f"{WIDEST_ON_GPU}: use device='cpu'",
            reason="head_dim",
        )


def check_token_ids(tokens: Sequence[int], model: LoadedModel) -> None:
    vocab = model.adapter.geometry.vocab
    wrong = next((t for t in tokens if not 0 <= t < vocab), None)
    if wrong is not None:
        raise InputError(f"token id {wrong} is not in the vocabulary of {model.name} (0-{vocab - 1})")


def check_positions(tokens: int, model: LoadedModel, max_model_len: int | None) -> None:
    """Raise ModelError if the model has no position embeddings for `tokens` tokens, or if `max_model_len` is less.

    Warn if `tokens` exceeds the context length that the model was trained for.
    """
    if max_model_len is not None and tokens > max_model_len:
        raise ModelError(
            f"prompt and new tokens need {tokens} positions, and max_model_len={max_model_len}: shorten the prompt, "
            "lower max_tokens, or raise max_model_len"
        )
    geometry = model.adapter.geometry
    if tokens <= geometry.max_positions:
        return
    needed = f"prompt and new tokens need {tokens} positions, and {model.name}"
    if geometry.absolute_positions:
        raise ModelError(f"{needed} has {geometry.max_positions}: shorten the prompt, or lower max_tokens")
    trained_for = f"{needed} was trained for {geometry.max_positions}"
    warnings.warn(f"{trained_for}: the quality of longer texts is unknown", stacklevel=2)


def max_length(positions: int, check: Callable[[int], None]) -> int:
    """Return the largest number of tokens, at most `positions`, for which `check` does not raise PoolFullError."""

    def full(tokens: int) -> bool:
        try:
            check(tokens)
        except PoolFullError:
            return True
        return False

    return bisect_left(range(1, positions + 1), True, key=full)


def check_drafts(policy: Policy, config: EngineConfig) -> None:
    assert config.exact is not None
    if config.exact.by_policy and not policy.evictable:
        raise ConfigError(
            f"policy {policy.name!r} cannot discard rejected draft tokens: use 'infinigen', 'oracle', exact='lookup' "
            "or a draft model"
        )


def check_evictable(policy: Policy) -> None:
    if not policy.evictable:
        raise ConfigError(
            f"policy {policy.name!r} does not support eviction, which moves tokens to other slots: use 'full', "
            "'infinigen' or 'oracle', or remove eviction"
        )


def describe_value(value: object) -> str:
    return f"{value!r:.80} is {type(value).__name__}"


def check_int(name: str, value: object, least: int) -> int:
    """Return `value` as an int. Raise InputError if it is not an integer or is less than `least`."""
    try:
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError
        number = index(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}={describe_value(value)}; it must be an integer") from None
    if number < least:
        raise InputError(f"{name}={number} must be at least {least}")
    return int(number)


def check_int_or_none(name: str, value: object, least: int) -> int | None:
    return None if value is None else check_int(name, value, least)


def check_salt(cache_salt: object) -> str:
    if not isinstance(cache_salt, str):
        raise InputError(
            f"cache_salt={describe_value(cache_salt)}; it must be a string; an empty one shares KV with all requests"
        )
    return cache_salt


def check_sampling_params(given: object, default: SamplingParams) -> SamplingParams:
    """Return `given`, or `default` if `given` is None. Raise InputError for any other type."""
    if given is None:
        return default
    if not isinstance(given, SamplingParams):
        raise InputError(f"sampling_params={describe_value(given)}; it must be a SamplingParams")
    return given


def sampling_params_per_prompt(given: object, prompts: int, default: SamplingParams) -> list[SamplingParams]:
    """Return a list with the sampling parameters for each of `prompts` prompts. Raises InputError.

    `given` is one SamplingParams for all prompts, a list with one per prompt, or None to use `default`.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [check_sampling_params(given, default)] * prompts
    if len(given) != prompts:
        raise InputError(f"{len(given)} SamplingParams for {prompts} prompts: pass one, or one per prompt")
    return [check_sampling_params(one, default) for one in given]


def check_store_path(value: object) -> Path:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or "\0" in text:
        raise InputError(f"store={describe_value(value)}; it must be a path")
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:  # a lone surrogate
        raise InputError(f"store={value!r}: {error}") from None
    return expand_user(text)


def check_prompt_list(name: str, value: object) -> Sequence[object]:
    """Return `value` as a list of prompts. Raise InputError if it is a single text or has another type."""
    if isinstance(value, (str, bytes)):
        raise InputError(f"{name} is a single text: pass a list of texts")
    if hasattr(value, "tolist"):
        with suppress(TypeError, ValueError, RuntimeError):  # a tensor without data, which is refused below
            value = value.tolist()
    if not isinstance(value, Sequence):
        raise InputError(f"{name}={describe_value(value)}; it must be a list of texts or of token ids")
    return value
