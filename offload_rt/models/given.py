"""Checks of a loaded transformers model that a caller passes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..config import Verify
from ..errors import ConfigError, ModelError
from .checkpoint import MERGE
from .packed import UNPACKED, packing, packing_of
from .placement import Placement
from .registry import refuse_unproved

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_is_model(model: object) -> None:
    """Raise ConfigError if `model` is not a loaded transformers model."""
    if not (hasattr(model, "config") and hasattr(model, "device")):
        raise ConfigError(
            f"model={model!r:.80} is {type(model).__name__}; it must be a shipped name, a folder, a GGUF file, a hub "
            "id or a loaded transformers model"
        )


def check_loaded(model: PreTrainedModel, device: str, dtype: str) -> None:
    """Raise ModelError if a loaded model cannot run as it is, or differs from the requested device or dtype."""
    if getattr(model, "_hf_peft_config_loaded", False) or type(model).__module__.partition(".")[0] == "peft":
        raise ModelError(f"the model has PEFT adapters; {MERGE}", reason="peft")
    places = sorted({str(weight.device) for weight in model.parameters()})
    if len(places) > 1 or places == ["meta"]:
        raise ModelError(f"the weights are on {', '.join(places)}; all must be on one device: load without device_map")
    actual = str(next(model.parameters()).dtype).removeprefix("torch.")
    if device not in ("auto", places[0], places[0].partition(":")[0]) or dtype not in ("auto", actual):
        raise ModelError(
            f"the loaded model is on {places[0]} in {actual}; to run it on {device} in {dtype}, "
            "move it first (model.to(...)) or pass its folder"
        )


def as_given(model: PreTrainedModel, device: str, dtype: str, placement: Placement, verify: Verify) -> PreTrainedModel:
    """Return a loaded model in eval mode. Raise ConfigError or ModelError if it cannot run as it is."""
    if placement:
        raise ConfigError(
            "the weights of a loaded model stay where they are, and some were to be in host memory (they do not all "
            "fit device_memory, or experts_on_device or embedding_on_host says so): pass the model's folder or hub id"
        )
    check_is_model(model)
    check_loaded(model, device, dtype)
    refuse_unproved(type(model).__name__, verify)
    if packing(model.config) == "gguf" and packing_of(model) is None:
        warnings.warn(UNPACKED, stacklevel=3)
    model.train(False)
    return model
