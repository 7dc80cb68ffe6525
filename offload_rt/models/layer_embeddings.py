"""Embeddings of each token in every layer (Gemma 4 E2B and E4B).

In addition to the residual stream, every decoder layer gets a short vector per token, the *layer input*. It is the sum
of a row of a second embedding table and a projection of the ordinary embedding. The vector depends only on the token
and the layer, so each layer computes it from the token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.dispatch import embedding_part
from .linear.packed import unpack_rows


class LayerEmbeddings:
    """Computes layer inputs `[T, P]` from token ids `[T]` with the model's modules.

    In transformers, these modules compute the vectors for all layers at once. Here, if the weights are not packed, only
    the part for the requested layer is read.
    """

    _MODULES = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")

    def __init__(self, decoder: Any, embedding: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._decoder, self._embed = decoder, embedding
        self._size = int(decoder.hidden_size_per_layer_input)

    @classmethod
    def find(cls, decoder: Any, embedding: Callable[[torch.Tensor], torch.Tensor]) -> LayerEmbeddings | None:
        return cls(decoder, embedding) if all(hasattr(decoder, name) for name in cls._MODULES) else None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self._decoder, name) for name in self._MODULES)

    def __call__(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        decoder, part = self._decoder, slice(layer * self._size, (layer + 1) * self._size)
        projection, embedded = decoder.per_layer_model_projection, self._embed(tokens)
        if type(projection) is nn.Linear:
            projected = F.linear(embedded, projection.weight[part])
        else:
            projected = projection(embedded)[..., part]
        projected = decoder.per_layer_projection_norm(projected * decoder.per_layer_model_projection_scale)
        found: torch.Tensor = (projected + self._table_part(tokens, part)) * decoder.per_layer_input_scale
        return found

    def _table_part(self, tokens: torch.Tensor, part: slice) -> torch.Tensor:
        """Look up the table rows for `tokens` `[T]`.

        Return their columns `part`, scaled, on the device of the tokens.
        """
        table = self._decoder.embed_tokens_per_layer
        # A kernel can read the table if it is on the device or in page-locked memory. Otherwise, the host looks up the
        # rows.
        ids = tokens if getattr(table, "in_place", True) else tokens.cpu()
        if hasattr(table, "packed"):
            rows = unpack_rows(table.packed, table.form, table.dtype, ids, part)
        else:
            rows = embedding_part(table.weight[:, part], ids)
        found: torch.Tensor = rows.to(tokens.device) * table.embed_scale.to(rows.dtype)
        return found


class LayerInputGate:
    """The modules of a decoder layer that add its layer input to the residual stream, after the MLP."""

    MODULES = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")

    def __init__(self, module: Any) -> None:
        self._module = module

    @classmethod
    def found_in(cls, module: Any) -> bool:
        return all(hasattr(module, name) for name in cls.MODULES)

    def add(self, hidden: torch.Tensor, layer_input: Callable[[], torch.Tensor] | None) -> torch.Tensor:
        """Return `hidden` `[T, D]` plus the gated and projected layer input.

        `layer_input` computes the layer input `[T, P]`.
        """
        assert layer_input is not None, "the model has no layer embeddings"
        layer = self._module
        gated = layer.act_fn(layer.per_layer_input_gate(hidden)) * layer_input()
        out: torch.Tensor = hidden + layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
        return out
