"""The interface between the runtime and a model: everything in a layer except attention.

An adapter calls the modules of a loaded transformers model: norms, projections, rotary embedding, MLP. It has no KV
cache, and it does not loop over layers. The T tokens of one call may belong to different sequences.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch

from ..core import ModelGeometry
from ..errors import ModelError
from .recurrent import RecurrentState, Stage, StateSlots


class ModelAdapter(ABC):
    """Computes the layers of one decoder-only transformer, except attention.

    In all methods, `layer` counts attention layers, starting at 0. Tensors are on `device` and have dtype `dtype`
    unless noted otherwise. Only `run_stages` modifies its arguments.

    Attributes:
        sinks: The learned attention sinks of each layer, `[H]` in float32 or wider, or None. A sink is a score that is
            added to the softmax denominator but has no value vector. The attention scale does not apply to it.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        dtype: torch.dtype,
        device: torch.device,
        sinks: Sequence[torch.Tensor | None] = (),
    ) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self.sinks = sinks or (None,) * geometry.layers

    def with_state(self, state: RecurrentState | None) -> ModelAdapter:
        """Return an adapter that reads and updates `state`.

        Every call must process the sequences of `state`, in the same order.

        Required for hybrid models, in which only some layers have attention. Every token must pass through each layer
        exactly once, in order. For other models, the adapter returns itself.
        """
        return self

    def for_new_sequence(self) -> ModelAdapter:
        """Return an adapter for one new sequence. For hybrid models, it starts with an empty recurrent state."""
        if not self.geometry.states:
            return self
        slots = StateSlots(self.geometry, self.dtype, self.device)
        return self.with_state(slots.view([slots.allocate()]))

    def stages(self, layer: int) -> Sequence[Stage]:
        """Return the attention-free decoder layers between attention layer `layer` and the next one (-1: before the
        first).

        All tokens must pass through these layers after `mlp` (or after `embed` if `layer` is -1).
        """
        return ()

    def run_stages(self, layer: int, hidden: torch.Tensor, slices: Sequence[slice]) -> None:
        """Overwrite `hidden` `[T, D]`, the output of attention layer `layer`, with the output of the stages that follow
        it.

        To save memory, each slice of tokens is computed separately.
        """
        for stage in self.stages(layer):
            for s in slices:
                hidden[s] = stage.run(hidden[s])

    def replay_mixer(self, decoder_layer: int, inputs: torch.Tensor) -> None:
        """Update the recurrent state of a decoder layer by running its recurrent mixer on recorded inputs `[T, D]`.

        After some draft tokens are rejected, speculative decoding uses this to recompute the state from the accepted
        ones.
        """
        raise NotImplementedError

    @abstractmethod
    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the input of layer 0, `[T, D]`, for token ids `[T]` at positions `[T]` (both int64).

        The caller must check that absolute positions are below `geometry.max_positions`.
        """

    @abstractmethod
    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input `[T, D]` of the q, k and v projections, usually the normalised input of the layer."""

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q `[H, T, d]`, k `[Hkv, T, d]` and v `[Hkv, T, d]` after bias, QK-norm and RoPE.

        q is not multiplied by the attention scale, which is in `geometry.scales[layer]`.
        """
        return self.query(layer, attention_input, positions), *self.key_value(layer, attention_input, positions)

    @abstractmethod
    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Like `qkv`, but return only q, `[H, T, d]`."""

    def lone_query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return q `[H, T, d]` for a layer that uses the K and V of an earlier layer (`geometry.kv_layer`).

        Such layers use this method instead of `qkv`. Unlike `query`, it is never used to predict the query of a later
        layer.
        """
        return self.query(layer, attention_input, positions)

    @abstractmethod
    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `qkv`, but return only k and v, both `[Hkv, T, d]`."""

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        """Rotate cached keys k `[Hkv, n, d]` with RoPE, so that their positions increase by `offset`.

        Angles are computed in float64, and products in float32. If YaRN scales the keys, they are not scaled again.

        Raises:
            ModelError: The model uses absolute positions.
        """
        raise ModelError("this model has absolute positions, so cached keys cannot be moved to other positions")

    @abstractmethod
    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream `[T, D]`: the layer's input `hidden` plus the output projection of `attended`.

        If attention and MLP run in parallel, the MLP's output is also added.
        """

    @abstractmethod
    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's output `[T, D]`, computed from the residual stream after attention `[T, D]`.

        Only models with `LayerEmbeddings` use the token ids `tokens` `[T]`.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[T, V]` in float32 or wider: the final norm, the head and the soft cap are applied to
        `hidden`.
        """


class ForwardingAdapter(ModelAdapter):
    """Base class of wrappers: forwards every method that the subclass does not override to the adapter `inner`."""

    def __init__(self, inner: ModelAdapter) -> None:
        super().__init__(inner.geometry, inner.dtype, inner.device, inner.sinks)
        self._inner = inner

    def with_state(self, state: RecurrentState | None) -> Self:
        if state is None:
            return self
        bound = copy.copy(self)
        bound._inner = self._inner.with_state(state)
        return bound

    def stages(self, layer: int) -> Sequence[Stage]:
        return self._inner.stages(layer)

    def replay_mixer(self, decoder_layer: int, inputs: torch.Tensor) -> None:
        self._inner.replay_mixer(decoder_layer, inputs)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._inner.embed(tokens, positions)

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._inner.attention_input(layer, hidden)

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._inner.qkv(layer, attention_input, positions)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._inner.query(layer, attention_input, positions)

    def lone_query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._inner.lone_query(layer, attention_input, positions)

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._inner.key_value(layer, attention_input, positions)

    def rotate_keys(self, layer: int, k: torch.Tensor, offset: int) -> torch.Tensor:
        return self._inner.rotate_keys(layer, k, offset)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return self._inner.after_attention(layer, hidden, attended)

    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self._inner.mlp(layer, residual, tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._inner.logits(hidden)
