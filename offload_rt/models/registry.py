"""Registry of supported architectures and their adapters."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any

from ..config import Verify
from ..errors import ConfigError, ModelError

if TYPE_CHECKING:
    from .adapter import ModelAdapter

_DECODERS = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Ministral", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3",
    "Phi", "Phi3", "Olmo2", "Olmo3", "Granite", "Cohere", "Cohere2", "Starcoder2", "SmolLM3", "Glm", "Glm4",
    "GPTNeoX", "Falcon", "GptOss", "Ministral3", "MiMoV2Flash", "Llama4", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe",
    "GraniteMoeHybrid", "Lfm2", "Lfm2Moe", "Lfm3", "FalconH1", "NemotronH", "OlmoHybrid", "Bamba", "Gemma4",
    "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Youtu", "KimiLinear",
)  # fmt: skip
"""Name prefixes of the `...ForCausalLM` classes in transformers with which `DecoderAdapter` is tested."""

_MULTIMODAL = ("Gemma3", "Gemma4", "Llava", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3_5", "Qwen3_5Moe")
"""Name prefixes of the tested multimodal classes (`...ForConditionalGeneration`).

`DecoderAdapter` runs their language models.
"""

_DECODER = "offload_rt.models.decoder:DecoderAdapter"

_adapters = {
    **{f"{name}ForCausalLM": _DECODER for name in _DECODERS},
    **{f"{name}ForConditionalGeneration": _DECODER for name in _MULTIMODAL},
    "OPTForCausalLM": "offload_rt.models.learned_positions:OPTAdapter",
    "GPT2LMHeadModel": "offload_rt.models.learned_positions:GPT2Adapter",
}
"""Maps each transformers class to its adapter, as "module:class". Adapters are imported on first use."""


def register_architecture(architecture: str, adapter: str) -> None:
    """Register an adapter for a model class of transformers.

    If the class is not part of transformers, also register it with `AutoConfig` and `AutoModelForCausalLM`. This is
    needed to load its models from a folder.

    Args:
        architecture: Name of the transformers class.
        adapter: A subclass of `ModelAdapter`, as "module:class". It is called with the loaded model.

    Raises:
        ConfigError: The architecture already has a different adapter.
    """
    if _adapters.setdefault(architecture, adapter) != adapter:
        raise ConfigError(f"architecture {architecture!r} is already registered with {_adapters[architecture]}")


def architectures() -> tuple[str, ...]:
    return tuple(_adapters)


def has_external_adapters() -> bool:
    return not all(adapter.startswith("offload_rt.") for adapter in _adapters.values())


def adapter_for(model: Any) -> ModelAdapter:
    """Return a new adapter for a loaded transformers model, chosen by its class.

    If the class is not registered but its modules are recognised, the adapter is a `DecoderAdapter`, and the model must
    pass load-time verification.

    Raises:
        ModelError: The architecture, or one of its options, is not supported.
    """
    architecture = type(model).__name__
    module, _, name = _adapters.get(architecture, _DECODER).partition(":")
    kind = getattr(importlib.import_module(module), name)
    if architecture in _adapters:
        adapter: ModelAdapter = kind(model)
        return adapter
    try:
        adapter = kind(model)
    except ModelError as error:
        raise unsupported(architecture, str(error), error.reason) from error
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        why = f"its modules do not match a known decoder ({type(error).__name__}: {error})"
        raise unsupported(architecture, why, "modules") from error
    return adapter


def declared_class(entries: Mapping[str, Any]) -> str:
    """Return the class name in a config.json, or a description of its model type if it names no class."""
    named = next(iter(entries.get("architectures") or ()), None)
    return str(named or f"model type {entries.get('model_type')!r}")


def refuse_unknown(entries: Mapping[str, Any], names: Callable[[], Container[str]]) -> None:
    """Raise ModelError if the class in a config.json is neither registered nor in `names()`."""
    architecture = declared_class(entries)
    if architecture in _adapters or architecture in names():
        return
    if "text_config" not in entries:
        raise unsupported(architecture)
    why = "it is multimodal, and this version of transformers has no class with its language model"
    raise unsupported(architecture, why, "multimodal")


def has_remote_code(entries: Mapping[str, Any], *, trusted: bool) -> bool:
    """Return whether the model is defined by code in the checkpoint, and this code may run (`trusted`)."""
    return trusted and "AutoModelForCausalLM" in (entries.get("auto_map") or {})


def refuse_unverified(architecture: str, verify: Verify) -> None:
    """Raise ModelError if `architecture` is not registered and verification is off."""
    if verify == "off" and architecture not in _adapters:
        why = "it is not a tested architecture, so it needs load-time verification (verify='auto')"
        raise unsupported(architecture, why, "verification")


def unsupported(architecture: str, why: str = "", reason: str = "architecture") -> ModelError:
    """Create the error for an unsupported architecture.

    If `why` is empty, the message lists the supported architectures.
    """
    details = f": {why}" if why else f"; supported are {', '.join(_adapters)}"
    return ModelError(f"{architecture} is not supported{details}", reason=reason)
