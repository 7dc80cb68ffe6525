"""Policies by name: the only place that knows them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..config import InfiniGenOptions, SkewMethod, check_choice
from ..core import ModelGeometry
from ..errors import ConfigError
from ..skewing.artifact import SkewArtifact
from .base import Policy
from .full import Full
from .infinigen import InfiniGen

ArtifactLoader = Callable[[SkewMethod], SkewArtifact]
"""Gives the model's skew artifact of a method; called only by a policy that needs one."""

Maker = Callable[[Mapping[str, Any], ModelGeometry, torch.device, torch.dtype, ArtifactLoader], Policy]


def _full(
    options: Mapping[str, Any],
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    artifact: ArtifactLoader,
) -> Policy:
    if options:
        raise ConfigError(f"policy 'full' has no options, but was given {', '.join(sorted(options))}")
    return Full(geometry.layers)


def _infinigen(
    options: Mapping[str, Any],
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    artifact: ArtifactLoader,
) -> Policy:
    overrides = dict(options)
    chosen = InfiniGenOptions.preset(overrides.pop("preset", "default"), **overrides)
    return InfiniGen(chosen, geometry, artifact(chosen.skew), device, dtype)


_MAKERS: dict[str, Maker] = {"full": _full, "infinigen": _infinigen}

POLICIES: tuple[str, ...] = tuple(_MAKERS)
"""Names that `make_policy` knows."""


def make_policy(
    name: str,
    options: Mapping[str, Any],
    *,
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    artifact: ArtifactLoader,
) -> Policy:
    """The policy `name` with `options` (of "infinigen" also the key "preset": "default" or "paper", with the other
    keys on top) for a model of `geometry` and `dtype` whose compute device is `device`.

    Raises ConfigError for a name or an option that does not exist (with the nearest that does) or does not fit.
    """
    check_choice("policy", name, POLICIES)
    return _MAKERS[name](options, geometry, device, dtype, artifact)
