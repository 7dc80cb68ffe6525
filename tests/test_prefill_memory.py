"""Prefill of 4k tokens stays linear and small, measured as the resident memory of a process of its own."""

from __future__ import annotations

import ctypes
import resource
import subprocess

import pytest
import torch
from support.forked import forked
from transformers import LlamaConfig, LlamaForCausalLM

from offload_rt import LLM

TOKENS = 4096
M_MMAP_THRESHOLD = -3


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure() -> int:
    """Prints by how many bytes the process grew beside the pool, and bytes of the weights, of one layer's K and V and
    of a hidden state `[N, D]`. Whatever has more than 64 KiB gets memory of its own, nothing that other tests have
    left."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=512, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=TOKENS, eos_token_id=None,
    )  # fmt: skip
    llm = LLM(LlamaForCausalLM(config).eval(), policy="full", host_memory="256MiB")
    runner = llm.runner
    sequence = runner.new_sequence([i % 2000 for i in range(64)], 64)
    runner.prefill(sequence, 64, want_logits=True)  # what torch allocates once, on first use
    runner.free(sequence)
    before = resident()
    sequence = runner.new_sequence([i % 2000 for i in range(TOKENS)], TOKENS)
    runner.prefill(sequence, TOKENS, want_logits=True)
    geometry = runner.adapter.geometry
    one_layer = geometry.kv_bytes(TOKENS, torch.float32) // geometry.layers
    print(resident() - before - runner.pool.bytes_used, llm.weight_bytes, one_layer, TOKENS * 512 * 4)
    return 0


@pytest.mark.slow
def test_prefill_memory_is_bounded() -> None:
    """Beside the pool: weights, one layer's K and V, two hidden states `[N, D]`, and a tenth of that for slices."""
    out, errors = forked(measure, stdout=subprocess.PIPE, stderr=subprocess.PIPE).communicate(timeout=300)
    assert not errors, errors.decode()
    grown, weights, one_layer, hidden = (int(word) for word in out.split())
    assert weights + grown <= 1.1 * (weights + one_layer + 2 * hidden)
