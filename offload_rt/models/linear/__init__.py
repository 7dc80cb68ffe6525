"""Weight formats of linear layers (`BACKENDS`), and functions that work for every format."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import ModelError
from .backend import MXFP4, BitsAndBytes, LinearBackend, TensorLocation, TorchAO, quantization_option
from .dense import DENSE
from .packed import PACKED

BACKENDS: list[LinearBackend] = [BitsAndBytes(), TorchAO(), MXFP4(), PACKED, DENSE]
"""All weight formats, in order of preference. A layer uses the first format that supports it."""

GGUF_NOTE = (
    "the weights of this GGUF file are dequantised; they stay packed if you pass the path of the file as the model, "
    "with quantize='auto' (documentation: Architectures)"
)


def has_external_formats() -> bool:
    return not all(type(backend).__module__.startswith("offload_rt.") for backend in BACKENDS)


def use_backends(model: nn.Module, device: torch.device) -> None:
    """Convert each plain linear layer of `model` in place to the format of the first backend that supports it on
    `device`.
    """
    for module in model.modules():
        if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
            continue
        backend = next((backend for backend in BACKENDS if backend.supports(module, device)), None)
        if backend is not None:
            backend.pack(module)
            module.__class__ = backend.layer_class


@contextmanager
def computed_in_c(model: nn.Module) -> Iterator[None]:
    """Within the `with` block, compute products of plain weights and few input rows in C if they are on a CPU."""
    layers = [module for module in model.modules() if type(module) is nn.Linear and type(module.weight) is nn.Parameter]
    changed = [layer for layer in layers if DENSE.supports(layer, layer.weight.device)]
    for layer in changed:
        layer.__class__ = DENSE.layer_class
    try:
        yield
    finally:
        for layer in changed:
            layer.__class__ = nn.Linear


def plain_weight(layer: Any) -> nn.Parameter | None:
    """Return the weight `[out, in]` of a linear layer, or None if it is packed."""
    weight = getattr(layer, "weight", None)
    return weight if type(weight) is nn.Parameter and weight.is_floating_point() else None


def absorbable_weight(layer: Any, dtype: torch.dtype) -> nn.Parameter | None:
    """Return the weight of a linear layer if latent attention can read it in place, or None if it cannot.

    This requires that the weight has dtype `dtype` and is not packed. Latent attention makes a copy of other weights.
    """
    weight = plain_weight(layer)
    return weight if weight is not None and weight.dtype == dtype else None


def packing(config: Any) -> str | None:
    method = quantization_option(config, "quant_method")
    return None if method is None else str(getattr(method, "value", method))


def packing_of(model: Any) -> str | None:
    """Return the quantisation method of a loaded model, or None if its weights are not packed."""
    if any("packed" in module._parameters for module in model.modules()):
        return PACKED.method
    # The configuration still names GGUF after transformers has dequantised all weights, as it does for most
    # architectures.
    method = packing(model.config)
    return None if method == "gguf" and all(weight.is_floating_point() for weight in model.parameters()) else method


def backend_of(config: Any) -> LinearBackend | None:
    """Return the weight format of a packed checkpoint, or None if its weights are not packed."""
    method = packing(config)
    if method is None:
        return None
    return next((backend for backend in BACKENDS if backend.method == method), LinearBackend())


def refuse_packed(model: Any, why: str) -> None:
    """Raise ModelError if the weights of a model are packed.

    `why` explains in the message why this is not supported.
    """
    method = packing_of(model)
    if method is not None:
        raise ModelError(
            f"the weights are packed ({method}), and {why}: use the checkpoint they were made from", reason="packed"
        )


def tensor_locations(weight: torch.Tensor) -> Iterator[TensorLocation]:
    """Yield the locations of the plain tensors of a weight, such as the codes and scales of a packed weight."""
    matches = (locations for backend in BACKENDS if (locations := backend.tensor_locations(weight)) is not None)
    return next(matches, iter((TensorLocation(weight, "data"),)))


def tensors_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    return (location.tensor for location in tensor_locations(weight))


def nbytes_of(weight: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(weight))
