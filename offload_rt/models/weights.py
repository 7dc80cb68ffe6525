"""The decoder layers of a model, the sizes of its weights, and their placement on the device or in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from .linear import absorbable_weight, nbytes_of, tensor_locations, tensors_of
from .linear.packed import PACKED
from .multimodal import text_config, text_decoder

ALIGNMENT = 64
"""Alignment in bytes of weights. All weights of a layer are copied to the device as one buffer."""

_ATTENTION = ("self_attn", "attention", "self_attention", "attn")
"""Names of a decoder layer's attention module in transformers."""


@dataclass(frozen=True)
class Placement:
    """Weights that stay in host memory.

    Attributes:
        layers: Indices of the decoder layers whose weights are copied to the device in every pass.
        experts: Number of experts per layer that are cached on the device, the most recently used ones. Other experts
            are copied when the router chooses them. None keeps all experts on the device.
        embedding: Whether the embedding stays in host memory. Embeddings are then looked up there, and only the results
            are copied.
    """

    layers: tuple[int, ...] = ()
    experts: int | None = None
    embedding: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers or self.embedding or self.experts is not None)


ON_DEVICE = Placement()


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes in bytes of a model's experts. For layers without experts, the sizes are 0."""

    count: int  # number of experts in each mixture-of-experts layer
    top_k: int  # number of experts that the router chooses per token
    one_expert: tuple[int, ...]  # size of one expert, for each layer
    all_experts: tuple[int, ...]  # aligned size of all experts, for each layer


@dataclass(frozen=True)
class WeightSizes:
    fixed: int  # all weights outside of decoder layers, all buffers, and the unpacked copies of latent attention
    layers: tuple[int, ...]  # aligned size of the weights of each decoder layer
    widest: int  # largest number of inputs or outputs, per token, among all matrices of a layer
    experts: ExpertSizes | None = None  # sizes of the experts that `layers` includes; they may stay in host memory
    embedding: int = 0  # size of the embedding that `fixed` includes, if it may stay in host memory
    layer_table: int = 0  # size of the table of `LayerEmbeddings` that `fixed` includes

    def on_device(self, placement: Placement) -> WeightSizes:
        """Return the sizes of the weights that are on the device with this placement.

        In the result, `fixed` includes the buffers for experts that are copied from host memory.
        """
        fixed, layers = self.fixed - (self.embedding if placement.embedding else 0), self.layers
        if placement.experts is not None and self.experts is not None:
            fixed += placement.experts * sum(self.experts.one_expert)
            layers = tuple(size - experts for size, experts in zip(layers, self.experts.all_experts, strict=True))
        return replace(self, fixed=fixed, layers=layers)

    def on_host(self, placement: Placement) -> int:
        """Return the size in bytes of the experts and the embedding that `placement` keeps in host memory."""
        experts = None if placement.experts is None else self.experts
        stacked = 0 if experts is None else experts.count * sum(experts.one_expert)
        return stacked + (self.embedding if placement.embedding else 0)


class HostEmbedding(nn.Module):
    """Replacement for the model's embedding. It looks up rows in host memory and copies only these rows to `device`."""

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.inner = embedding
        self.bytes = 0  # copied to the device so far
        weight: torch.Tensor = embedding.weight  # type: ignore[assignment]  # of packed weights, too
        # for callers that read the device and dtype of the embedding
        self.weight = weight.new_empty((0, *weight.shape[1:]), device=device)

    device_bytes = 0

    @property
    def host_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.inner.parameters())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.inner(tokens.cpu())
        self.bytes += rows.nbytes
        return rows.to(tokens.device)


class HostTable(nn.Embedding):
    """The table of `LayerEmbeddings` in host memory. It stays there if the model is moved to a device.

    `keep_table_on_host` converts an existing embedding in place, by changing its class to a subclass of this one.

    Attributes:
        in_place: Whether the table is page-locked and kernels on the device read its rows in place.
    """

    in_place = False

    @property
    def host_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.parameters())

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        return self  # `model.to(device)` calls this method

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Only transformers' own forward calls this, during load-time verification.
        rows: torch.Tensor = super().forward(input.cpu())
        return rows.to(input.device)


def table_stays_on_host(config: Any, device: torch.device, method: str | None) -> bool:
    """Return whether the model has a table of `LayerEmbeddings` that stays in host memory.

    `config` is the configuration of the checkpoint, and `method` is its quantisation method.
    """
    # A step reads only one row per token. In Gemma 4 E2B, a row has 18 KB and the table has 4.7 GB. The table is
    # therefore never worth device memory, and there is no option for it. Models that transformers packs are not moved
    # from host memory.
    has_table = bool(getattr(text_config(config), "hidden_size_per_layer_input", 0))
    return has_table and device.type == "cuda" and method in (None, PACKED.method)


def layer_table(model: Any) -> nn.Module | None:
    return getattr(text_decoder(model), "embed_tokens_per_layer", None)


