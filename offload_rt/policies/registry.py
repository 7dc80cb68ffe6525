"""Registry of selection policies by name.

A policy registers its options class and the import path of its policy class. The policy class is imported on first use,
because the command line needs only the options and importing torch is slow. Example:

    @register_policy("every-other", f"{__name__}:EveryOther")
    @dataclass(frozen=True)
    class EveryOtherOptions(BudgetOptions):
        stride: int = option(2, help="attend to every N-th token", metavar="N")
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from ..config import SkewMethod
from ..errors import ConfigError
from ..utils.config_fields import check_choice, check_fields, from_mapping, option_of, suggestion

if TYPE_CHECKING:
    import torch

    from ..core import ModelGeometry
    from ..skewing.artifact import SkewArtifact
    from .base import Policy
    from .demand import MemoryDemand

SHIPPED = "offload_rt.policies.options"
"""The module that registers the built-in policies."""

ArtifactLoader = Callable[[SkewMethod], "SkewArtifact"]
"""Function that loads the skew artifact for a method. It is only called by policies that need an artifact."""


@dataclass(frozen=True)
class PolicyOptions:
    """Base class of policy options, which are frozen dataclasses with fields created by `config_fields.option`."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Sets of option values by name. If no preset is given, "default" is used."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """Create options from `LLM(policy_options=...)`. Raises ConfigError.

        If the class has presets, the key "preset" selects a preset, and the other keys override its values.
        """
        values = dict(options)
        if cls.presets:
            return cls.preset(values.pop("preset", "default"), **values)
        return from_mapping(cls, values)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        check_choice("preset", name, cls.presets)
        return from_mapping(cls, {**cls.presets[name], **overrides})

    @classmethod
    def with_preset(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `options`. If the key "preset" selects a preset, missing keys get the values of the preset."""
        return {**cls.presets.get(str(options.get("preset")), {}), **options}

    def check_context(self, context: int) -> None:
        """Raise ConfigError if contexts of up to `context` tokens are too short for the policy to select any tokens."""

    def provenance_text(self) -> str:
        """Return the text whose digest is the KV provenance key of these options.

        Session files contain the digest, so the text for existing options must never change. New options are omitted
        from the text if they have their `neutral` value (see `config_fields.Option`).
        """
        values = [(option_of(field), field.name, self.provenance_value(field.name)) for field in fields(self)]
        texts = [f"{spec.stored_name or name}={value!r}" for spec, name, value in values if value != spec.neutral]
        return f"{type(self).__name__}({', '.join(texts)})"

    def provenance_value(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True)
class PolicyContext:
    """Everything that a policy class needs to know about a model to build a policy for it."""

    geometry: ModelGeometry
    device: torch.device
    dtype: torch.dtype
    artifact: ArtifactLoader  # function that loads a skew artifact for the model
    keys_on_host: bool  # whether "infinigen" stores and scores its scoring keys in host memory (paper §6.2)
    # Function that takes policy options and measures the longest context, in tokens, for which full attention is as
    # fast as selection. None if the device is not a CPU.
    measure: Callable[[Any], int | None] | None = None


class PolicyClass(Protocol):
    """Protocol with the class methods that a registered policy class must have."""

    def build(self, options: Any, context: PolicyContext) -> Policy:
        """Build the policy for a model. Raises ConfigError if an option does not fit the model."""
        ...

    def memory_demand(self, options: Any, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand: ...


@dataclass(frozen=True)
class _Registered:
    options: type[PolicyOptions]
    policy: str

    def load(self) -> PolicyClass:
        module, _, name = self.policy.partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


_registered: dict[str, _Registered] = {}

T = TypeVar("T", bound=PolicyOptions)


def register_policy(name: str, policy: str) -> Callable[[type[T]], type[T]]:
    """Register the decorated options class as policy `name`.

    Args:
        name: Name for `LLM(policy=...)`.
        policy: Import path "module:Class" of the policy class.

    Raises:
        ConfigError: Another policy is registered with this name.
    """

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
    return tuple(_known())


def options_class(name: str) -> type[PolicyOptions]:
    check_choice("policy", name, _known())
    return _registered[name].options


def parse_options(name: str, options: Mapping[str, Any]) -> PolicyOptions:
    """Parse and check the options of policy `name`. Raises ConfigError.

    Errors that depend on the model, such as a layer index that is too large, are not detected here.
    """
    options_type = options_class(name)
    if options and not fields(options_type):
        raise ConfigError(f"policy {name!r} has no options, but was given {', '.join(sorted(options))}")
    names = [field.name for field in fields(options_type)]
    for unknown in sorted(options.keys() - {*names, "preset"}):
        hint = suggestion(unknown, names) or f" (its options: {', '.join(names)})"
        raise ConfigError(f"policy {name!r} has no option {unknown!r}{hint}")
    return options_type.parse(options)


def memory_demand(
    name: str, options: Mapping[str, Any] | PolicyOptions, geometry: ModelGeometry, dtype: torch.dtype
) -> MemoryDemand:
    """Return the memory demand of policy `name` without loading a model. Raises ConfigError."""
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
    measure: Callable[[Any], int | None] | None = None,
) -> Policy:
    """Build the policy `name` for a model. For parameters that are not described here, see `PolicyContext`.

    Args:
        options: Options of the policy. For "infinigen", the key "preset" ("default", "rows" or "paper") selects a set
            of values, which the other keys override.

    Raises:
        ConfigError: The policy or an option does not exist, or an option does not fit the model.
    """
    chosen = parse_options(name, options)
    chosen.check_context(geometry.max_positions)
    return (
        _registered[name].load().build(chosen, PolicyContext(geometry, device, dtype, artifact, keys_on_host, measure))
    )
