"""Embeddings of each token in every layer (Gemma 4 E2B and E4B).

Besides the residual stream, every decoder layer gets a short vector of each of its tokens, the *layer input*. It is the
sum of a row of a second embedding table and of a projection of the token's ordinary embedding. It depends only on the
token and the layer, so layers compute it from the token ids instead of keeping it for all tokens of a prefill.
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
    """The model's modules that compute layer inputs `[T, P]` from token ids `[T]`.

    The modules compute the vectors of all L layers at once. If their weights are not packed, only the part of one layer
    is read.
    """

    _MODULES = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")

    def __init__(self, decoder: Any, embedding: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Use the modules of `decoder`, whose ordinary token embedding is `embedding`."""
        self._decoder, self._embed = decoder, embedding
        self._size = int(decoder.hidden_size_per_layer_input)

    @classmethod
    def find(cls, decoder: Any, embedding: Callable[[torch.Tensor], torch.Tensor]) -> LayerEmbeddings | None:
        """Return the layer embeddings of `decoder`, or None if it has none."""
        return cls(decoder, embedding) if all(hasattr(decoder, name) for name in cls._MODULES) else None

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(getattr(self._decoder, name) for name in self._MODULES)

    def __call__(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return the inputs `[T, P]` of decoder layer `layer` for tokens `[T]`."""
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
        """Return the columns `part` of the table's rows for tokens `[T]`, scaled, on the device of the tokens."""
        table = self._decoder.embed_tokens_per_layer
        # A kernel reads a table on the device or in page-locked memory. Otherwise, the host looks up the rows.
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
        """Return `hidden` `[T, D]` plus the gated and projected layer input, which `layer_input` computes `[T, P]`."""
        assert layer_input is not None, "the model has no layer embeddings"
        layer = self._module
        gated = layer.act_fn(layer.per_layer_input_gate(hidden)) * layer_input()
        out: torch.Tensor = hidden + layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
        return out
