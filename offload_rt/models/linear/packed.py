"""Linear layers, embeddings and stacked experts (gpt-oss) that compute directly with packed weights
(`PackedFormat`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels import packed_products
from ...kernels.dispatch import uses_triton
from ...kernels.packed_format import TILE, PackedFormat
from .backend import BackendLinear, LinearBackend
from .dense import product_by_tiles

TILE_WEIGHTS = 1 << 24
"""Maximum number of weights that are unpacked at a time on a GPU, for products of many rows."""

MAX_BATCHED_PAIRS = 64
"""Maximum number of (token, expert) pairs for which a GPU computes a projection for all experts in one kernel launch.

Steps captured in CUDA graphs always use one launch.
"""


class PackedLinear(BackendLinear):
    form: PackedFormat
    packed: nn.Parameter
    order: nn.Parameter

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        form = self.form
        return packed_linear(input[..., self.order] if form.permuted else input, self.packed, form, self.bias)

    def dequantised(self) -> torch.Tensor:
        """Return the weight, float32 `[out, in]`."""
        columns = self.form.unpack(self.packed, torch.float32)
        return columns[:, self.order.argsort()] if self.form.permuted else columns

    def scale_weight(self, scales: torch.Tensor) -> None:
        """Multiply the rows of the weight by powers of two `[out]`, but not the bias."""
        self.form, rows = self.form.scale_rows(self.packed, scales)
        self.packed = nn.Parameter(rows, requires_grad=False)


class PackedWeights(LinearBackend):
    """Weight format with integer codes and one scale per group of inputs, stored in the layer's parameter `packed`.

    For few input rows, C code or a Triton kernel multiplies by the packed weights. For many rows, tiles are unpacked
    and torch multiplies by them, with the same result as for the dequantised weight.
    """

    method = "offload-rt"
    layer_class = PackedLinear

    def can_stream(self, config: Any) -> bool:
        return True


PACKED = PackedWeights()


def packed_linear(x: torch.Tensor, packed: torch.Tensor, form: PackedFormat, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply `x` `[..., in]`, whose inputs are in packed order, by packed weights and add `bias`.

    The result is `[..., out]`.
    """
    # A model that was loaded for a CPU has interleaved rows, also after it has been moved to a GPU.
    plain = torch.is_grad_enabled() or not x.numel() or (x.is_cuda and form.interleaved)
    if x.is_cuda and not plain:
        return _linear_on_gpu(x.reshape(-1, form.ins), packed, form, bias).view(*x.shape[:-1], len(packed))
    code = None if plain else packed_products.compiled_for(x.dtype)
    if code is None:
        return F.linear(x, form.unpack(packed, x.dtype), bias)
    if form.interleaved and x.numel() <= packed_products.MAX_ROWS * form.ins:
        return code.linear(x, packed, form, bias)

    def weights(tile: slice, dtype: torch.dtype) -> torch.Tensor:
        code = packed_products.compiled_for(dtype)
        assert code is not None
        return code.unpack(packed[tile], form, dtype)

    return product_by_tiles(x, weights, len(packed), bias, TILE)


