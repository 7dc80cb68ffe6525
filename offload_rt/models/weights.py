"""Sizes of a model's weights by decoder layer, and their placement on device or host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from .packed import aligned, held_bytes, places_of, widest_side
from .placement import ExpertSizes, Placement, chosen_by_a_token, experts_of, lone_embedding
from .text_part import text_decoder


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights.

    Attributes:
        fixed: Embeddings (a tied head counts once), head, final norm, and all buffers.
        layers: Weights of each decoder layer, aligned.
        widest: Longest side of any matrix of a layer, in elements.
        experts: The part of `layers` that are experts and may stay in host memory.
        embedding: The part of `fixed` that is the embedding, if it may stay in host memory; else 0.
    """

    fixed: int
    layers: tuple[int, ...]
    widest: int
    experts: ExpertSizes | None = None
    embedding: int = 0

    def on_device(self, placement: Placement) -> WeightSizes:
        """Return the sizes without weights that `placement` keeps in host memory.

        `fixed` then includes the device slots of experts in host memory.
        """
        fixed, layers = self.fixed - (self.embedding if placement.embedding else 0), self.layers
        if placement.experts is not None and self.experts is not None:
            fixed += placement.experts * sum(self.experts.each)
            layers = tuple(size - whole for size, whole in zip(layers, self.experts.whole, strict=True))
        return replace(self, fixed=fixed, layers=layers)

    def on_host(self, placement: Placement) -> int:
        """Return the bytes of experts and embedding in host memory."""
        experts = None if placement.experts is None else self.experts
        stacked = 0 if experts is None else experts.count * sum(experts.each)
        return stacked + (self.embedding if placement.embedding else 0)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a transformers model in order: the outermost `ModuleList` of its decoder."""
    stack = next(module for module in text_decoder(model).modules() if isinstance(module, nn.ModuleList))
    return list(stack)


def layer_bytes(layer: nn.Module) -> int:
    """Return the bytes of a decoder layer's parameters, each aligned."""
    return sum(aligned(place.tensor.nbytes) for weight in layer.parameters() for place in places_of(weight))


def expert_sizes(layers: list[nn.Module]) -> ExpertSizes | None:
    """Return the expert sizes of decoder layers, or None if they have no stacked experts."""
    found = [experts_of(layer) for layer in layers]
    counts = {int(experts.num_experts) for experts in found if experts is not None}
    if len(counts) != 1:
        return None
    each = (0 if e is None else sum(weight[0].nbytes for weight in e.parameters()) for e in found)
    chosen = max(map(chosen_by_a_token, layers))
    return ExpertSizes(counts.pop(), chosen, tuple(each), tuple(0 if e is None else layer_bytes(e) for e in found))


def weight_sizes(model: nn.Module) -> WeightSizes:
    """Return the weight sizes of a loaded model or of one on the meta device."""
    layers = decoder_layers(model)
    own = {id(weight) for layer in layers for weight in layer.parameters()}
    fixed = sum(held_bytes(weight) for weight in model.parameters() if id(weight) not in own)
    fixed += sum(buffer.nbytes for buffer in model.buffers())
    widest = max(widest_side(layer) for layer in layers)
    embedding = lone_embedding(model)
    return WeightSizes(
        fixed,
        tuple(layer_bytes(layer) for layer in layers),
        widest,
        expert_sizes(layers),
        0 if embedding is None else sum(held_bytes(weight) for weight in embedding.parameters()),
    )


def place_weights(model: nn.Module, device: torch.device, placement: Placement) -> None:
    """Move weights and buffers from host memory to `device` one by one, except those `placement` keeps there."""
    layers = decoder_layers(model)
    embedding = lone_embedding(model) if placement.embedding else None
    stay: list[nn.Module] = [layers[layer] for layer in placement.layers]
    stay += [] if embedding is None else [embedding]
    stay += [] if placement.experts is None else [each for layer in layers if (each := experts_of(layer)) is not None]
    staying = {id(weight) for module in stay for weight in module.parameters()}
    for weight in model.parameters():
        if id(weight) not in staying:
            for place in places_of(weight):
                place.put(place.tensor.to(device))
    for module in model.modules():
        if module is embedding:  # its buffers stay in host memory too
            continue
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers; tied ones count once."""
    return sum(held_bytes(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
