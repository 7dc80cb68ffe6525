"""A model's decoder layers, the sizes of its weights, and their placement on the device or in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .linear import held_bytes, places_of, tensors_of
from .multimodal import text_decoder

ALIGNMENT = 64
"""Alignment in bytes of each weight in a layer that is copied as one buffer."""

_ATTENTION = ("self_attn", "attention", "self_attention", "attn")
"""Names of the attention module in a decoder layer."""


@dataclass(frozen=True)
class Placement:
    """Weights that stay in host memory.

    Attributes:
        layers: Decoder layers whose weights are copied to the device in every pass.
        experts: Number of most recently used experts per layer on the device. Others are copied when the router chooses
            them. None: all experts are on the device.
        embedding: Look up the embedding in host memory, and copy only the results to the device.
    """

    layers: tuple[int, ...] = ()
    experts: int | None = None
    embedding: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers or self.embedding or self.experts is not None)


ON_DEVICE = Placement()
"""All weights are on the device."""


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts of a model.

    Attributes:
        count: Experts in each layer that has any.
        chosen: Experts per token.
        each: Size of one expert in bytes, per layer; 0 if the layer has none.
        whole: Aligned size of all experts in bytes, per layer; 0 if the layer has none.
    """

    count: int
    chosen: int
    each: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(frozen=True)
class WeightSizes:
    """Sizes of a model's weights in bytes.

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
        """Return the size in bytes of experts and embedding in host memory."""
        experts = None if placement.experts is None else self.experts
        stacked = 0 if experts is None else experts.count * sum(experts.each)
        return stacked + (self.embedding if placement.embedding else 0)


class HostEmbedding(nn.Module):
    """Replacement of a model's embedding that looks up tokens in host memory and copies only the results."""

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        """`device` is the model's device, which has token ids and results."""
        super().__init__()
        self.inner = embedding
        self.bytes = 0
        """Bytes copied to the device so far."""
        own: torch.Tensor = embedding.weight  # type: ignore[assignment]  # of packed weights, too
        self.weight = own.new_empty((0, *own.shape[1:]), device=device)
        """Empty tensor `[0, D]` with the model's device and dtype, which adapters read from the embedding."""

    device_bytes = 0

    @property
    def host_bytes(self) -> int:
        """Size in bytes of the embedding in host memory."""
        return sum(weight.nbytes for weight in self.inner.parameters())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[..., D]` of token ids `[...]`."""
        rows: torch.Tensor = self.inner(tokens.cpu())
        self.bytes += rows.nbytes
        return rows.to(tokens.device)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a transformers model in order: the outermost `ModuleList` of its decoder."""
    stack = next(module for module in text_decoder(model).modules() if isinstance(module, nn.ModuleList))
    return list(stack)


def attention_layers(layers: list[nn.Module]) -> list[int]:
    """Return the indices of the decoder layers that have an attention module; all if none has a known name."""
    found = [i for i, layer in enumerate(layers) if attention_of(layer) is not None]
    return found or list(range(len(layers)))


def attention_of(layer: nn.Module) -> Any:
    """Return the attention module of a decoder layer, or None. Nemotron-H has one `mixer` of any kind per layer."""
    found = next((each for name in _ATTENTION if (each := getattr(layer, name, None)) is not None), None)
    mixer = getattr(layer, "mixer", None)
    return found if found is not None or not hasattr(mixer, "q_proj") else mixer


def experts_of(layer: nn.Module) -> Any:
    """Return the module with the stacked experts of a decoder layer, or None if there is none.

    Each of its parameters is `[num_experts, ...]`, as transformers stacks them for `use_experts_implementation`.
    """
    for name, module in layer.named_modules():
        count, weights = getattr(module, "num_experts", None), list(module.parameters())
        own = len(list(module.parameters(recurse=False)))
        stacked = own == len(weights) > 0 and all(len(weight) == count for weight in weights)
        if name.rpartition(".")[2] == "experts" and stacked and hasattr(module, "has_gate"):
            return module
    return None


def lone_embedding(model: Any) -> nn.Module | None:
    """Return the token embedding, or None if the head shares its weight.

    Every token reads the whole matrix of a tied head, so it must stay on the device.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    own = {id(weight) for weight in embedding.parameters()}
    tied = head is None or any(id(weight) in own for weight in head.parameters())
    return None if tied else embedding


def aligned(size: int) -> int:
    """Round `size` in bytes up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def layer_bytes(layer: nn.Module) -> int:
    """Return the size in bytes of a decoder layer's parameters, each aligned."""
    return sum(aligned(tensor.nbytes) for weight in layer.parameters() for tensor in tensors_of(weight))


def weight_bytes(model: nn.Module) -> int:
    """Return the size in bytes of all parameters and buffers; tied ones count once."""
    return sum(held_bytes(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def weight_sizes(model: nn.Module) -> WeightSizes:
    """Return the weight sizes of a loaded model or of one on the meta device."""
    layers, embedding = decoder_layers(model), lone_embedding(model)
    own = {id(weight) for layer in layers for weight in layer.parameters()}
    fixed = sum(held_bytes(weight) for weight in model.parameters() if id(weight) not in own)
    return WeightSizes(
        fixed + sum(buffer.nbytes for buffer in model.buffers()),
        tuple(layer_bytes(layer) for layer in layers),
        max(_widest_side(layer) for layer in layers),
        _expert_sizes(layers),
        0 if embedding is None else sum(held_bytes(weight) for weight in embedding.parameters()),
    )


def _expert_sizes(layers: list[nn.Module]) -> ExpertSizes | None:
    """Return the expert sizes of decoder layers, or None if they have no stacked experts."""
    found = [experts_of(layer) for layer in layers]
    counts = {int(experts.num_experts) for experts in found if experts is not None}
    if len(counts) != 1:
        return None
    each = (0 if e is None else sum(weight[0].nbytes for weight in e.parameters()) for e in found)
    whole = (0 if e is None else layer_bytes(e) for e in found)
    return ExpertSizes(counts.pop(), max(map(_chosen_by_a_token, layers)), tuple(each), tuple(whole))


def _chosen_by_a_token(layer: nn.Module) -> int:
    """Return the number of experts per token of a decoder layer, or 1 if it has none."""
    return max((k for module in layer.modules() if isinstance(k := getattr(module, "top_k", None), int)), default=1)


def _widest_side(layer: nn.Module) -> int:
    """Return the longest side of any matrix of a layer, packed or not.

    For experts it is the sum of both sides times the number of experts per token.
    """
    sides, chosen = [0], _chosen_by_a_token(layer)
    for module in layer.modules():
        stated = [getattr(module, name, None) for name in ("in_features", "out_features")]
        if all(isinstance(size, int) for size in stated):
            sides += [size for size in stated if isinstance(size, int)]
        else:
            own = list(module.parameters(recurse=False))
            sides += [size for w in own if w.dim() == 2 for size in w.shape]
            sides += [chosen * sum(w.shape[1:]) for w in own if w.dim() == 3]
    return max(sides)


def place_weights(model: nn.Module, device: torch.device, placement: Placement) -> None:
    """Move weights and buffers from host memory to `device` one by one, except weights that `placement` keeps there."""
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
