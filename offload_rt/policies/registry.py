"""Selection policies by name: what is registered, their options, and how one is made.

A policy registers its options, and names the class that takes them. Options are read long before that class is needed
(flags, `--help`, checks), and its module imports torch; so the class is named, not imported.

    @register_policy("every-other", f"{__name__}:EveryOther")
    @dataclass(frozen=True)
    class EveryOtherOptions(BudgetOptions):
        stride: int = option(2, help="every how many-th token is attended", metavar="N")
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from ..config import SkewMethod
from ..errors import ConfigError
from ..utils.config_fields import check_choice, check_types, from_mapping, option_of

if TYPE_CHECKING:
    import torch

    from ..core import ModelGeometry
    from ..skewing.artifact import SkewArtifact
    from .base import Policy
    from .demand import MemoryDemand

SHIPPED = "offload_rt.policies.options"
"""The module that registers the policies of this package."""

ArtifactLoader = Callable[[SkewMethod], "SkewArtifact"]
"""Gives the model's skew artifact of a method; called only by a policy that needs one."""


@dataclass(frozen=True)
class PolicyOptions:
    """Base of a policy's options: a frozen dataclass whose fields are made by `config_fields.option`."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named values of several options; "default" is taken where none is named."""

    def __post_init__(self) -> None:
        """Checks the types of plain fields; classes with checks of their own call it first."""
        check_types(self)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Options from a mapping as `LLM(policy_options=...)` takes it; its key "preset", where there are presets,
        names the values that the other keys go on top of. Raises ConfigError."""
        given = dict(options)
        if cls.presets:
            return cls.preset(given.pop("preset", "default"), **given)
        return from_mapping(cls, given)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The preset `name` with `overrides` on top. Raises ConfigError for an unknown one."""
        check_choice("preset", name, cls.presets)
        return from_mapping(cls, {**cls.presets[name], **overrides})

    @classmethod
    def given(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a mapping says of options itself: its preset's values, where it names one, and the others on top."""
        return {**cls.presets.get(str(options.get("preset")), {}), **options}

    def check_context(self, context: int) -> None:
        """Raises ConfigError where these options would select nothing in any text of at most `context` tokens."""

    def lineage_text(self) -> str:
        """What the lineage digest of KV decoded under these options is made of, in sessions' files too: the text must
        never change for options that exist. An option added later has a `neutral` value, with which it is left out."""
        named = [(each.name, self.lineage_value(each.name), option_of(each).neutral) for each in fields(self)]
        shown = [f"{name}={value!r}" for name, value, neutral in named if value != neutral]
        return f"{type(self).__name__}({', '.join(shown)})"

    def lineage_value(self, name: str) -> Any:
        """The option `name` as the lineage's text says it."""
        return getattr(self, name)


@dataclass(frozen=True)
class PolicyContext:
    """What a policy is made for: a model's shapes and dtype, the device that it computes on, where its skew artifacts
    come from, and whether scoring keys lie, and score, in host memory."""

    geometry: ModelGeometry
    device: torch.device
    dtype: torch.dtype
    artifact: ArtifactLoader
    keys_on_host: bool


class PolicyClass(Protocol):
    """What a registered policy's class has besides the `Policy` it makes."""

    def build(self, options: Any, context: PolicyContext) -> Policy:
        """The policy with these options for a model. Raises ConfigError for options that do not fit the model."""
        ...

    def memory_demand(self, options: Any, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        """What the policy will keep and fetch for a model of `geometry` that computes in `dtype`."""
        ...


@dataclass(frozen=True)
class _Registered:
    """The options of a policy, and its class as "module:name"."""

    options: type[PolicyOptions]
    policy: str

    def load(self) -> PolicyClass:
        """The class, imported now."""
        module, _, name = self.policy.partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


_registered: dict[str, _Registered] = {}

T = TypeVar("T", bound=PolicyOptions)


def register_policy(name: str, policy: str) -> Callable[[type[T]], type[T]]:
    """Decorates the options of the policy that `LLM(policy=name)` shall make: an object of the class `policy`, written
    "module:class", which is imported when it is needed. Raises ConfigError where another policy has the name."""

    def register(options: type[T]) -> type[T]:
        entry = _registered.get(name)
        if entry is not None and entry.policy != policy:
            raise ConfigError(f"policy {name!r} is registered already, by {entry.policy}: choose another name")
        _registered[name] = _Registered(options, policy)
        return options

    return register


def _known() -> Mapping[str, _Registered]:
    importlib.import_module(SHIPPED)
    return _registered


def policy_names() -> tuple[str, ...]:
    """Names that `LLM(policy=...)` takes, in the order of registration."""
    return tuple(_known())


def options_class(name: str) -> type[PolicyOptions]:
    """The options of the policy `name`. Raises ConfigError, with the nearest name, for an unknown one."""
    check_choice("policy", name, _known())
    return _registered[name].options


def parse_options(name: str, options: Mapping[str, Any]) -> PolicyOptions:
    """Options of the policy `name`, checked without a model. Raises ConfigError as `make_policy`, but for what only a
    model tells (layers that it does not have)."""
    chosen = options_class(name)
    if options and not fields(chosen):
        raise ConfigError(f"policy {name!r} has no options, but was given {', '.join(sorted(options))}")
    return chosen.parse(options)


def memory_demand(
    name: str, options: Mapping[str, Any] | PolicyOptions, geometry: ModelGeometry, dtype: torch.dtype
) -> MemoryDemand:
    """What the policy `name` keeps and fetches, from shapes alone. Raises ConfigError as `parse_options`."""
    chosen = options if isinstance(options, PolicyOptions) else parse_options(name, options)
    return _registered[name].load().memory_demand(chosen, geometry, dtype)


def make_policy(
    name: str,
    options: Mapping[str, Any],
    *,
    geometry: ModelGeometry,
    device: torch.device,
    dtype: torch.dtype,
    artifact: ArtifactLoader,
    keys_on_host: bool = False,
) -> Policy:
    """The policy `name` with `options` (of "infinigen" also the key "preset": "default", "rows" or "paper", with the
    other keys on top) for a model of `geometry` and `dtype` whose compute device is `device`. With `keys_on_host` the
    scoring keys of "infinigen" lie, and score, in host memory (paper §6.2).

    Raises ConfigError for a name or an option that does not exist (with the nearest that does) or does not fit.
    """
    chosen = parse_options(name, options)
    chosen.check_context(geometry.max_positions)
    return _registered[name].load().build(chosen, PolicyContext(geometry, device, dtype, artifact, keys_on_host))
