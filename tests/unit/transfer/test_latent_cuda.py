"""Test models with latent attention on the simulated GPU: tokens must equal those of a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.architectures import LATENT, VOCAB, architecture
from support.cuda_cells import LOW_BITS, SPARSE
from support.cuda_simulator import Late, simulated
from support.outputs import completed
from support.tiny_models import tiny_prompt

from offload_rt import LLM, SamplingParams

POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "default": ("infinigen", LOW_BITS | {"source": "attention_input"}),
    "rows": ("infinigen", SPARSE | {"source": "attention_input", "dense_layers": ()}),
}
REAL: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "num_hidden_layers": 1,
}
"""Options for keys with 576 elements, as in all large latent models. Kernels split these keys and the 20 heads."""


def generate_tokens(device: str, name: str, policy: str, lengths: Sequence[int], **overrides: Any) -> list[list[int]]:
    chosen, options = POLICIES[policy]
    model: Any = architecture(name, **overrides).to(device)
    llm = LLM(model, device=device, policy=chosen, policy_options=options, host_memory="8MiB", verify="off")
    prompts = [[token % VOCAB for token in tiny_prompt(n, seed=n)] for n in lengths]
    found = completed(llm.generate(prompts, SamplingParams(3, temperature=0)))
    llm.runner.check_integrity()
    return [one.token_ids for one in found]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LATENT)
def test_tokens_equal_those_of_a_cpu(name: str, policy: str) -> None:
    expected = generate_tokens("cpu", name, policy, (30, 70, 63))
    with simulated(Late()):
        assert generate_tokens("cuda", name, policy, (30, 70, 63)) == expected


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_keys_of_576_numbers_give_the_tokens_of_a_cpu(policy: str) -> None:
    expected = generate_tokens("cpu", "youtu", policy, (70,), **REAL)
    with simulated(Late()):
        assert generate_tokens("cuda", "youtu", policy, (70,), **REAL) == expected
