"""Weights that do not fit the device: whole decoder layers stay in host memory and cross the link when they are needed,
a layer ahead (the paper's OPT-30B on a 24 GB card keeps 30 % of its weights in host memory).

Bytes per pass over the layers (a decode step of any batch, or a prefill): the streamed layers' weights, once. With the
link as the bottleneck a step takes no less than these bytes over its rate, whatever the device computes meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import nn

from ...kv_cache.arena import page_lock, reserve
from ...models.adapter import ModelAdapter
from ...models.forwarding import ForwardingAdapter
from ...models.packed import aligned, places_of
from ...models.weights import layer_bytes
from ..streams import Event, Stream

BUFFERS = 2
"""Streamed layers on the device at once: the one that computes, and the one that speculation already asks and that
computes next."""


class WeightStream:
    """The parameters of some decoder layers, each layer a block in host memory (page-locked on CUDA), and `BUFFERS`
    device buffers into which blocks are copied. A layer's modules are never exchanged: while its block is in a buffer
    its parameters are views of the buffer, else views of the host block.

    Order. A block is copied in the stream behind everything queued on the compute stream so far, so nothing still reads
    what it overwrites; compute is held behind the copy when the layer is first used. `begin(l)` says that all layers
    before l have been queued: only then is a buffer given to the next streamed layer.
    """

    def __init__(
        self, layers: Sequence[nn.Module], streamed: Collection[int], device: torch.device, stream: Stream
    ) -> None:
        """Takes the parameters of `layers[i]`, i in `streamed`, all in host memory, out of where they lie; a block at
        a time is held twice. MemoryLimitError where the host memory cannot be had."""
        assert len(streamed) > BUFFERS, "fewer would take no more room where they run"
        self._order = sorted(streamed)
        self._lane = stream
        size = max(layer_bytes(layers[layer]) for layer in self._order)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        self._blocks = {layer: _Block(layers[layer], self._buffers, device.type == "cuda") for layer in self._order}
        self._held: list[int | None] = [None] * BUFFERS
        self._arriving: list[Event | None] = [None] * BUFFERS
        self._current = 0
        self.bytes = 0
        """What has crossed the link so far."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The streamed layers."""
        return tuple(self._order)

    @property
    def device_bytes(self) -> int:
        """The buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def numbers(self) -> int:
        """Bytes of the streamed weights themselves, without what aligns them."""
        return sum(block.numbers for block in self._blocks.values())

    def use(self, layer: int) -> None:
        """What is queued from now on may read the parameters of `layer`, a layer of the model, streamed or not."""
        if layer not in self._blocks:
            return
        if layer not in self._held:
            self._load(layer, keep=(self._current,))
        slot = self._held.index(layer)
        if (mark := self._arriving[slot]) is not None:
            self._lane.hold_compute(mark)
            self._arriving[slot] = None

    def begin(self, layer: int) -> None:
        """`layer` computes from now on, and no layer before it: the buffers are for it and the next ones, past the last
        layer the first of the next pass."""
        self._current = layer
        following = itertools.chain((s for s in self._order if s >= layer), self._order)
        wanted = list(itertools.islice(following, BUFFERS))
        for upcoming in wanted:
            if upcoming not in self._held:
                self._load(upcoming, keep=wanted)

    def _load(self, layer: int, keep: Collection[int]) -> None:
        """Starts the copy of `layer` into a buffer that holds none of `keep`."""
        slot = next(slot for slot, held in enumerate(self._held) if held is None or held not in keep)
        if (before := self._held[slot]) is not None:
            self._blocks[before].look_at(None)
        block = self._blocks[layer]
        with self._lane.behind_compute():
            self._buffers[slot][: block.bytes].copy_(block.host, non_blocking=True)
            self._arriving[slot] = self._lane.mark()
        block.look_at(slot)
        self._held[slot] = layer
        self.bytes += block.bytes

    def check_integrity(self) -> None:
        """Asserts that every parameter looks where its block is."""
        held = [layer for layer in self._held if layer is not None]
        assert len(set(held)) == len(held)
        for layer, block in self._blocks.items():
            block.check_integrity(self._held.index(layer) if layer in held else None)


class _Block:
    """One layer's parameters, packed ones with their scales, one behind the other in memory of the host's own, with
    views of them there and in every buffer; each keeps its strides."""

    def __init__(self, layer: nn.Module, buffers: Sequence[torch.Tensor], pin: bool) -> None:
        self.bytes = layer_bytes(layer)
        memory = reserve(self.bytes, "weights that do not fit the device")
        self.host = torch.frombuffer(memory, dtype=torch.uint8)
        if pin:
            page_lock(self.host, self)
        self._places = [place for weight in layer.parameters() for place in places_of(weight)]
        own = [place.tensor for place in self._places]
        self.numbers = sum(tensor.nbytes for tensor in own)
        self._at_host = _views(own, self.host)
        self._in_buffers = [_views(own, buffer) for buffer in buffers]
        for tensor, view in zip(own, self._at_host, strict=True):
            view.copy_(tensor)
        self.look_at(None)

    def look_at(self, slot: int | None) -> None:
        """The parameters are those in buffer `slot`, or with None those in host memory."""
        for place, view in zip(self._places, self._at_host if slot is None else self._in_buffers[slot], strict=True):
            place.put(view)

    def check_integrity(self, slot: int | None) -> None:
        """Asserts that the parameters look at `slot`."""
        views = self._at_host if slot is None else self._in_buffers[slot]
        assert all(p.tensor.data_ptr() == view.data_ptr() for p, view in zip(self._places, views, strict=True))


def _views(tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> list[torch.Tensor]:
    """Views of `memory`, one behind the other, as each of `tensors` is: dtype, shape and strides."""
    views, at = [], 0
    for tensor in tensors:
        dense = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        assert dense == tensor.numel(), "a weight with gaps between its numbers"
        numbers = memory[at : at + tensor.nbytes].view(tensor.dtype)
        views.append(numbers.as_strided(tensor.shape, tensor.stride()))
        at += aligned(tensor.nbytes)
    return views


class StreamedAdapter(ForwardingAdapter):
    """`ModelAdapter` of a model some of whose layers are in a `WeightStream`: before a layer's modules are called, its
    weights are brought over (`embed` and `logits` are always on the device, `rotate_keys` reads no weight). `qkv` and
    `key_value` are only ever called for the layer that computes, `query` and `attention_input` also to speculate about
    the one after it: so the former say that a layer begins."""

    def __init__(self, inner: ModelAdapter, stream: WeightStream) -> None:
        super().__init__(inner)
        self._stream = stream

    def attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, D]`."""
        self._stream.use(layer)
        return super().attention_input(layer, hidden)

    def qkv(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The model's q `[H, T, d]`, k and v `[Hkv, T, d]`; the layer begins."""
        self._begin(layer)
        return super().qkv(layer, attention_input, positions)

    def query(self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The model's, `[H, T, d]`."""
        self._stream.use(layer)
        return super().query(layer, attention_input, positions)

    def key_value(
        self, layer: int, attention_input: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's, each `[Hkv, T, d]`; the layer begins."""
        self._begin(layer)
        return super().key_value(layer, attention_input, positions)

    def after_attention(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, D]`."""
        self._stream.use(layer)
        return super().after_attention(layer, hidden, attended)

    def mlp(self, layer: int, residual: torch.Tensor) -> torch.Tensor:
        """The model's, `[T, D]`."""
        self._stream.use(layer)
        return super().mlp(layer, residual)

    def _begin(self, layer: int) -> None:
        self._stream.begin(layer)
        self._stream.use(layer)
