"""Test `offload`, which runs transformers' `generate` with KV in host memory.

With the policy `full`, the tokens equal those of transformers. With other policies, they equal those of `LLM`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import RECURRENT, RUNS, architecture
from support.serving import TEMPLATE
from support.tiny_models import tiny_checkpoint, tiny_model, tiny_prompt
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, TextIteratorStreamer, pipeline

from offload_rt import LLM, InputError, OffloadedCache, SamplingParams, offload
from offload_rt.models.linear.backend import BackendLinear
from offload_rt.models.linear.dense import library
from offload_rt.models.loading import load_model

MEMORY = "16MiB"
SPARSE = {"policy": "infinigen", "policy_options": {"sinks": 2, "recent": 8, "budget": 0.2, "approximate_kv": "off"}}
DEFAULT_ARCHITECTURES = ("gemma3", "gpt_neox", "gpt_oss")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "by lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "by lookup, sampled": {"do_sample": True, "prompt_lookup_num_tokens": 3},
    "assisted": {"do_sample": False, "num_assistant_tokens": 3},
}
SINGLE_SEQUENCE_MODES = ("by lookup", "by lookup, sampled", "assisted")
"""Generation modes that transformers supports only for a batch size of one."""


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def offloaded_llm(model: PreTrainedModel) -> Iterator[LLM]:
    with offload(model, policy="full", host_memory=MEMORY) as llm:
        yield llm
        llm.runner.check_integrity()


def padded_prompts(rows: int = 2) -> dict[str, torch.Tensor]:
    """Return prompts of 90 and 60 tokens. The second prompt is padded on the left."""
    ids = torch.tensor([tiny_prompt(90), [0] * 30 + tiny_prompt(60, seed=3)])[:rows]
    mask = torch.ones_like(ids)
    mask[1:, :30] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate_ids(model: PreTrainedModel, given: dict[str, torch.Tensor], **mode: Any) -> torch.Tensor:
    torch.manual_seed(0)
    found: torch.Tensor = model.generate(**given, max_new_tokens=14, pad_token_id=0, **mode)
    return found


@pytest.mark.parametrize("name", MODES)
def test_every_mode_equals_transformers(model: PreTrainedModel, name: str) -> None:
    given, mode = padded_prompts(1 if name in SINGLE_SEQUENCE_MODES else 2), dict(MODES[name])
    if name == "assisted":
        mode["assistant_model"] = tiny_model("llama", num_hidden_layers=1)
    expected = generate_ids(model, given, **mode)
    with offload(model, policy="full", host_memory=MEMORY) as llm:
        assert torch.equal(generate_ids(model, given, **mode), expected)
        gc.collect()
        llm.runner.check_integrity()
        assert not llm.runner._open, "the cache is freed"
    assert "forward" not in vars(model)
    assert torch.equal(generate_ids(model, given, **mode), expected)


@pytest.mark.parametrize(
    "name", sorted({*RUNS} - {*RECURRENT}) if "OFFLOAD_RT_STRESS" in os.environ else DEFAULT_ARCHITECTURES
)
def test_every_architecture_equals_transformers_past_its_window(name: str) -> None:
    model = architecture(name)
    ids = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = [generate_ids(model, given, **MODES[mode]) for mode in ("greedy", "beams")]
    with offload(model, policy="full", host_memory=MEMORY):
        assert all(
            torch.equal(generate_ids(model, given, **MODES[mode]), one)
            for mode, one in zip(("greedy", "beams"), expected, strict=True)
        )


def test_a_sparse_policy_gives_the_tokens_of_llm_stream(model: PreTrainedModel) -> None:
    given, new = padded_prompts(), slice(90, None)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(*given.values(), strict=True)]
    greedy = SamplingParams(max_tokens=14, temperature=0)
    with offload(model, host_memory=MEMORY, **SPARSE) as llm:
        found = generate_ids(model, given, do_sample=False)[:, new].tolist()
        expected = [[event.token_id for event in llm.stream(prompt, greedy)] for prompt in prompts]
    assert found == expected
    assert found != generate_ids(model, given, do_sample=False)[:, new].tolist(), "the selection changes the tokens"


def test_streamers_and_stopping_criteria_work_as_in_transformers(offloaded_llm: LLM) -> None:
    given, model = padded_prompts(1), tiny_model("llama")
    tokenizer = load_model("reference").tokenizer
    assert tokenizer is not None
    plain = generate_ids(model, given, do_sample=False)[0].tolist()
    with offload(model, policy="full", host_memory=MEMORY):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        ended = GenerationConfig(eos_token_id=plain[96], max_new_tokens=14, do_sample=False, pad_token_id=0)
        out = model.generate(**given, generation_config=ended, streamer=streamer)
    assert out[0].tolist() == plain[: plain.index(plain[96], 90) + 1]
    assert "".join(streamer) == tokenizer.decode(out[0, 90:])


def test_a_pipeline_generates_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = pipeline("text-generation", tiny_checkpoint(tmp_path / "tiny", "llama"), device="cpu")
    chat.tokenizer.chat_template = TEMPLATE
    asked = [{"role": "user", "content": "It was a dark night, and the river was high."}]
    how = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = chat(asked, generation_config=how)
    caches: list[OffloadedCache] = []
    begin = OffloadedCache.__init__
    monkeypatch.setattr(OffloadedCache, "__init__", lambda cache, llm: caches.append(cache) or begin(cache, llm))
    with offload(chat.model, policy="full", host_memory=MEMORY, tokenizer=chat.tokenizer):
        assert chat(asked, generation_config=how) == expected
    assert caches, "the pool was used"


def test_the_second_turn_continues_the_cache(
    model: PreTrainedModel, offloaded_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, computed = offloaded_llm.runner, list[tuple[int, int]]()
    prefill = runner.prefill

    def recorded(row: Any, stop: int, **options: Any) -> Any:
        computed.append((row.position, stop))
        return prefill(row, stop, **options)

    monkeypatch.setattr(runner, "prefill", recorded)
    given, cache = padded_prompts(1), OffloadedCache(offloaded_llm)
    first = generate_ids(model, given, do_sample=False, past_key_values=cache)
    longer = torch.cat([first, torch.tensor([tiny_prompt(25, seed=5)])], dim=1)
    more = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    assert cache.get_seq_length() == first.shape[1] - 1
    computed.clear()
    second = generate_ids(model, more, do_sample=False, past_key_values=cache)
    assert computed == [(first.shape[1] - 1, longer.shape[1])], "only new tokens are computed"
    assert torch.equal(second, generate_ids(model, more, do_sample=False))
    [row] = cache._rows
    assert row.trace.reused_tokens == 0 and "rows=1" in repr(cache)
    cache.free()
    cache.free()
    assert not offloaded_llm.runner._open


def test_other_forward_calls_are_unchanged(model: PreTrainedModel) -> None:
    ids = torch.tensor([tiny_prompt(30)])
    expected = model(ids, labels=ids)
    with offload(model, policy="full", host_memory=MEMORY):
        found = model(ids, labels=ids)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.logits, expected.logits)


def test_a_crop_is_limited_by_the_shortest_row(model: PreTrainedModel, offloaded_llm: LLM) -> None:
    given = {name: value.flip(0) for name, value in padded_prompts().items()}  # the padded row of 60 tokens comes first
    cache = OffloadedCache(offloaded_llm)
    whole = model(**given, past_key_values=cache, logits_to_keep=0).logits
    with pytest.raises(InputError, match="only the 60 of the last call"):
        cache.crop(-70)
    cache.crop(-50)
    again = model(given["input_ids"][:, -50:], past_key_values=cache, logits_to_keep=0).logits
    assert torch.equal(again.argmax(-1), whole[:, -50:].argmax(-1))
    cache.free()


def test_a_token_is_not_cropped_if_its_sliding_window_is_gone() -> None:
    model = tiny_model("mistral")
    window, ids = model.config.sliding_window, torch.tensor([tiny_prompt(175)])
    assert (ids.shape[1] + 1 - window) % 64 == 0, "the last token was the only one that attended to a block"
    with offload(model, policy="full", host_memory=MEMORY) as llm:
        cache = OffloadedCache(llm)
        model(ids, past_key_values=cache, logits_to_keep=1)
        with pytest.raises(InputError, match="cannot be removed"):
            cache.crop(-1)
        cache.free()
        whole = model(ids, past_key_values=cache, logits_to_keep=2).logits
        cache.crop(-2)
        again = model(ids[:, -2:], past_key_values=cache, logits_to_keep=2).logits
        torch.testing.assert_close(again, whole, atol=1e-3, rtol=0)  # sums of other lengths round differently
        cache.free()


def test_more_logits_than_tokens_can_be_requested(model: PreTrainedModel, offloaded_llm: LLM) -> None:
    ids, cache = torch.tensor([tiny_prompt(8)]), OffloadedCache(offloaded_llm)
    for part in (ids[:, :5], ids[:, 5:]):
        assert model(part, past_key_values=cache, logits_to_keep=6).logits.shape[1] == part.shape[1]
    cache.free()


def test_unsupported_calls_are_refused(model: PreTrainedModel, offloaded_llm: LLM) -> None:
    given = padded_prompts()
    right_padded = {name: value.flip(1) for name, value in given.items()}
    with pytest.raises(InputError, match="offloaded already"), offload(model, host_memory=MEMORY):
        pass
    with pytest.raises(InputError, match="pad on the left"):
        generate_ids(model, right_padded, do_sample=False)
    with pytest.raises(InputError, match="pass past_key_values=OffloadedCache"):
        generate_ids(model, given, do_sample=False, past_key_values=DynamicCache())
    with pytest.raises(InputError, match="output_hidden_states"):
        generate_ids(model, given, do_sample=False, output_hidden_states=True, return_dict_in_generate=True)
    with pytest.raises(InputError, match="does not support inputs_embeds"):
        model.generate(inputs_embeds=model.get_input_embeddings()(given["input_ids"]), max_new_tokens=2)
    cache = OffloadedCache(offloaded_llm)
    generate_ids(model, padded_prompts(1), do_sample=False, past_key_values=cache)
    held = cache.get_seq_length()
    with pytest.raises(InputError, match="has 1 rows and the batch has 2"):
        generate_ids(model, {name: torch.cat([x, x[:, -1:]], 1) for name, x in given.items()}, past_key_values=cache)
    assert cache.get_seq_length() == held > 0, "a wrong call does not change the cache"
    cache.free()
    with pytest.raises(InputError, match="cannot be removed"):
        OffloadedCache(offloaded_llm).crop(-3)
    with pytest.raises(InputError, match="inside `with offload"):
        OffloadedCache(offloaded_llm).update(torch.zeros(1), torch.zeros(1), 0)
    assert not offloaded_llm.runner._open


@pytest.mark.parametrize("model", ["a folder", None, torch.nn.Linear(2, 2)])
def test_offload_accepts_only_models(model: Any) -> None:
    with pytest.raises(InputError, match="takes a loaded transformers model"), offload(model):
        pass


def test_linear_layers_are_computed_in_c_only_inside_the_block() -> None:
    model = tiny_model("llama")
    layers = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    weights = [each.weight for each in layers]
    with offload(model, policy="full", host_memory=MEMORY):
        assert any(isinstance(each, BackendLinear) for each in layers) == (library(torch.float32) is not None)
    assert all(type(each) is torch.nn.Linear for each in layers)
    assert all(each.weight is weight for each, weight in zip(layers, weights, strict=True))
