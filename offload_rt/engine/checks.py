"""Check requests and options against the model before anything is computed."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from ..config import EngineConfig
from ..errors import ConfigError, InputError, ModelError, PoolFullError
from ..kernels import dispatch
from ..models.loading import LoadedModel
from ..policies.base import Policy


def check_token_ids(tokens: Sequence[int], model: LoadedModel) -> None:
    """Raise InputError if a token id is not in the vocabulary."""
    vocab = model.adapter.geometry.vocab
    wrong = next((t for t in tokens if not 0 <= t < vocab), None)
    if wrong is not None:
        raise InputError(f"token id {wrong} is not in the vocabulary of {model.name} (0-{vocab - 1})")


def check_positions(tokens: int, model: LoadedModel) -> None:
    """Raise ModelError if the model's position table is too short. Warn if `tokens` exceeds the trained length."""
    geometry = model.adapter.geometry
    if tokens <= geometry.max_positions:
        return
    needed = f"prompt and answer need {tokens} positions, and {model.name}"
    if geometry.absolute_positions:
        raise ModelError(f"{needed} has {geometry.max_positions}: shorten the prompt, or lower max_tokens")
    warnings.warn(f"{needed} was trained for {geometry.max_positions}: quality beyond them is unknown", stacklevel=2)


def max_length(positions: int, check: Callable[[int], None]) -> int:
    """Return the largest number of tokens, up to `positions`, for which `check` does not raise PoolFullError."""

    def full(tokens: int) -> bool:
        try:
            check(tokens)
        except PoolFullError:
            return True
        return False

    return bisect_left(range(1, positions + 1), True, key=full)


def check_drafts(policy: Policy, config: EngineConfig) -> None:
    """Raise ConfigError if options are not compatible with lossless mode."""
    assert config.exact is not None
    if config.eviction is not None:
        raise ConfigError(
            "`exact` needs the complete KV cache and cannot be combined with `eviction`: remove `eviction`, or "
            "raise `host_memory`"
        )
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"`exact` needs unquantised KV and cannot be combined with kv_cache_dtype={config.kv_cache_dtype!r}: "
            "remove one of them"
        )
    if config.exact.by_policy and not policy.evictable:
        raise ConfigError(
            f"policy {policy.name!r} cannot discard rejected draft tokens: use 'infinigen', 'oracle', exact='lookup' "
            "or a draft model"
        )


def check_evictable(policy: Policy) -> None:
    """Raise ConfigError if the policy does not support token eviction."""
    if not policy.evictable:
        raise ConfigError(
            f"policy {policy.name!r} does not support eviction, which moves tokens to other slots: use 'full', "
            "'infinigen' or 'oracle', or remove eviction"
        )


def check_launches(device: torch.device) -> None:
    """Launch a small kernel on a GPU, so that a missing C compiler is reported before a model is loaded.

    Raises ConfigError if Triton finds no C compiler, which it needs for launching kernels.
    """
    if device.type == "cpu":
        return
    one = torch.ones(1, 16, device=device)
    try:
        dispatch.rms_norm(one, one[0], 1e-6)
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise ConfigError(
            "Triton finds no C compiler, which it needs for launching kernels: install gcc or clang, or set "
            "the environment variable CC to one"
        ) from error
