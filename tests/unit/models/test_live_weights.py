"""Test weights that change in place while an `LLM` or drop-in uses them: KV from old weights is never reused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.architectures import architecture
from support.tiny_models import assert_greedy, tiny_model, tiny_prompt
from transformers import PreTrainedModel

from offload_rt import LLM, AsyncLLM, ModelError, SamplingParams, offload
from offload_rt.models.fingerprint import WeightChangeDetector, fingerprint

GREEDY = SamplingParams(max_tokens=6, temperature=0)
PROMPT = tiny_prompt(150)


def optimizer_step(model: PreTrainedModel) -> None:
    weight = model.get_parameter("model.layers.0.self_attn.v_proj.weight").requires_grad_()
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.5).step()
    weight.requires_grad_(False)


def merge_through_data(model: PreTrainedModel) -> None:
    """Change a weight the way PEFT merges an adapter, which does not change the weight's version counter."""
    weight = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    weight.data += torch.full((len(weight), 1), 0.3) @ torch.full((1, weight.shape[1]), 0.3)


def load_other_weights(model: PreTrainedModel) -> None:
    model.load_state_dict(tiny_model("llama", seed=5).state_dict())


def replace_parameter(model: PreTrainedModel) -> None:
    layer = model.get_submodule("model.layers.0.self_attn.k_proj")
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2, requires_grad=False)


CHANGES = [optimizer_step, merge_through_data, load_other_weights, replace_parameter]


@pytest.mark.parametrize("change", CHANGES)
def test_kv_of_old_weights_is_not_reused(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model("llama")
    llm = LLM(model, policy="full", host_memory="8MiB")
    llm.generate(PROMPT, GREEDY)
    [again] = llm.generate(PROMPT, GREEDY)
    assert again.num_cached_tokens == 128, "unchanged weights share prefixes"
    change(model)
    [found] = llm.generate(PROMPT, GREEDY)
    assert found.num_cached_tokens == 0
    assert_greedy(model, PROMPT, list(found.outputs[0].token_ids))
    [again] = llm.generate(PROMPT, GREEDY)
    assert again.num_cached_tokens == 128 and again.outputs[0].token_ids == found.outputs[0].token_ids


def test_buffers_of_the_checkpoint_count_as_weights() -> None:
    """Gemma 4 multiplies each layer's output by a buffer from the checkpoint. RoPE buffers are not stored there."""
    model = architecture("gemma4")
    before, live = fingerprint(model), WeightChangeDetector(model)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(1)
    assert live.changes() == 0 and fingerprint(model) == before
    model.get_buffer("model.layers.1.layer_scalar").fill_(0.5)
    assert live.changes() == 1 and fingerprint(model) != before


@pytest.mark.parametrize("change", CHANGES)
def test_drop_in_detects_changes_between_calls(change: Callable[[PreTrainedModel], None]) -> None:
    model = tiny_model("llama")
    ids = torch.tensor([PROMPT])
    with offload(model, policy="full", host_memory="8MiB"):
        model.generate(ids, max_new_tokens=6, do_sample=False)
        change(model)
        found = model.generate(ids, max_new_tokens=6, do_sample=False)[0, len(PROMPT) :].tolist()
    assert_greedy(model, PROMPT, found)


def test_sessions_refuse_changed_weights(tmp_path: Path) -> None:
    model = tiny_model("llama")
    llm = LLM(model, policy="full", host_memory="8MiB")
    session = llm.session("s", tmp_path)
    list(session.send(PROMPT, GREEDY))
    optimizer_step(model)
    with pytest.raises(ModelError, match="weights were changed"):
        list(session.send(PROMPT, GREEDY))
    session.close()
    with pytest.raises(ModelError, match="weights were changed"):
        llm.session("other", tmp_path)
    changed = LLM(model, policy="full", host_memory="8MiB")
    assert changed.session("s", tmp_path).tokens == [], "sessions belong to a model"


def test_replaced_module_is_refused() -> None:
    model = tiny_model("llama")
    llm, attention = LLM(model, policy="full", host_memory="8MiB"), model.get_submodule("model.layers.0.self_attn")
    attention.q_proj = torch.nn.Linear(*reversed(attention.q_proj.weight.shape), bias=False)
    with pytest.raises(ModelError, match="a module of the model was replaced"):
        llm.generate(PROMPT, GREEDY)


def test_prefix_cache_is_reset() -> None:
    llm = LLM(tiny_model("llama"), policy="full", host_memory="8MiB")

    async def cached_tokens() -> list[int]:
        found = []
        async with AsyncLLM(llm) as engine:
            for _ in range(3):
                outputs = [output async for output in engine.generate(PROMPT, GREEDY)]
                found.append(outputs[-1].num_cached_tokens)
                if len(found) == 2:
                    assert await engine.reset_prefix_cache()
        return found

    first, second, third = asyncio.run(cached_tokens())
    assert (first, third) == (0, 0) and second > 0
    llm.runner.check_integrity()
