"""Test tensors with one entry per token that forks share, with random writes and forks, against plain lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.policies.growing import LayerTensors, max_capacity

WRITES = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 200))
"""Owner, layer and number of tokens. Owner 3 forks owner 0 first."""


@settings(max_examples=60, deadline=None)
@given(per_slot=st.sampled_from([1, 4]), writes=st.lists(WRITES, max_size=12))
def test_forks_never_see_each_others_tokens(per_slot: int, writes: list[tuple[int, int, int]]) -> None:
    empty = LayerTensors(1, torch.int64, torch.device("cpu"), per_slot)
    owners: list[tuple[LayerTensors, dict[int, list[int]]]] = [(empty, {})]
    for stamp, (who, layer, added) in enumerate(writes, 1):
        if who == 3:
            rows, known = owners[0]
            owners.append((rows.fork(), {layer: list(tokens) for layer, tokens in known.items()}))
        rows, known = owners[who % len(owners)]
        tokens = known.setdefault(layer, [])
        rows.open(layer, 2, 0, per_slot)
        data = rows.reserve(layer, len(tokens) + added)
        data.flatten(1)[:, len(tokens) : len(tokens) + added] = stamp
        tokens.extend([stamp] * added)
    for rows, known in owners:
        rows.check_integrity()
        assert rows.layers == known.keys()
        for layer, tokens in known.items():
            assert rows.length(layer) == len(tokens)
            assert rows.data(layer).flatten(1)[:, : len(tokens)].tolist() == [tokens, tokens]
            assert rows.data(layer).shape[1] * per_slot <= max_capacity(len(tokens), per_slot)
        assert rows.nbytes == sum(rows.data(layer).nbytes for layer in known)


def test_a_smaller_reservation_keeps_the_length() -> None:
    rows = LayerTensors(0, torch.float32, torch.device("cpu"))
    assert rows.length(5) == 0
    rows.open(5, 0)
    rows.reserve(5, 9)
    rows.open(5, 0)
    rows.reserve(5, 3)
    assert rows.length(5) == 9