def _linear_on_gpu(
    x: torch.Tensor, packed: torch.Tensor, form: PackedFormat, bias: torch.Tensor | None
) -> torch.Tensor:
    if uses_triton(x):
        from ...kernels import triton_packed

        if len(x) <= triton_packed.MAX_ROWS:
            return triton_packed.linear(x, packed, form, bias)
    height = max(1, TILE_WEIGHTS // form.ins)
    if height >= len(packed):
        return F.linear(x, unpack_rows(packed, form, x.dtype), bias)
    out = x.new_empty(len(x), len(packed))
    for start in range(0, len(packed), height):
        tile = slice(start, start + height)
        out[:, tile] = F.linear(x, unpack_rows(packed[tile], form, x.dtype), None if bias is None else bias[tile])
    return out


def unpack_rows(
    packed: torch.Tensor,
    form: PackedFormat,
    dtype: torch.dtype,
    ids: torch.Tensor | None = None,
    inputs: slice = slice(None),
) -> torch.Tensor:
    """Unpack the weights of the rows `ids` `[n]` (None: all rows) and the inputs `inputs`. The result is `[n, in]`.

    The result is on the device of `ids`, or on that of `packed` if `ids` is None.
    """
    target = packed if ids is None else ids
    if uses_triton(target) and not form.interleaved and dtype != torch.float64:
        from ...kernels import triton_packed

        part = range(form.ins)[inputs]
        if part.start % triton_packed.PART == 0 == part.stop % triton_packed.PART:
            return triton_packed.unpack(packed, form, dtype, ids, part)
        return triton_packed.unpack(packed, form, dtype, ids)[:, inputs]
    if ids is not None:
        packed, form = form.rows(packed, ids.to(packed.device)).to(ids.device), replace(form, interleaved=False)
    code = None if packed.is_cuda else packed_products.compiled_for(dtype)
    return (form.unpack(packed, dtype) if code is None else code.unpack(packed, form, dtype))[:, inputs]


class PackedEmbedding(nn.Embedding):
    """Embedding with packed weights. It unpacks only the rows of the requested tokens."""

    form: PackedFormat
    packed: nn.Parameter
    dtype: torch.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """An empty tensor `[0, D]` with the dtype and device of the embedding, for callers that read only these
        properties.
        """
        return torch.empty((0, self.form.ins), dtype=self.dtype, device=self.packed.device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return unpack_rows(self.packed, self.form, self.dtype, input.flatten()).view(*input.shape, self.form.ins)


def use_packed_weights(
    module: nn.Module, form: PackedFormat, dtype: torch.dtype, rows: torch.Tensor | None = None
) -> None:
    """Convert `module`, a plain `nn.Linear` or an `nn.Embedding`, to packed weights in place.

    If `form.permuted` is set, `module` gets a parameter `order`, int32 `[ins]`: packed input i is input `order[i]` of
    the layer.

    Args:
        dtype: The model's dtype.
        rows: Packed rows, uint8 `[out, form.row_bytes]`. If None, the rows are left uninitialised and must be loaded
            later.
    """
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    if rows is None:
        rows = weight.new_empty((len(weight), form.row_bytes), dtype=torch.uint8)
    module.form, module.packed = form, nn.Parameter(rows, requires_grad=False)  # type: ignore[assignment]
    if form.permuted:
        order = weight.new_empty(form.ins, dtype=torch.int32)
        module.order = nn.Parameter(order, requires_grad=False)
    del module.weight
    if isinstance(module, nn.Linear):
        module.__class__ = PackedLinear
        return
    module.dtype = dtype  # type: ignore[assignment]
    kind = type(module)
    # A subclass that scales embeddings (Gemma) still scales them.
    module.__class__ = PackedEmbedding if kind is nn.Embedding else type(kind.__name__, (kind, PackedEmbedding), {})


def can_use_packed_weights(module: nn.Module) -> bool:
    return type(module) is nn.Linear or isinstance(module, nn.Embedding)


PROJECTIONS = ("gate_up_proj", "down_proj")
"""Weights of stacked experts that can be packed, each `[experts, in, out]`."""


class PackedProjection(nn.Module):
    """The packed weights of one projection of all experts: `packed`, uint8 `[experts, out, form.row_bytes]`."""

    def __init__(self, form: PackedFormat, packed: torch.Tensor) -> None:
        super().__init__()
        self.form, self.packed = form, nn.Parameter(packed, requires_grad=False)

    def product(self, x: torch.Tensor, expert: int, bias: torch.Tensor) -> torch.Tensor:
        return packed_linear(x, self.packed[expert], self.form, bias[expert])

    def products(self, x: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Multiply each row of x `[n, in]` by the weight of its expert in `experts` `[n]`, and add the expert's bias.

        `x` must be on a GPU with Triton. The kernel reads `experts` on the GPU, so the host does not wait for the
        router.
        """
        from ...kernels import triton_packed

        return triton_packed.linear(x, self.packed, self.form, bias, experts)


class PackedExperts(nn.Module):
    gate_up_proj: PackedProjection
    down_proj: PackedProjection
    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return, for each token, the weighted sum of the outputs of its k chosen experts, `[T, D]`.

        `router_indices` and `routing_weights` both have shape `[T, k]`.
        """
        module: Any = self  # has `_apply_gate` of the original class
        # The loop below reads the chosen experts on the host, which a captured step cannot do.
        interleaved = self.gate_up_proj.form.interleaved or self.down_proj.form.interleaved
        batched = uses_triton(hidden_states) and not torch.is_grad_enabled() and not interleaved
        pairs = router_indices.numel()
        if pairs and batched and (pairs <= MAX_BATCHED_PAIRS or torch.cuda.is_current_stream_capturing()):
            experts, tokens = router_indices.flatten(), hidden_states.repeat_interleave(router_indices.shape[1], 0)
            gate_up = self.gate_up_proj.products(tokens, experts, self.gate_up_proj_bias)
            results = self.down_proj.products(module._apply_gate(gate_up), experts, self.down_proj_bias)
            return (results.view(*router_indices.shape, -1) * routing_weights[..., None]).sum(1).to(results.dtype)
        out = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            tokens, choice = torch.where(router_indices == expert)
            gate_up = self.gate_up_proj.product(hidden_states[tokens], expert, self.gate_up_proj_bias)
            result = self.down_proj.product(module._apply_gate(gate_up), expert, self.down_proj_bias)
            out.index_add_(0, tokens, (result * routing_weights[tokens, choice, None]).to(out.dtype))
        return out


def is_stacked(module: nn.Module, name: str) -> bool:
    """Return whether `name` is a weight of stacked experts that `use_packed_experts` supports."""
    weight = module._parameters.get(name)
    return name in PROJECTIONS and weight is not None and weight.dim() == 3 and hasattr(module, "_apply_gate")


def use_packed_experts(experts: nn.Module, name: str, form: PackedFormat) -> None:
    """Replace a projection of stacked experts in place with uninitialised packed weights."""
    weight: torch.Tensor = getattr(experts, name)
    packed = weight.new_empty((weight.shape[0], weight.shape[2], form.row_bytes), dtype=torch.uint8)
    delattr(experts, name)
    setattr(experts, name, PackedProjection(form, packed))
    kind = type(experts)
    if not issubclass(kind, PackedExperts):
        experts.__class__ = type(kind.__name__, (PackedExperts, kind), {})
