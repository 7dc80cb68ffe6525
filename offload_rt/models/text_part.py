"""Find the text decoder of a model, and load multimodal checkpoints without their other parts.

The transformers class of a multimodal checkpoint is instantiated without its vision and audio modules, so that their
weights are never read. This does not change results for text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def is_multimodal(config: Any) -> bool:
    """Return whether a configuration has a separate configuration for its text decoder."""
    return config.get_text_config(decoder=True) is not config


def text_config(config: Any) -> Any:
    """Return the configuration of the text decoder: a part of `config`, or `config` itself."""
    return config.get_text_config(decoder=True) if is_multimodal(config) else config


def text_decoder(model: Any) -> Any:
    """Return the module that contains the embedding, the decoder layers and the final norm."""
    if is_multimodal(model.config):
        return _inner(model.get_decoder())
    return _inner(model.base_model)


def _inner(decoder: Any) -> Any:
    """Return `decoder` without its language model head, if it has one (Llama 4)."""
    return decoder.model if hasattr(decoder, "lm_head") else decoder


def other_parts(model: Any) -> tuple[str, ...]:
    """Return the names of all modules that text does not use, including those omitted by `text_only`."""
    return (*getattr(model, _LEFT_OUT, ()), *(name for name, _, _ in _others(model)))


def is_of(part: str, weight: str) -> bool:
    """Return whether a weight named `weight`, in a model or in a file, belongs to the module `part` of a model.

    Prefixes may differ: files use "vision_tower." for the module "model.vision_tower".
    """
    return part.rpartition(".")[2] in weight.split(".")


def text_only(kind: type[Any]) -> type[Any]:
    """Return a subclass of `kind`, a multimodal transformers class, that removes all other parts on construction."""

    def build(self: Any, config: Any, *args: Any, **named: Any) -> None:
        kind.__init__(self, config, *args, **named)
        left_out = list(_others(self))
        for _, holder, child in left_out:
            setattr(holder, child, None)
        setattr(self, _LEFT_OUT, tuple(name for name, _, _ in left_out))

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


_LEFT_OUT = "_offload_rt_left_out"


def _others(model: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield (name in the model, parent module, name in the parent) for each part outside the text decoder and head."""
    if not is_multimodal(model.config):
        return
    decoder, head, base = text_decoder(model), model.get_output_embeddings(), model.base_model
    holders = [("", model)] if base is model else [("", model), (f"{model.base_model_prefix}.", base)]
    for prefix, holder in holders:
        for name, child in holder.named_children():
            if child is not base and child is not head and all(each is not decoder for each in child.modules()):
                yield f"{prefix}{name}", holder, name
