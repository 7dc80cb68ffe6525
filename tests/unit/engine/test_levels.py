"""Test that greedy tokens equal those of transformers at each instruction set level of this processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import assert_greedy, tiny_checkpoint, tiny_prompt
from transformers import AutoModelForCausalLM, PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.kernels import causal_cpu, decode_attention, low_bit_sequence, selection
from offload_rt.models.linear import dense
from offload_rt.models.linear.backend import BackendLinear

PROMPT = tiny_prompt(300)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", head_dim=32, dtype=torch.bfloat16)


def reference(folder: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.requires_grad_(False)


def greedy_tokens_in_c(folder: str | Path, level: str, dtype: str, threads: int) -> list[int]:
    own = getattr(torch, dtype)
    row = torch.empty(1, 32, dtype=own)
    if None in (causal_cpu.library_for(row), decode_attention.library(32, own), dense.library(own)):
        pytest.skip(f"there is no code for {level}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with LLM(folder, policy="full", dtype=dtype, max_model_len=400) as llm:
            assert any(
                isinstance(module, BackendLinear) for layer in llm.runner.model.layers for module in layer.modules()
            )
            [output] = llm.generate([PROMPT], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    finally:
        torch.set_num_threads(before)
    return list(output.outputs[0].token_ids)


def test_libraries_of_the_level_are_loaded(level: str) -> None:
    row = torch.empty(1, 32)
    loaded = [
        causal_cpu.library_for(row),
        decode_attention.library(32, torch.float32),
        low_bit_sequence.library(32, 2),
        selection._best_scores(),
        dense.library(torch.float32),
    ]
    names = [Path(library._name).name for library in loaded if library is not None]
    assert all(f"-{level}-" in name for name in names), names


@pytest.mark.sampled
@pytest.mark.parametrize("threads", [1, 2])
def test_float32_gives_greedy_tokens(threads: int, level: str, checkpoint: str) -> None:
    tokens = greedy_tokens_in_c(checkpoint, level, "float32", threads)
    assert_greedy(reference(checkpoint), PROMPT, tokens)


def test_bfloat16_gives_likely_tokens(level: str, checkpoint: str) -> None:
    tokens = greedy_tokens_in_c(checkpoint, level, "bfloat16", 2)
    model = reference(checkpoint)
    logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    lost = (logits.amax(1) - chosen) / (logits.amax(1) - logits.amin(1))
    # Rounding to bfloat16 may swap logits that differ by less than 2 % of the logits' range.
    assert len(tokens) == 24 and lost.max() < 0.02
