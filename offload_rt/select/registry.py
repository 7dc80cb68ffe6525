"""Policies by name: the only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..config import BudgetOptions, InfiniGenOptions, QuestOptions, SkewMethod, check_choice, from_mapping
from ..core import ModelGeometry
from ..errors import ConfigError
from ..skewing.artifact import SkewArtifact
from .base import Policy
from .full import Full
from .h2o import H2O
from .infinigen import InfiniGen
from .oracle import Oracle
from .quest import Quest
from .streaming import Streaming

ArtifactLoader = Callable[[SkewMethod], SkewArtifact]
"""Gives the model's skew artifact of a method; called only by a policy that needs one."""


@dataclass(frozen=True)
class _Machine:
    """What a policy is made for: a model's shape and dtype, a compute device, where its skew artifacts are, and where
    scoring keys lie."""

    geometry: ModelGeometry
    device: torch.device
    dtype: torch.dtype
    artifact: ArtifactLoader
    keys_on_host: bool


Options = Mapping[str, Any]


def _no_options(options: Options) -> None:
    if options:
        raise ConfigError(f"policy 'full' has no options, but was given {', '.join(sorted(options))}")


def _infinigen_options(options: Options) -> InfiniGenOptions:
    overrides = dict(options)
    return InfiniGenOptions.preset(overrides.pop("preset", "default"), **overrides)


def _full(options: Options, machine: _Machine) -> Policy:
    _no_options(options)
    return Full(machine.geometry.layers)


def _infinigen(options: Options, machine: _Machine) -> Policy:
    chosen = _infinigen_options(options)
    artifact, on_host = machine.artifact(chosen.skew), machine.keys_on_host
    return InfiniGen(chosen, machine.geometry, artifact, machine.device, machine.dtype, keys_on_host=on_host)


def _oracle(options: Options, machine: _Machine) -> Policy:
    return Oracle(from_mapping(BudgetOptions, options), machine.geometry)


def _streaming(options: Options, machine: _Machine) -> Policy:
    return Streaming(from_mapping(BudgetOptions, options), machine.geometry)


def _h2o(options: Options, machine: _Machine) -> Policy:
    return H2O(from_mapping(BudgetOptions, options), machine.geometry, machine.device)


def _quest(options: Options, machine: _Machine) -> Policy:
    return Quest(from_mapping(QuestOptions, options), machine.geometry, machine.device, machine.dtype)


_MAKERS: dict[str, Callable[[Options, _Machine], Policy]] = {
    "full": _full,
    "infinigen": _infinigen,
    "oracle": _oracle,
    "streaming": _streaming,
    "h2o": _h2o,
    "quest": _quest,
}

POLICIES: tuple[str, ...] = tuple(_MAKERS)
"""Names that `make_policy` knows."""

_PARSERS: dict[str, Callable[[Options], InfiniGenOptions | BudgetOptions | None]] = {
    "full": _no_options,
    "infinigen": _infinigen_options,
    "quest": partial(from_mapping, QuestOptions),
}


def parse_options(name: str, options: Options) -> InfiniGenOptions | BudgetOptions | None:
    """Options of the policy `name`, checked without a model; None for "full", which has none. Raises ConfigError as
    `make_policy`, but for what only a model tells (layers that it does not have)."""
    check_choice("policy", name, POLICIES)
    return _PARSERS.get(name, partial(from_mapping, BudgetOptions))(options)


def make_policy(
    name: str,
    options: Options,
    *,
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    artifact: ArtifactLoader,
    keys_on_host: bool = False,
) -> Policy:
    """The policy `name` with `options` (of "infinigen" also the key "preset": "default" or "paper", with the other
    keys on top) for a model of `geometry` and `dtype` whose compute device is `device`. With `keys_on_host` the scoring
    keys of "infinigen" lie, and score, in host memory (paper §6.2).

    Raises ConfigError for a name or an option that does not exist (with the nearest that does) or does not fit.
    """
    check_choice("policy", name, POLICIES)
    return _MAKERS[name](options, _Machine(geometry, device, dtype, artifact, keys_on_host))
