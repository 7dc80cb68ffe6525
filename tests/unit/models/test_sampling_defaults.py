"""Test sampling defaults from a checkpoint's generation config."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt
from transformers import GenerationConfig

from offload_rt import LLM, AsyncLLM, SamplingParams
from offload_rt.models.loading import sampling_defaults

DEFAULTS = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2, "max_new_tokens": 7}


def test_generation_config_sets_the_defaults_of_every_api(tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    model.save_pretrained(tmp_path)
    GenerationConfig(do_sample=True, **DEFAULTS).save_pretrained(tmp_path)
    llm, prompt = LLM(tmp_path, policy="full", host_memory="8MiB"), tiny_prompt(20)
    expected = SamplingParams(7, temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.2)
    assert llm.get_default_sampling_params() == expected
    assert llm.get_default_sampling_params(seed=4, top_k=-1).top_k == -1
    torch.manual_seed(0)
    [output] = llm.generate(prompt)
    assert len(output.outputs[0].token_ids) == len(list(llm.stream(prompt))) == 7
    assert len(list(llm.session("s", tmp_path / "kv").send(prompt))) == 7
    [seeded] = llm.generate(prompt, llm.get_default_sampling_params(seed=1))
    [plain] = llm.generate(prompt, SamplingParams(7, seed=1))
    assert seeded.outputs[0].token_ids != plain.outputs[0].token_ids
    assert len(llm.generate(prompt, SamplingParams(9))[0].outputs[0].token_ids) == 9

    async def async_length() -> int:
        async with AsyncLLM(llm) as engine:
            return len([one async for one in engine.generate(prompt)][-1].outputs[0].token_ids)

    assert asyncio.run(async_length()) == 7


def test_missing_and_invalid_values_of_the_generation_config() -> None:
    assert sampling_defaults(None) == sampling_defaults(GenerationConfig()) == SamplingParams()
    odd = GenerationConfig()
    odd.top_p, odd.temperature = 0.0, 0.3
    with pytest.warns(UserWarning, match="top_p of the model's generation_config is ignored"):
        assert sampling_defaults(odd) == SamplingParams(temperature=0.3)
