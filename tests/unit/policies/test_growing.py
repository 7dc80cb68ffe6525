"""Test growing per-token tensors that forks share: compare them with lists after random writes and forks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.policies.growing import LayerTensors, max_capacity

WRITES = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 200))
"""Owner, layer and number of tokens of each write. Owner 3 means that owner 0 is forked first."""


@settings(max_examples=examples(60), deadline=None)
@given(per_slot=st.sampled_from([1, 4]), writes=st.lists(WRITES, max_size=12))
def test_tokens_of_forks_are_independent(per_slot: int, writes: list[tuple[int, int, int]]) -> None:
    empty = LayerTensors(1, torch.int64, torch.device("cpu"), per_slot)
    owners: list[tuple[LayerTensors, dict[int, list[int]]]] = [(empty, {})]
    for stamp, (owner, layer, added) in enumerate(writes, 1):
        if owner == 3:
            tensors, expected = owners[0]
            owners.append((tensors.fork(), {layer: list(tokens) for layer, tokens in expected.items()}))
        tensors, expected = owners[owner % len(owners)]
        tokens = expected.setdefault(layer, [])
        tensors.open(layer, 2, 0, per_slot)
        data = tensors.reserve(layer, len(tokens) + added)
        data.flatten(1)[:, len(tokens) : len(tokens) + added] = stamp
        tokens.extend([stamp] * added)
    for tensors, expected in owners:
        tensors.check_integrity()
        assert tensors.layers == expected.keys()
        for layer, tokens in expected.items():
            assert tensors.length(layer) == len(tokens)
            assert tensors.data(layer).flatten(1)[:, : len(tokens)].tolist() == [tokens, tokens]
            assert tensors.data(layer).shape[1] * per_slot <= max_capacity(len(tokens), per_slot)
        assert tensors.nbytes == sum(tensors.data(layer).nbytes for layer in expected)


def test_smaller_reservation_keeps_the_length() -> None:
    rows = LayerTensors(0, torch.float32, torch.device("cpu"))
    assert rows.length(5) == 0
    rows.open(5, 0)
    rows.reserve(5, 9)
    rows.open(5, 0)
    rows.reserve(5, 3)
    assert rows.length(5) == 9
