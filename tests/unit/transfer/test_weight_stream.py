"""Test streamed weights: buffers of layers, their copies, and waits."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples
from torch import nn

from offload_rt.models.weights import layer_bytes
from offload_rt.transfer.streams import InlineStream
from offload_rt.transfer.weights.streamed import WeightStream


def numbered_layers(layers: int = 6) -> list[nn.Module]:
    """Return layers whose weights are filled with the layer's number. One matrix is column-major."""
    made: list[nn.Module] = []
    for number in range(layers):
        layer = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)).requires_grad_(False)
        for offset, weight in enumerate(layer.parameters()):
            weight.fill_(number + offset / 8)
        layer[0].weight.data = layer[0].weight.data.t().contiguous().t()
        made.append(layer)
    return made


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40), st.sets(st.integers(0, 5), min_size=3))
@settings(max_examples=examples(30), deadline=None)
def test_layer_in_use_has_its_own_weights_and_strides(calls: list[tuple[bool, int]], streamed: set[int]) -> None:
    layers = numbered_layers()
    before = [[weight.stride() for weight in layer.parameters()] for layer in layers]
    stream = WeightStream(layers, streamed, torch.device("cpu"), InlineStream())
    for begins, layer in calls:
        if begins:
            stream.begin(layer)
        stream.use(layer)
        assert all(bool((w == layer + i / 8).all()) for i, w in enumerate(layers[layer].parameters()))
        assert [weight.stride() for weight in layers[layer].parameters()] == before[layer]
        stream.check_integrity()
    assert stream.device_bytes == 2 * layer_bytes(layers[0])


def test_pass_copies_each_streamed_layer_once_and_prefetches_the_next() -> None:
    layers = numbered_layers()
    stream = WeightStream(layers, (0, 2, 3, 5), torch.device("cpu"), InlineStream())
    size, held = layer_bytes(layers[0]), []
    for _ in range(3):
        for layer in range(6):
            stream.begin(layer)
            held.append({h for h in stream._layer_in_buffer if h is not None})
    assert held[6:12] == [{0, 2}, {2, 3}, {2, 3}, {3, 5}, {5, 0}, {5, 0}]
    assert stream.bytes == (3 * 4 + 1) * size


def test_compute_waits_for_copies_and_copies_wait_for_readers() -> None:
    waits: list[str] = []

    class RecordingStream(InlineStream):
        def behind_compute(self) -> Any:
            waits.append("copy behind compute")
            return super().behind_compute()

        def hold_compute(self, event: Any, *tensors: torch.Tensor) -> None:
            waits.append("compute behind copy")

    stream = WeightStream(numbered_layers(), (0, 1, 2), torch.device("cpu"), RecordingStream())
    stream.begin(0)
    assert waits == ["copy behind compute"] * 2
    stream.use(0)
    stream.use(0)
    stream.use(1)
    assert waits[2:] == ["compute behind copy"] * 2
    stream.begin(1)
    assert waits[4:] == ["copy behind compute"]
