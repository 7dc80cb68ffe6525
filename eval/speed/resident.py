"""Baseline that keeps all KV on the device. Each step is a CUDA graph that reads all of the KV.

If the KV cache fits in device memory, this is the fair baseline for exact attention. transformers' StaticCache is
slower, because it launches every kernel from the host.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from ...core import KVPart
from ...model_runner.cuda_graphs import CudaGraph, SharedPool

ATTENTION = "offload_rt_resident"
"""Name under which the attention function is registered in transformers, which creates no mask for custom functions."""


def _attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: None, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Return the attention `[B, 1, H, d]` of `q` `[B, H, 1, d]` to all of `k` and `v` `[B, Hkv, N, d]`."""
    assert mask is None
    return scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True).transpose(1, 2), None


class _Fixed(DynamicCache):
    """Cache of constant length. Each new token replaces the last token, so that a CUDA graph can be replayed."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self._kv = length, list[tuple[torch.Tensor, torch.Tensor]]()

    def fill(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._kv.append((k, v))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace the KV of a layer's last token. Return the KV of all tokens."""
        k, v = self._kv[layer_idx]
        k[:, :, -1:], v[:, :, -1:] = key_states, value_states
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length


class Resident:
    """transformers' model with all KV on the device and torch's attention. Each step is one CUDA graph."""

    name = "resident"

    def __init__(self, model: Any, length: int, tokens: torch.Tensor) -> None:
        AttentionInterface.register(ATTENTION, _attend)
        self._model = copy.copy(model)
        self._before = model.config._attn_implementation
        self._cache, self._tokens = _Fixed(length), tokens
        self._positions = torch.full_like(tokens, length - 1)
        self._graph: CudaGraph | None = None
        self._steps = 0

    def fill(self, layer: int, kv: KVPart) -> None:
        batch = len(self._tokens)
        k, v = (x[None].to(self._tokens.device, self._model.dtype).repeat(batch, 1, 1, 1) for x in (kv.k, kv.v))
        self._cache.fill(k, v)

    @torch.inference_mode()
    def step(self) -> None:
        """Run one forward pass. On a CUDA device, the second step is captured, and later steps replay it."""
        self._steps += 1
        if self._graph is None and self._steps > 1 and self._tokens.is_cuda:
            self._graph = SharedPool(self._tokens.device).new_graph()
            self._graph.capture(self._forward)
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def _forward(self) -> tuple[torch.Tensor, ...]:
        config = self._model.config
        config._attn_implementation = ATTENTION  # the model is shared with other baselines
        try:
            output = self._model(
                input_ids=self._tokens, position_ids=self._positions, past_key_values=self._cache, use_cache=True
            )
        finally:
            config._attn_implementation = self._before
        return (output.logits,)

    def facts(self) -> dict[str, Any]:
        return {"exact_fraction": 1.0}
