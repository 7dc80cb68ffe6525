"""Test layers that use an earlier layer's KV, and token embeddings in every layer (Gemma 4 E2B)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import VOCAB, WINDOW, architecture
from support.outputs import completed
from support.staged_transfer import staged
from transformers import PreTrainedModel

from offload_rt import LLM, EngineConfig, ModelError, SamplingParams
from offload_rt.core import BLOCK_SIZE, KVPart
from offload_rt.models.full_attention import query_and_kv, residual_after_attention
from offload_rt.models.registry import adapter_for
from offload_rt.models.shape import load_shape
from offload_rt.models.verification import verify_model
from offload_rt.models.weights import decoder_layers
from offload_rt.planning.device_plan import costs_for
from offload_rt.planning.memory_model import requirements
from offload_rt.transfer.streams import InlineStream
from offload_rt.transfer.weights.streamed import StreamedAdapter, WeightStream

PATTERNS = {"after full": "sf|sfsf", "after sliding": "fs|fssf", "one after the other": "sf|ffff", "unused": "sffs|sf"}
"""Layer types (f: full, s: sliding). Layers after the bar use the KV of the last layer before it with their type."""
GREEDY = SamplingParams(max_tokens=8, temperature=0)
SPARSE: dict[str, Any] = {"sinks": 2, "recent": 6, "preset": "rows", "budget": 0.4, "dense_layers": ()}


def model_of(pattern: str) -> PreTrainedModel:
    own, users = PATTERNS[pattern].split("|")
    types = ["full_attention" if kind == "f" else "sliding_attention" for kind in own + users]
    more = {"num_hidden_layers": len(types), "layer_types": types, "num_kv_shared_layers": len(users)}
    return architecture("gemma4_e2b", **more)


def make_llm(pattern: str, policy: str = "full", **options: Any) -> LLM:
    options = {"policy_options": SPARSE if policy == "infinigen" else None, "verify": "off"} | options
    return LLM(model_of(pattern), policy=policy, host_memory="8MiB", **options)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("pattern", "device"), [*((pattern, "host") for pattern in PATTERNS), ("after full", "staged")]
)
def test_logits_after_prefills_of_odd_lengths_equal_transformers(pattern: str, device: str) -> None:
    llm, tokens = make_llm(pattern, prefill_chunk_size=7), prompt_of(90)
    runner = (staged(llm) if device == "staged" else llm).runner
    expected = model_of(pattern)(torch.tensor([tokens])).logits[0]
    tolerance = 2e-5 * float(expected.abs().max())
    sequence = runner.new_sequence(tokens, len(tokens))
    for stop in (5, 36, 71):
        logits = runner.prefill(sequence, stop, want_logits=True)
        assert logits is not None and float((logits - expected[stop - 1]).abs().max()) <= tolerance
    for position in range(71, 90):
        assert float((runner.decode([sequence])[0] - expected[position]).abs().max()) <= tolerance
    runner.check_integrity()
    runner.free(sequence)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_batch_selects_the_same_as_single_sequences(pattern: str) -> None:
    prompts = [prompt_of(length, seed=length) for length in (20, 70, 63)]
    llm, other = make_llm(pattern, "infinigen"), make_llm(pattern, "infinigen", enable_prefix_caching=False)
    together = completed(llm.generate(prompts, GREEDY))
    singles = [completed(other.generate([prompt], GREEDY))[0] for prompt in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in singles]
    assert all(one.stats.exact_fraction < 1 for one in together)
    llm.runner.check_integrity()


def test_cached_prefix_is_not_computed_again() -> None:
    llm, stem = make_llm("after full"), prompt_of(2 * BLOCK_SIZE + 9)
    model, prompts = model_of("after full"), [stem + prompt_of(9, seed=seed) for seed in (1, 2)]
    found = [completed(llm.generate([prompt], GREEDY))[0] for prompt in prompts]
    for prompt, one in zip(prompts, found, strict=True):
        assert (
            one.token_ids
            == model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        )
    assert found[1].stats.reused_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("pattern", PATTERNS)
def test_only_layers_with_their_own_keys_are_stored(pattern: str) -> None:
    own, users = PATTERNS[pattern].split("|")
    llm, model = make_llm(pattern, "infinigen"), model_of(pattern)
    geometry, pool = llm.geometry, llm.runner.pool
    full, window = (geometry.rows(next(i for i, k in enumerate(own) if k == kind)) for kind in "fs")
    costs = costs_for(EngineConfig(policy="infinigen", policy_options=SPARSE), load_shape(model))
    per_token = own.count("f") * full.bytes(torch.float32)
    assert geometry.kv_layers == tuple(range(len(own))) and geometry.layers == len(own + users)
    assert geometry.kv_bytes(1, torch.float32) == per_token + own.count("s") * window.bytes(torch.float32)
    assert requirements(costs, 0, 1000).kv_per_token == per_token == pool.block_bytes // BLOCK_SIZE
    assert costs.demand.scored_layers(geometry) == own.count("f")
    before = replace(costs, shape=load_shape(model), working_set=0)
    resident = own.count("f") * 8 * full.bytes(torch.float32) + own.count("s") * WINDOW * window.bytes(torch.float32)
    assert before.resident == resident
    sequence = llm.runner.new_sequence(prompt_of(40), 40)
    llm.runner.prefill(sequence, 40)
    assert llm.runner.transfer.device_bytes == resident
    llm.runner.free(sequence)


def test_shape_of_a_checkpoint_equals_the_model(tmp_path: Path) -> None:
    model = model_of("after full")
    model.save_pretrained(tmp_path)
    shapes = [load_shape(tmp_path, device="cpu").geometry for _ in range(2)]  # the second one is cached
    assert shapes == [adapter_for(model).geometry] * 2


def test_verification_finds_keys_of_the_wrong_layer() -> None:
    model = model_of("unused")
    adapter = adapter_for(model)
    verify_model(model, adapter)
    adapter.geometry = replace(adapter.geometry, kv_from=(0, 1, 2, 3, 0, 2))
    with pytest.raises(ModelError, match="layer 4"):
        verify_model(model, adapter)


def test_streamed_weights_are_copied_once_per_pass() -> None:
    model, tokens = model_of("one after the other"), torch.tensor(prompt_of(20))
    expected = model(tokens[None]).logits[0]
    stream = WeightStream(decoder_layers(model), range(6), torch.device("cpu"), InlineStream())
    adapter, positions = StreamedAdapter(adapter_for(model), stream), torch.arange(20)
    sizes = sum(block.bytes for block in stream._blocks.values())
    for passes in (1, 2):
        x, shared = adapter.embed(tokens, positions), dict[int, KVPart]()
        for layer in range(6):
            q, kv = query_and_kv(adapter, layer, adapter.attention_input(layer, x), positions, shared)
            if layer < 5:
                adapter.attention_input(layer + 1, x)  # predicts the next query
            x = adapter.mlp(layer, residual_after_attention(adapter, layer, x, q, kv, 20), tokens)
        torch.testing.assert_close(adapter.logits(x), expected, rtol=0, atol=2e-5 * float(expected.abs().max()))
        ahead = stream._blocks[0].bytes
        assert stream.bytes == passes * sizes + ahead
