"""The language model of a multimodal checkpoint, loaded without the modules for images and audio.

The weights of the removed modules are never read. Results for text do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def is_multimodal(config: Any) -> bool:
    return config.get_text_config(decoder=True) is not config


def text_config(config: Any) -> Any:
    """Return the configuration of the language model. For text models, this is `config` itself."""
    return config.get_text_config(decoder=True)


def text_decoder(model: Any) -> Any:
    """Return the module that contains the language model's embedding, decoder layers and final norm."""
    decoder = model.get_decoder() if is_multimodal(model.config) else model.base_model
    return decoder.model if hasattr(decoder, "lm_head") else decoder  # Llama 4's decoder contains the head


def unused_modules(model: Any) -> tuple[str, ...]:
    """Return the names of all modules that are not needed for text, including those that were already removed."""
    return (*getattr(model, _REMOVED, ()), *(name for name, _, _ in _unused(model)))


def belongs_to(module: str, weight: str) -> bool:
    """Return whether the weight named `weight` (in a model or a file) belongs to `module`."""
    # Prefixes differ: for example, the module "model.vision_tower" has the prefix "vision_tower." in files.
    return module.rpartition(".")[2] in weight.split(".")


def without_unused(model_class: type[Any]) -> type[Any]:
    """Return a subclass of a multimodal transformers class that omits the modules not needed for text."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        removed = list(_unused(self))
        for _, parent, child in removed:
            setattr(parent, child, None)
        setattr(self, _REMOVED, tuple(name for name, _, _ in removed))

    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


_REMOVED = "_offload_rt_removed"


def _unused(model: Any) -> Iterator[tuple[str, Any, str]]:
    """For each module that is not needed for text, yield its name, its parent module, and its attribute name in the
    parent.
    """
    if not is_multimodal(model.config):
        return
    decoder, head, base = text_decoder(model), model.get_output_embeddings(), model.base_model
    parents = [("", model)] if base is model else [("", model), (f"{model.base_model_prefix}.", base)]
    for prefix, parent in parents:
        for name, child in parent.named_children():
            if child is not base and child is not head and all(module is not decoder for module in child.modules()):
                yield f"{prefix}{name}", parent, name
