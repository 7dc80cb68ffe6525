"""Supported architectures and their adapters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..config import Verify
from ..errors import ConfigError, ModelError
from .checkpoint import unsupported

if TYPE_CHECKING:
    from .adapter import ModelAdapter

_DECODERS = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Ministral", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3",
    "Phi", "Phi3", "Olmo2", "Olmo3", "Granite", "Cohere", "Cohere2", "Starcoder2", "SmolLM3", "Glm", "Glm4",
    "GPTNeoX", "Falcon", "GptOss", "Ministral3", "MiMoV2Flash", "Llama4",
)  # fmt: skip
"""Prefixes of the `...ForCausalLM` classes of transformers that `DecoderAdapter` is tested with."""

_MULTIMODAL = ("Gemma3", "Llava", "Mistral3", "Qwen2VL", "Qwen2_5_VL")
"""Prefixes of the `...ForConditionalGeneration` classes whose language model `DecoderAdapter` is tested with."""

_adapters = {
    **{f"{name}ForCausalLM": "offload_rt.models.decoder:DecoderAdapter" for name in _DECODERS},
    **{f"{name}ForConditionalGeneration": "offload_rt.models.decoder:DecoderAdapter" for name in _MULTIMODAL},
    "OPTForCausalLM": "offload_rt.models.opt:OPTAdapter",
    "GPT2LMHeadModel": "offload_rt.models.gpt2:GPT2Adapter",
}
"""Maps a transformers class to its adapter as "module:class", which is imported on first use."""


def register_architecture(architecture: str, adapter: str) -> None:
    """Register an adapter for models of a transformers class.

    A class that is not part of transformers must also be registered with `AutoConfig` and `AutoModelForCausalLM` to be
    loaded from a folder.

    Args:
        architecture: Name of the transformers class.
        adapter: A `ModelAdapter` as "module:class". It is called with the loaded model.

    Raises:
        ConfigError: The architecture already has a different adapter.
    """
    if _adapters.setdefault(architecture, adapter) != adapter:
        raise ConfigError(f"architecture {architecture!r} has an adapter already: {_adapters[architecture]}")


def architectures() -> tuple[str, ...]:
    """Return the names of the supported transformers classes, in order of registration."""
    return tuple(_adapters)


def adapter_for(model: Any) -> ModelAdapter:
    """Return the adapter of a loaded transformers model, chosen by its class.

    A class that is not registered is recognised by its modules. Such a model must pass load-time verification (`proof`)
    before it runs.

    Raises:
        ModelError: The architecture, or one of its options, is not supported.
    """
    architecture = type(model).__name__
    if architecture not in _adapters:
        return _recognised(model)
    module, _, name = _adapters[architecture].partition(":")
    adapter: ModelAdapter = getattr(importlib.import_module(module), name)(model)
    return adapter


def _recognised(model: Any) -> ModelAdapter:
    """Return a `DecoderAdapter` for a model of an unregistered class. Raise ModelError if its modules do not fit."""
    from .decoder import DecoderAdapter

    name = type(model).__name__
    try:
        return DecoderAdapter(model)
    except ModelError as error:
        raise ModelError(unsupported(name, architectures(), str(error)), reason=error.reason) from error
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise ModelError(unsupported(name, architectures()), reason="modules") from error


def refuse_unproved(architecture: str, verify: Verify) -> None:
    """Raise ModelError if `architecture` is not registered and verification is off."""
    if verify == "off" and architecture not in _adapters:
        why = "nobody declared it, and with verify='off' it would not be proved"
        raise ModelError(unsupported(architecture, architectures(), why), reason="proof")
