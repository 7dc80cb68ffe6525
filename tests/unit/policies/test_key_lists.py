"""Compare batched selection, as used on CUDA devices, with selection for single sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.select_models import CPU, artifact, geometry, no_keys, pass_keys, tokens

from offload_rt.core import VisibleTokens
from offload_rt.kernels.selection import select_tokens
from offload_rt.policies.infinigen.key_lists import KeyLists
from offload_rt.policies.infinigen.policy import InfiniGen
from offload_rt.policies.options import InfiniGenOptions
from offload_rt.policies.rule import CandidateSpans, Rule

LENGTHS = (150, 70)
RULE = Rule(alpha=4.0, max_fraction=0.2)
KEYS: list[dict[str, Any]] = [
    {"scorer": "partial"}, {"scorer": "int8"}, {"scorer": "int4"}, {"scorer": "int2"}, {"approximate_kv": "int2"},
    {"approximate_kv": "int4"}, {"scorer": "partial", "columns": "prompt"},
]  # fmt: skip


@pytest.mark.parametrize("options", KEYS, ids=lambda options: " ".join(options.values()))
@pytest.mark.parametrize("group", [1, 3])
def test_batched_append_and_selection_equal_single_sequences(group: int, options: dict[str, Any]) -> None:
    shape = geometry(group=group, head_dim=32)
    policy = InfiniGen(
        InfiniGenOptions.preset("rows", **{"dense_layers": ()} | options), shape, artifact(shape), CPU, torch.float32
    )
    single, batched = ([policy.new_state(no_keys) for _ in LENGTHS] for _ in range(2))
    streams = [tokens(shape, length + 5, seed=length) for length in LENGTHS]
    streams = [(q.float(), k.float()) for q, k in streams]
    for layer in range(shape.layers):
        for states in (single, batched):
            for state, (q, k), length in zip(states, streams, LENGTHS, strict=True):
                state.on_queries(layer, q[layer, :, :length], k[layer, :, :length], 0)
                pass_keys(state, layer, k[layer, :, :length], 0)
    lists = KeyLists(RULE, range(shape.layers), len(LENGTHS), 160, CPU)
    for step in range(5):
        positions = [length + step for length in LENGTHS]
        moved = lists.load([state.scoring_keys for state in batched], positions)
        assert (moved is None) == (step > 0), "capacity is sufficient for all steps"
        visible = [VisibleTokens.of(position + 1, sinks=4, recent=8, window=None) for position in positions]
        bounds = [torch.tensor(values) for values in CandidateSpans.bounds(visible, shape.kv_heads, RULE)]
        spans = CandidateSpans(*bounds, max(positions) + 1, max(bounds[2].tolist()))
        for layer in range(shape.layers):
            for state, (_, k), position in zip(single, streams, positions, strict=True):
                pass_keys(state, layer, k[layer, :, position : position + 1], position)
            newest = torch.cat([k[layer, :, position] for (_, k), position in zip(streams, positions, strict=True)])
            lists.append(layer, newest, newest, torch.tensor(positions).repeat_interleave(shape.kv_heads))
            queries = torch.stack(
                [q[layer, :, position] for (q, _), position in zip(streams, positions, strict=True)], 1
            )
            selected, counts = lists.select(layer, queries, spans)
            for b, (state, visible_tokens) in enumerate(zip(single, visible, strict=True)):
                heads = slice(b * shape.kv_heads, (b + 1) * shape.kv_heads)
                q = streams[b][0][layer, :, positions[b]]
                scores = state.scoring_keys.scores(layer, q, visible_tokens.candidates)
                chosen = select_tokens(scores, RULE.alpha, RULE.limit(visible_tokens))
                expected = chosen.sort(1).values + visible_tokens.candidates.start
                assert counts[heads].tolist() == [expected.shape[1]] * shape.kv_heads
                assert torch.equal(selected[heads, : expected.shape[1]], expected)
    for state in batched:
        state.check_integrity()
    lists.release()
    assert lists.load([state.scoring_keys for state in single], [1, 1]) is not None
