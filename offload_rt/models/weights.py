"""Which of a model's weights belong to which decoder layer, how many bytes they take, and on which side they lie."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from .packed import held_bytes, widest_side

ALIGNMENT = 64
"""Every weight of a layer that moves as one block begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights.

    fixed: embeddings (a tied head counted once), head, final norm, and all buffers.
    layers: of each decoder layer, its weights aligned one behind the other.
    widest: the longest side of any matrix of a layer: what an MLP widens a token to.
    """

    fixed: int
    layers: tuple[int, ...]
    widest: int


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a transformers model of a supported architecture, in order: its outermost list."""
    stack = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    return list(stack)


def layer_bytes(layer: nn.Module) -> int:
    """Bytes of one decoder layer's parameters, each aligned."""
    return sum(-(-held_bytes(weight) // ALIGNMENT) * ALIGNMENT for weight in layer.parameters())


def weight_sizes(model: nn.Module) -> WeightSizes:
    """Of a loaded model, or of one on the meta device."""
    layers = decoder_layers(model)
    own = {id(weight) for layer in layers for weight in layer.parameters()}
    fixed = sum(held_bytes(weight) for weight in model.parameters() if id(weight) not in own)
    fixed += sum(buffer.nbytes for buffer in model.buffers())
    widest = max(widest_side(layer) for layer in layers)
    return WeightSizes(fixed, tuple(layer_bytes(layer) for layer in layers), widest)


def place_weights(model: nn.Module, device: torch.device, on_host: Collection[int]) -> None:
    """Moves all weights and buffers of a model in host memory to `device`, one at a time, but for the parameters of the
    decoder layers `on_host`."""
    layers = decoder_layers(model)
    stay = {id(weight) for layer in on_host for weight in layers[layer].parameters()}
    for weight in model.parameters():
        if id(weight) not in stay:
            weight.data = weight.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
