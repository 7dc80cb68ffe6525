"""The text decoder of a model: the model itself, or a part of one that takes pictures or sound too.

Of a multimodal checkpoint the text part alone runs: transformers' own class is made without the modules that see and
hear, so that their weights are never read. Given text alone, it computes what it does with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def is_multimodal(config: Any) -> bool:
    """Whether a configuration holds one of a text decoder beside others."""
    return config.get_text_config(decoder=True) is not config


def text_config(config: Any) -> Any:
    """What a configuration says of the text decoder: a part of it, or all of it."""
    return config.get_text_config(decoder=True) if is_multimodal(config) else config


def text_decoder(model: Any) -> Any:
    """The module with embedding, layers and last norm."""
    if is_multimodal(model.config):
        return _inner(model.get_decoder())
    return _inner(model.base_model)


def _inner(decoder: Any) -> Any:
    """`decoder` without its head, where it has one (Llama 4)."""
    return decoder.model if hasattr(decoder, "lm_head") else decoder


def other_parts(model: Any) -> tuple[str, ...]:
    """Names in `model` of the modules that a text never passes, those that were left out included."""
    return (*getattr(model, _LEFT_OUT, ()), *(name for name, _, _ in _others(model)))


def is_of(part: str, weight: str) -> bool:
    """Whether a weight of the name `weight`, in a model or in a file, belongs to the part that a model calls `part`:
    files write "vision_tower." where a model has "model.vision_tower."."""
    return part.rpartition(".")[2] in weight.split(".")


def text_only(kind: type[Any]) -> type[Any]:
    """A class like `kind`, a multimodal one of transformers, whose models have no other parts from the beginning."""

    def build(self: Any, config: Any, *args: Any, **named: Any) -> None:
        kind.__init__(self, config, *args, **named)
        left_out = list(_others(self))
        for _, holder, child in left_out:
            setattr(holder, child, None)
        setattr(self, _LEFT_OUT, tuple(name for name, _, _ in left_out))

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


_LEFT_OUT = "_offload_rt_left_out"


def _others(model: Any) -> Iterator[tuple[str, Any, str]]:
    """(name in the model, the module that holds it, its name there) of every part beside the text decoder and its
    head."""
    if not is_multimodal(model.config):
        return
    decoder, head, base = text_decoder(model), model.get_output_embeddings(), model.base_model
    holders = [("", model)] if base is model else [("", model), (f"{model.base_model_prefix}.", base)]
    for prefix, holder in holders:
        for name, child in holder.named_children():
            if child is not base and child is not head and all(each is not decoder for each in child.modules()):
                yield f"{prefix}{name}", holder, name
