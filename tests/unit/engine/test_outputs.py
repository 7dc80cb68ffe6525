"""Test the outputs of `LLM.generate`: one output per prompt, with all completions of that prompt."""

from __future__ import annotations

import pytest
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama"), policy="full", host_memory="8MiB")


def test_each_prompt_has_one_output_with_its_completions(llm: LLM) -> None:
    prompts, sampled = [tiny_prompt(70, seed=9), tiny_prompt(70, seed=9)], SamplingParams(max_tokens=4, seed=1, n=3)
    first, second = llm.generate(prompts, [sampled, SamplingParams(max_tokens=5, temperature=0)])
    assert [len(first.outputs), len(second.outputs)] == [3, 1] and first.finished and second.finished
    assert [one.index for one in first.outputs] == [0, 1, 2]
    assert (first.prompt, first.prompt_token_ids) == (None, prompts[0])
    assert first.request_id != second.request_id
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 64)
    [done] = second.outputs
    assert len(done.token_ids) == 5 and (done.finish_reason, done.stop_reason) == ("length", None)
    assert done.stats is not None and done.stats.new_tokens == 5
    assert repr(second).endswith(
        "prompt_tokens=70, num_cached_tokens=64, finished=True, outputs=[CompletionOutput('', tokens=5, "
        "finish_reason='length')])"
    )


def test_beam_search_reports_cached_tokens(llm: LLM) -> None:
    prompt, beams = tiny_prompt(70, seed=11), SamplingParams(max_tokens=4, temperature=0, num_beams=3, n=2)
    for cached in (0, 64):
        [output] = llm.generate(prompt, beams)
        assert output.num_cached_tokens == cached
        assert [(one.index, len(one.token_ids), one.finish_reason) for one in output.outputs] == [
            (0, 4, "length"),
            (1, 4, "length"),
        ]
