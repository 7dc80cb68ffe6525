"""Test that the memory of a prefill grows linearly with the prompt length."""

from __future__ import annotations

import pytest
import torch
from support.allocations import count_device_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from offload_rt import LLM

TOKENS, WIDTH = 2048, 512


@pytest.mark.slow
def test_prefill_memory_is_linear_in_the_prompt_length() -> None:
    config = LlamaConfig(
        vocab_size=2000, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=TOKENS, eos_token_id=None,
    )  # fmt: skip

    def make() -> LLM:
        return LLM(LlamaForCausalLM(config).eval(), policy="full", host_memory="256MiB", verify="off")

    def prefill(llm: LLM) -> int:
        runner, geometry = llm.runner, llm.geometry
        sequence = runner.new_sequence([i % 2000 for i in range(TOKENS)], TOKENS)
        runner.prefill(sequence, TOKENS, want_logits=True)
        one_layer = geometry.kv_bytes(TOKENS, torch.float32) // geometry.layers
        # weights, K and V of one layer, and two hidden states `[N, D]`; the pool is not counted
        return runner.model.weight_bytes + one_layer + 2 * TOKENS * WIDTH * 4

    expected, allocations = count_device_bytes(
        make, lambda llm: {llm.runner.pool.rows.untyped_storage().data_ptr()}, prefill
    )
    assert expected / 2 < allocations.peak <= 1.2 * expected
