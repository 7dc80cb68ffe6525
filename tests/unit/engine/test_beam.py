"""Test that beam search gives the same results as in transformers, and test several completions of one prompt."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, InputError, PoolFullError, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine

EOS = [3, 17, 40, 41, 42, 90]  # several end tokens, so that beams end at different lengths


def beams(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=options.pop("max_tokens", 20), temperature=0, num_beams=count, **options)


def make_model_and_llm(name: str = "llama", *, eos: list[int] | None = None, **options: Any) -> tuple[Any, LLM]:
    model = tiny_model(name, dtype=torch.float32)
    model.generation_config.eos_token_id = eos
    options = {"policy": "full", "host_memory": "16MiB"} | options
    return model, LLM(model, dtype="float32", **options)


RULES = [
    (True, 1.0),
    *((False, penalty) for penalty in (-1.0, 0.0, 2.5)),
    *(("never", penalty) for penalty in (-1.0, 0.0, 1.0, 2.5)),
]
"""(early_stopping, length_penalty). The bound of "never" depends on the sign of the penalty."""


WIDTHS = [(0, 2), (1, 4), (2, 5)]
"""(seed of the prompt, number of beams)"""

CASES = [*(("llama", *rule) for rule in RULES), ("gpt2", True, -1.0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "early_stopping", "length_penalty", "widths"),
    [(*case, WIDTHS if "OFFLOAD_RT_STRESS" in os.environ else [WIDTHS[i % 3]]) for i, case in enumerate(CASES)],
)
def test_beams_equal_transformers(
    name: str, early_stopping: Any, length_penalty: float, widths: list[tuple[int, int]]
) -> None:
    model, llm = make_model_and_llm(name, eos=EOS)
    rule = {"early_stopping": early_stopping, "length_penalty": length_penalty}
    for seed, width in widths:
        prompt = tiny_prompt(60 + seed, seed=seed)
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, num_beams=width,
            num_return_sequences=width, pad_token_id=150, eos_token_id=EOS, **rule,
        )[:, len(prompt) :].tolist()  # fmt: skip
        got = [c.token_ids for c in completed(llm.generate([prompt], beams(width, n=width, **rule)))]
        assert got == [row[: len(tokens)] for row, tokens in zip(expected, got, strict=True)]
        padding = {token for row, tokens in zip(expected, got, strict=True) for token in row[len(tokens) :]}
        assert padding <= {150}
    assert llm.runner.pool.sequence_bytes == 0
    llm.runner.check_integrity()


def test_beams_with_a_repetition_penalty() -> None:
    model, llm = make_model_and_llm("qwen3")
    prompt = tiny_prompt(30)
    ids = torch.tensor([prompt])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=70,
        do_sample=False,
        num_beams=3,
        repetition_penalty=1.4,
    )[0, 30:].tolist()
    [completion] = completed(llm.generate(prompt, beams(3, repetition_penalty=1.4, max_tokens=70)))
    assert completion.token_ids == expected and completion.finish_reason == "length"


def test_beams_share_all_full_blocks_of_the_prompt() -> None:
    _, llm = make_model_and_llm(eos=[])
    pool = llm.runner.pool
    engine = Engine(llm.runner, max_num_seqs=8)
    request = engine.add(tiny_prompt(10 * BLOCK_SIZE + 5), beams(4, max_tokens=30))
    while len(request.sequences) < 4:
        engine.step()
    while not engine.idle:
        # ten full blocks of the prompt, which all beams share, and the last block of each beam
        assert pool.sequence_bytes <= (10 + 4) * pool.block_bytes
        engine.step()
        engine.check_integrity()


def test_beams_fork_the_policy_state() -> None:
    _, full = make_model_and_llm(eos=EOS)
    # The budget covers all tokens, so that the output must equal that of `full`.
    options = {"alpha": float("inf"), "max_fraction": 1.0, "dense_layers": (), "recent": 8, "sinks": 2}
    _, sparse = make_model_and_llm(eos=EOS, policy="infinigen", policy_options=options)
    prompt = tiny_prompt(50)
    rule = beams(4, n=4, max_tokens=40, early_stopping="never")
    assert [c.token_ids for c in completed(sparse.generate(prompt, rule))] == [
        c.token_ids for c in completed(full.generate(prompt, rule))
    ]


def test_n_completions_have_their_own_seeds_and_share_one_prefill() -> None:
    _, llm = make_model_and_llm()
    prompts = [tiny_prompt(130, seed=1), tiny_prompt(70, seed=2)]
    params = SamplingParams(max_tokens=12, seed=5, n=4)
    done = completed(llm.generate(prompts, params))
    firsts = [c.token_ids for c in completed(llm.generate(prompts, SamplingParams(max_tokens=12, seed=5)))]
    assert [done[0].token_ids, done[4].token_ids] == firsts
    assert len({tuple(c.token_ids) for c in done}) == 8
    assert [c.token_ids for c in completed(llm.generate(prompts, params))] == [c.token_ids for c in done]
    assert [c.stats.reused_tokens for c in done] == [0, 130, 130, 130, 0, 70, 70, 70]
    assert [(c.stats.prompt_tokens, c.stats.new_tokens) for c in done] == [(130, 12)] * 4 + [(70, 12)] * 4
    assert llm.runner.pool.sequence_bytes == 0


def test_stream_refuses_several_completions() -> None:
    _, llm = make_model_and_llm()
    with pytest.raises(InputError, match="use generate for n"):
        llm.stream([1, 2], SamplingParams(n=2))
    with pytest.raises(PoolFullError, match=r"299 blocks .* are needed"):
        llm.generate([[1, 2]], beams(300))
    assert llm.runner.pool.sequence_bytes == 0


def test_stop_strings_end_beams() -> None:
    llm = LLM("reference", policy="full", host_memory="64MiB")
    [plain] = completed(llm.generate("The traveller", beams(3, max_tokens=24)))
    assert "e" in plain.text
    [cut] = completed(llm.generate("The traveller", beams(3, max_tokens=24, stop="e", early_stopping=True)))
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "e") and "e" not in cut.text