def keep_table_on_host(model: Any) -> None:
    table = layer_table(model)
    assert table is not None
    kind = type(table)
    table.__class__ = type(kind.__name__, (HostTable, kind), {})


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a transformers model: the outermost `ModuleList` of its decoder."""
    stack = next(module for module in text_decoder(model).modules() if isinstance(module, nn.ModuleList))
    return list(stack)


def attention_layers(layers: list[nn.Module]) -> list[int]:
    """Return the indices of the decoder layers with an attention module, or all indices if none is found."""
    indices = [i for i, layer in enumerate(layers) if attention_of(layer) is not None]
    return indices or list(range(len(layers)))


def attention_of(layer: nn.Module) -> Any:
    named = (getattr(layer, name, None) for name in _ATTENTION)
    # Kimi Linear also calls its recurrent layers `self_attn`.
    found = next((module for module in named if module is not None and not hasattr(module, "conv1d")), None)
    mixer = getattr(layer, "mixer", None)  # Nemotron-H: an attention, a recurrent layer or an MLP
    return found if found is not None or not hasattr(mixer, "q_proj") else mixer


def experts_of(layer: nn.Module) -> Any:
    """Return the module that contains the stacked experts of a decoder layer, or None if the layer has no experts.

    The parameters of this module have the shape `[num_experts, ...]`.
    """
    for name, module in layer.named_modules():
        count, weights = getattr(module, "num_experts", None), list(module.parameters())
        direct = len(list(module.parameters(recurse=False)))
        stacked = direct == len(weights) > 0 and all(len(weight) == count for weight in weights)
        if name.rpartition(".")[2] == "experts" and stacked and hasattr(module, "has_gate"):
            return module
    return None


def untied_embedding(model: Any) -> nn.Module | None:
    """Return the token embedding, or None if it shares its weight with the head."""
    # Every step reads the head's whole matrix, so an embedding that is tied to it must stay on the device.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding_ids = {id(weight) for weight in embedding.parameters()}
    tied = head is None or any(id(weight) in embedding_ids for weight in head.parameters())
    return None if tied else embedding


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def layer_bytes(layer: nn.Module) -> int:
    return sum(aligned(tensor.nbytes) for weight in layer.parameters() for tensor in tensors_of(weight))


def weight_bytes(model: nn.Module) -> int:
    """Return the size in bytes of all parameters and buffers. Tied weights count once."""
    return sum(nbytes_of(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)


def weight_sizes(model: nn.Module) -> WeightSizes:
    layers, embedding, table = decoder_layers(model), untied_embedding(model), layer_table(model)
    layer_ids = {id(weight) for layer in layers for weight in layer.parameters()}
    fixed = sum(nbytes_of(weight) for weight in model.parameters() if id(weight) not in layer_ids)
    return WeightSizes(
        fixed + sum(buffer.nbytes for buffer in model.buffers()) + unpacked_bytes(model),
        tuple(layer_bytes(layer) for layer in layers),
        max(_widest_side(layer) for layer in layers),
        _expert_sizes(layers),
        0 if embedding is None else sum(nbytes_of(weight) for weight in embedding.parameters()),
        0 if table is None else sum(nbytes_of(weight) for weight in table.parameters()),
    )


def unpacked_bytes(model: Any, *, all_packed: bool = False) -> int:
    """Return the size in bytes of the unpacked weight copies that latent attention keeps.

    Set `all_packed` if the linear layers of `model` will be packed during loading.
    """
    dtype = model.get_input_embeddings().weight.dtype
    expansions = [getattr(attention_of(layer), "kv_b_proj", None) for layer in decoder_layers(model)]
    return sum(
        expansion.in_features * expansion.out_features * dtype.itemsize
        for expansion in expansions
        if expansion is not None and (all_packed or absorbable_weight(expansion, dtype) is None)
    )


def _expert_sizes(layers: list[nn.Module]) -> ExpertSizes | None:
    modules = [experts_of(layer) for layer in layers]
    counts = {int(experts.num_experts) for experts in modules if experts is not None}
    if len(counts) != 1:
        return None
    one_expert = (0 if e is None else sum(weight[0].nbytes for weight in e.parameters()) for e in modules)
    all_experts = (0 if e is None else layer_bytes(e) for e in modules)
    return ExpertSizes(counts.pop(), max(map(_experts_per_token, layers)), tuple(one_expert), tuple(all_experts))


def _experts_per_token(layer: nn.Module) -> int:
    declared = (getattr(module, "top_k", None) for module in layer.modules())
    router: Any = getattr(layer, "router", None)  # Gemma 4's router reads it from its configuration
    found = [
        k for k in (*declared, getattr(getattr(router, "config", None), "top_k_experts", None)) if isinstance(k, int)
    ]
    return max(found, default=1)


def _widest_side(layer: nn.Module) -> int:
    """Return the largest number of inputs or outputs, per token, among all matrices of a layer."""
    sides, top_k = [0], _experts_per_token(layer)
    for module in layer.modules():
        features = [getattr(module, name, None) for name in ("in_features", "out_features")]
        if all(isinstance(size, int) for size in features):
            sides += [size for size in features if isinstance(size, int)]
        else:
            parameters = list(module.parameters(recurse=False))
            sides += [size for w in parameters if w.dim() == 2 for size in w.shape]
            # inputs and outputs of all experts that one token uses
            sides += [top_k * sum(w.shape[1:]) for w in parameters if w.dim() == 3]
    return max(sides)


def place_weights(model: nn.Module, device: torch.device, placement: Placement) -> None:
    """Move weights and buffers from host memory to `device`, one at a time.

    Weights that `placement` keeps in host memory are not moved, and neither is a `HostTable`.
    """
    layers = decoder_layers(model)
    embedding = untied_embedding(model) if placement.embedding else None
    tables = [module for module in model.modules() if module is embedding or isinstance(module, HostTable)]
    host_modules: list[nn.Module] = [*tables, *(layers[layer] for layer in placement.layers)]
    if placement.experts is not None:
        host_modules += [experts for layer in layers if (experts := experts_of(layer)) is not None]
    host_ids = {id(weight) for module in host_modules for weight in module.parameters()}
    for weight in model.parameters():
        if id(weight) not in host_ids:
            for location in tensor_locations(weight):
                location.assign(location.tensor.to(device))
    for module in model.modules():
        if any(module is table for table in tables):  # the buffers of embeddings stay in host memory too
            continue
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
