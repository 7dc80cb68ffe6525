"""What a model cannot do, told before anything is computed."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from ..config import EngineConfig
from ..errors import ConfigError, InputError, ModelError, PoolFullError
from ..kernels import dispatch
from ..models.registry import LoadedModel
from ..policies.base import Policy


def check_token_ids(tokens: Sequence[int], model: LoadedModel) -> None:
    """Raises InputError where `tokens` has an id that the model does not have."""
    vocab = model.adapter.geometry.vocab
    wrong = next((t for t in tokens if not 0 <= t < vocab), None)
    if wrong is not None:
        raise InputError(f"token id {wrong} is not in the vocabulary of {model.name} (0-{vocab - 1})")


def check_positions(tokens: int, model: LoadedModel) -> None:
    """Raises ModelError where `tokens` positions are more than the model has a table of, and warns where they are more
    than it was made for."""
    geometry = model.adapter.geometry
    if tokens <= geometry.max_positions:
        return
    needed = f"{tokens} positions (prompt and new tokens) are needed and {model.name} has"
    if geometry.absolute_positions:
        raise ModelError(f"{needed} a table of {geometry.max_positions}; shorten the prompt or max_tokens")
    warnings.warn(f"{needed} been made for {geometry.max_positions}; quality beyond is not known", stacklevel=2)


def most_tokens(positions: int, check: Callable[[int], None]) -> int:
    """Returns the most tokens, up to `positions`, that pass `check`, which raises PoolFullError for more."""

    def full(tokens: int) -> bool:
        try:
            check(tokens)
        except PoolFullError:
            return True
        return False

    return bisect_left(range(1, positions + 1), True, key=full)


def check_drafts(policy: Policy, config: EngineConfig) -> None:
    """Raises ConfigError where drafts could not be taken back, or full attention is not what would verify them."""
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
    """Raises ConfigError where evicting tokens in place would not mean what it says."""
    if not policy.evictable:
        raise ConfigError(
            f"policy {policy.name!r} knows tokens by their place and cannot run with eviction, which moves them; use "
            "'full', 'infinigen' or 'oracle', or leave eviction out"
        )


def check_launches(device: torch.device) -> None:
    """Launches the smallest kernel, where there are kernels: what a machine lacks is said before a model is loaded.
    Raises ConfigError where Triton finds no C compiler, with which it builds what launches a kernel."""
    if device.type == "cpu":
        return
    one = torch.ones(1, 16, device=device)
    try:
        dispatch.rms_norm(one, one[0], 1e-6)
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise ConfigError(
            "Triton finds no C compiler, which it needs once to launch kernels: install gcc or clang, or name one in "
            "the environment variable CC"
        ) from error
