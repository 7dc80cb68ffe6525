"""Test that prefill memory is linear in the prompt, as resident memory of a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOKENS = 4096

MEASURE = f"""
import resource
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from offload_rt import LLM

N = {TOKENS}
config = LlamaConfig(
    vocab_size=2000, hidden_size=512, intermediate_size=512, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=N, eos_token_id=None,
)
llm = LLM(LlamaForCausalLM(config).eval(), policy="full", host_memory="256MiB")
runner = llm.runner
sequence = runner.new_sequence([i % 2000 for i in range(64)], 64)
runner.prefill(sequence, 64, want_logits=True)                    # what torch allocates once, on first use
runner.free(sequence)

def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = resident()
sequence = runner.new_sequence([i % 2000 for i in range(N)], N)
runner.prefill(sequence, N, want_logits=True)
geometry = runner.adapter.geometry
one_layer = geometry.kv_bytes(N, torch.float32) // geometry.layers
print(resident() - before - runner.pool.bytes_used, runner.model.weight_bytes, one_layer, N * 512 * 4)
"""


@pytest.mark.slow
def test_prefill_memory_is_bounded() -> None:
    """Limit: weights, K and V of one layer and two hidden states `[N, D]`, plus a fifth. The pool is not counted."""
    out = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=300)
    grown, weights, one_layer, hidden = (int(word) for word in out.stdout.split())
    assert weights + grown <= 1.2 * (weights + one_layer + 2 * hidden)
