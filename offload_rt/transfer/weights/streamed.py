"""Streaming of decoder layers whose weights do not fit in device memory.

The weights of streamed layers are copied to the device one layer ahead. Each decode step and each prefill copies all of
these weights once, and cannot be faster than this copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...kv_cache.arena import page_lock, reserve
from ...models.adapter import ForwardingAdapter, ModelAdapter
from ...models.linear import tensor_locations
from ...models.recurrent import Stage
from ...models.weights import aligned, layer_bytes
from ..streams import Event, Stream

BUFFERS = 2
"""Number of streamed layers on the device: the current layer and the next one, whose query is already predicted."""


class WeightStream:
    """Streams the weights of decoder layers from host memory through `BUFFERS` device buffers.

    The parameters of each streamed layer are stored in one memory block on the host (page-locked on CUDA). While the
    layer is on the device, its parameters are views of a device buffer. Otherwise, they are views of the memory block.

    Because compute work queued so far may still read the old content of the buffer, a copy waits for this work. The
    compute stream waits for the copy when the layer is first used. Call `begin(l)` when the work of all layers before l
    has been queued.
    """

    def __init__(
        self, layers: Sequence[nn.Module], streamed: Collection[int], device: torch.device, stream: Stream
    ) -> None:
        """Move the parameters of each layer in `streamed` to one host block per layer. Raises MemoryLimitError.

        All parameters must be in host memory.
        """
        assert len(streamed) > BUFFERS, "the buffers have space for all streamed layers"
        self._order = sorted(streamed)
        self._copies = stream
        size = max(layer_bytes(layers[layer]) for layer in self._order)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._blocks = {layer: _Block(layers[layer], self._buffers, device.type == "cuda") for layer in self._order}
        self._layer_in_buffer: list[int | None] = [None] * BUFFERS
        self._pending: list[Event | None] = [None] * BUFFERS
        self._current = 0
        self.bytes = 0

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._order)

    @property
    def device_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def host_bytes(self) -> int:
        return sum(block.weights for block in self._blocks.values())

    def use(self, layer: int) -> None:
        """Make later compute work wait for the parameters of `layer`, if it is streamed."""
        if layer not in self._blocks:
            return
        if layer not in self._layer_in_buffer:
            self._load(layer, keep=(self._current,))
        slot = self._layer_in_buffer.index(layer)
        if (event := self._pending[slot]) is not None:
            self._copies.hold_compute(event)
            self._pending[slot] = None

    def begin(self, layer: int) -> None:
        """Mark `layer` as current, and prefetch the next `BUFFERS` streamed layers, starting with `layer` itself.

        The last streamed layer is followed by the first ones, for the next step.
        """
        self._current = layer
        following = itertools.chain((s for s in self._order if s >= layer), self._order)
        wanted = list(itertools.islice(following, BUFFERS))
        for upcoming in wanted:
            if upcoming not in self._layer_in_buffer:
                self._load(upcoming, keep=wanted)

    def _load(self, layer: int, keep: Collection[int]) -> None:
        slot = next(slot for slot, held in enumerate(self._layer_in_buffer) if held is None or held not in keep)
        if (before := self._layer_in_buffer[slot]) is not None:
            self._blocks[before].use_buffer(None)
        block = self._blocks[layer]
        with self._copies.behind_compute():
            self._buffers[slot][: block.bytes].copy_(block.host, non_blocking=True)
            self._pending[slot] = self._copies.record_event()
        block.use_buffer(slot)
        self._layer_in_buffer[slot] = layer
        self.bytes += block.bytes

    def check_integrity(self) -> None:
        held = [layer for layer in self._layer_in_buffer if layer is not None]
        assert len(set(held)) == len(held)
        for layer, block in self._blocks.items():
            block.check_integrity(self._layer_in_buffer.index(layer) if layer in held else None)


class _Block:
    """The parameters of one layer in contiguous host memory, with views of this memory and of each device buffer.

    The parameters include the scales of packed weights.
    """

    def __init__(self, layer: nn.Module, buffers: Sequence[torch.Tensor], pin: bool) -> None:
        self.bytes = layer_bytes(layer)
        memory = reserve(self.bytes, "weights that do not fit the device")
        self.host = torch.frombuffer(memory, dtype=torch.uint8)
        if pin:
            page_lock(self.host, self)
        self._places = [place for weight in layer.parameters() for place in tensor_locations(weight)]
        own = [place.tensor for place in self._places]
        self.weights = sum(tensor.nbytes for tensor in own)
        self._at_host = _views(own, self.host)
        self._in_buffers = [_views(own, buffer) for buffer in buffers]
        for tensor, view in zip(own, self._at_host, strict=True):
            view.copy_(tensor)
        self.use_buffer(None)

    def use_buffer(self, slot: int | None) -> None:
        for place, view in zip(self._places, self._at_host if slot is None else self._in_buffers[slot], strict=True):
            place.assign(view)

    def check_integrity(self, slot: int | None) -> None:
        views = self._at_host if slot is None else self._in_buffers[slot]
        assert all(p.tensor.data_ptr() == view.data_ptr() for p, view in zip(self._places, views, strict=True))


def _views(tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> list[torch.Tensor]:
    views, at = [], 0
    for tensor in tensors:
        dense = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        assert dense == tensor.numel(), "a weight is not dense in memory"
        numbers = memory[at : at + tensor.nbytes].view(tensor.dtype)
        views.append(numbers.as_strided(tensor.shape, tensor.stride()))
        at += aligned(tensor.nbytes)
    return views


class StreamedAdapter(ForwardingAdapter):
    """`ModelAdapter` of a model with streamed layers. It copies the weights of a layer before calling its modules.

    Methods for the current layer call `WeightStream.begin`. `query` and `attention_input` only call `WeightStream.use`,
    because they are also called for the next layer, to predict its query.
    """

    def __init__(self, inner: ModelAdapter, stream: WeightStream) -> None:
        super().__init__(inner)
        self._stream = stream

    def stages(self, layer: int) -> Sequence[Stage]:
        return [replace(stage, run=partial(self._run, stage)) for stage in super().stages(layer)]

    def _run(self, stage: Stage, hidden: torch.Tensor) -> torch.Tensor:
        self._stream.begin(stage.layer)
        self._stream.use(stage.layer)
        return stage.run(hidden)

    def replay_mixer(self, decoder_layer: int, inputs: torch.Tensor) -> None:
        self._stream.begin(decoder_layer)
        self._stream.use(decoder_layer)
        super().replay_mixer(decoder_layer, inputs)

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        self._use(layer)
        return super().attention_input(layer, hidden)

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._begin(layer)
        return super().qkv(layer, attention_input, positions)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._use(layer)
        return super().query(layer, attention_input, positions)

    def lone_query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self._begin(layer)
        return super().lone_query(layer, attention_input, positions)

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._begin(layer)
        return super().key_value(layer, attention_input, positions)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        self._use(layer)
        return super().after_attention(layer, hidden, attended)

    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        self._use(layer)
        return super().mlp(layer, residual, tokens)

    def _begin(self, layer: int) -> None:
        self._stream.begin(self.geometry.decoder_layer(layer))
        self._use(layer)

    def _use(self, layer: int) -> None:
        self._stream.use(self.geometry.decoder_layer(layer))
