"""Test that a layer takes few launches in a prefill, and that their number does not depend on the chunk length."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from support.prefill_counts import PrefillCounts, count_prefill

CHUNK = 2048

PER_LAYER = {"full": PrefillCounts(13, 0, 12, 0), "infinigen": PrefillCounts(23, 0, 16, 0)}
"""Limits per layer, apart from its chunks: checks for changed weights, resident KV, and "infinigen"'s approximate
KV."""

PER_CHUNK = PrefillCounts(22, 4, 21, 0)
"""Limits per chunk: norms, projections, RoPE, attention, MLP, and copies of K and V for each KV head."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("policy", "tokens"), [("full", CHUNK + 100), ("full", 700), ("infinigen", 700), ("infinigen", CHUNK + 100)]
)
def test_launches_per_layer_are_limited(policy: str, tokens: int) -> None:
    found, chunks = count_prefill(tokens, policy=policy), -(-tokens // CHUNK)
    limits = zip(astuple(found), astuple(PER_LAYER[policy]), astuple(PER_CHUNK), strict=True)
    assert all(count <= layer + chunks * chunk for count, layer, chunk in limits), found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["infinigen", "full"])
def test_launches_do_not_depend_on_the_length_of_the_chunk(policy: str) -> None:
    assert count_prefill(300, policy=policy) == count_prefill(700, policy=policy)
