"""Test refused sampling parameters, constraints that allow no token, and logits that are not finite."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, InputError, SamplingParams
from offload_rt.engine.engine import Engine
from offload_rt.errors import LogitsError

BEAMS = {"num_beams": 2, "temperature": 0}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(tiny_model("llama", num_hidden_layers=2), host_memory="8MiB", policy="full")


def check_empty(llm: LLM) -> None:
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.parametrize(
    "options", [{"policy": "full"}, {}, {"policy_options": {"preset": "rows"}}, {"exact": "sparse"}]
)
def test_only_requests_with_nan_logits_fail(options: dict[str, Any]) -> None:
    model, failed = tiny_model("llama"), list[Exception]()
    llm = LLM(model, host_memory="8MiB", **options)
    model.model.embed_tokens.weight.data[5] = torch.nan  # token 5 is in one prompt and in another answer
    engine = Engine(llm.runner, max_num_seqs=4, on_failure=lambda _, error: failed.append(error))
    prompts = [tiny_prompt(90, seed=seed) for seed in range(3)]
    prompts = [[token + (token == 5) for token in prompt] for prompt in prompts]
    greedy = SamplingParams(max_tokens=8, temperature=0, allowed_token_ids=[6, 7, 8])
    failing = [engine.add([*prompts[0], 5], greedy), engine.add(prompts[1], replace(greedy, allowed_token_ids=[5]))]
    unaffected = engine.add(prompts[2], greedy)
    while not engine.idle:
        engine.step()
    assert [type(error) for error in failed] == [LogitsError, LogitsError] and "not finite" in str(failed[0])
    assert [each.finish_reason for each in (*failing, unaffected)] == ["abort", "abort", "length"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {3000: 1.0}}, "logit_bias has 3000"),
        ({"allowed_token_ids": [5, 3000]}, "allowed_token_ids has 3000"),
        ({"stop_token_ids": [3000]}, "stop_token_ids has 3000"),
        ({"bad_words": ["no"]}, "need a tokenizer"),
    ],
)
def test_parameters_beyond_the_model_are_refused(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(tiny_prompt(20), SamplingParams(**params))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Types.
        ({"max_tokens": 1.5}, "max_tokens=1.5 is float; it must be an integer"),
        ({"max_tokens": None}, "max_tokens=None is NoneType"),
        ({"n": 2.5}, "n=2.5 is float"),
        ({"seed": "a"}, "seed='a' is str; it must be an integer or None"),
        ({"stop": [5]}, r"stop=\[5\] must be a string or a list of strings"),
        ({"stop": 5}, "stop=5 must be"),
        ({"top_k": 5.5}, "top_k=5.5 is float"),
        ({"temperature": "0.5"}, "temperature='0.5' is str; it must be a number"),
        ({"temperature": True}, "temperature=True is bool"),
        ({"ignore_eos": 1}, "ignore_eos=1 is int; it must be True or False"),
        ({"bad_words": [5]}, "bad_words"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"logits_processors": [3]}, "logits_processors"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        # Ranges.
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 300}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e-320}, "too small"),
        ({"temperature": 1e300}, "temperature=.* must be"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty=.* must be"),
        ({"repetition_penalty": 1e308}, "repetition_penalty=.* must be"),
        ({"logprobs": -2}, "logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a\ud800"]}, "stop has .* a lone surrogate"),
        ({"bad_words": ["a\ud800"]}, "bad_words has .* a lone surrogate"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"n": 0}, "n=0 must be at least 1"),
        # Beam search.
        ({"num_beams": 0}, "num_beams=0 must be at least 1"),
        ({"num_beams": 4}, "temperature=1.0: beam search draws no random"),
        (BEAMS | {"n": 3}, "n=3 must not exceed num_beams=2"),
        (BEAMS | {"logprobs": 1}, "logprobs"),
        (BEAMS | {"early_stopping": "soon"}, "early_stopping='soon'"),
        (BEAMS | {"length_penalty": float("nan")}, "must be finite"),
        (BEAMS | {"length_penalty": 400.0}, "length_penalty=.* must be"),
        (BEAMS | {"length_penalty": -1e30}, "length_penalty=.* must be"),
        ({"length_penalty": 2.0}, "need beam search"),
        ({"early_stopping": True}, "need beam search"),
    ],
    ids=lambda value: None if isinstance(value, str) else ascii(value),
)
def test_invalid_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [6], "stop_token_ids": [6], "min_tokens": 2}, "no token is allowed"),
        ({"logits_processors": [lambda _, scores: None]}, "returned None"),
        ({"logits_processors": [lambda _, scores: scores[:, :3]]}, "must return floating-point logits"),
        ({"logits_processors": [lambda _, scores: scores * torch.nan]}, "returned NaN"),
        ({"logits_processors": [lambda _, scores: scores - torch.inf]}, "no token is allowed"),
        ({"logits_processors": [lambda _, scores: scores.numpy()]}, "returned a ndarray"),
        ({"logits_processors": [lambda _, scores: scores.to("meta")]}, "on meta"),
        ({"logits_processors": [lambda _, scores: scores.to_sparse()]}, "sparse"),
        ({"logit_bias": {5: 1e300}}, "a logit became infinite"),
    ],
)
def test_constraints_without_allowed_tokens_are_errors(
    llm: LLM, beams: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        llm.generate(tiny_prompt(20), SamplingParams(max_tokens=4, temperature=0, num_beams=beams, **options))
    check_empty(llm)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("beams", [1, 3])
def test_logits_that_are_not_finite_are_errors(beams: int, value: float) -> None:
    model = tiny_model("llama")
    llm = LLM(model, host_memory="8MiB", policy="full")
    with torch.no_grad():
        model.lm_head.weight.fill_(value)
    with pytest.raises(LogitsError, match="not finite"):
        llm.generate(tiny_prompt(20), SamplingParams(max_tokens=4, temperature=0, num_beams=beams))
    assert llm.runner.pool.sequence_bytes == 0


@pytest.mark.sampled
@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 8.0])
@pytest.mark.parametrize("allowed", [[5], [5, 6]])
def test_beams_never_return_forbidden_tokens(llm: LLM, allowed: list[int], length_penalty: float) -> None:
    """There may be fewer allowed sequences than beams. transformers then returns sequences of -1."""
    ids, model = torch.tensor([tiny_prompt(20)]), tiny_model("llama", num_hidden_layers=2)
    given = {"num_beams": 3, "length_penalty": length_penalty}
    for n, most in product((1, 3), (1, 3)):
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_return_sequences=n, max_new_tokens=most,
            prefix_allowed_tokens_fn=lambda _, ids: allowed, pad_token_id=0, **given
        )[:, 20:].tolist()  # fmt: skip
        params = SamplingParams(max_tokens=most, temperature=0, n=n, allowed_token_ids=allowed, **given)
        if any(-1 in tokens for tokens in expected):
            with pytest.raises(InputError, match="leave fewer than n=3 completions of num_beams=3 beams"):
                llm.generate(tiny_prompt(20), params)
        else:
            [output] = llm.generate(tiny_prompt(20), params)
            assert [one.token_ids for one in output.outputs] == expected
            assert all({*tokens} <= {*allowed} for tokens in expected)
    check_empty(llm)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_beam_with_only_forbidden_continuations_is_dropped(llm: LLM, beams: int) -> None:
    def only_once(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if ids.shape[1] == 20 else torch.where(scores == scores.max(), 0.0, -torch.inf)

    params = SamplingParams(max_tokens=2, temperature=0, num_beams=beams, n=beams, logits_processors=[only_once])
    if beams == 1:
        assert len(llm.generate(tiny_prompt(20), params)[0].outputs[0].token_ids) == 2
        return
    with pytest.raises(InputError, match="the constraints leave fewer than n=3 completions of num_beams=3 beams"):
        llm.generate(tiny_prompt(20), params)
    check_empty(llm)


def test_logits_that_overflow_when_drawn_are_an_error(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=1e-5, logit_bias={5: 1e38})
    with pytest.raises(InputError, match="too large for float32"):
        llm.generate(tiny_prompt(20), params)
    check_empty(llm)


@pytest.mark.parametrize("exact", [None, "sparse"])
def test_scores_of_logits_that_are_not_finite_are_an_error(exact: str | None) -> None:
    model = tiny_model("llama")
    llm = LLM(model, host_memory="8MiB", policy="full" if exact is None else "infinigen", exact=exact)
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    with pytest.raises(LogitsError, match="not finite"):
        llm.score([tiny_prompt(20)], [[1, 2]])
    assert llm.runner.pool.sequence_bytes == 0


def test_prompt_logprobs_that_are_not_finite_are_an_error() -> None:
    model = tiny_model("llama")
    llm = LLM(model, host_memory="8MiB", policy="full")
    prompt = tiny_prompt(20)
    ids = [*prompt[:5], 198, *prompt[5:]]
    with torch.no_grad():
        model.model.embed_tokens.weight[198] = torch.nan  # only the logits after token 198 are not finite
    with pytest.raises(LogitsError, match="not finite"):
        llm.generate(ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1))
    assert llm.runner.pool.sequence_bytes == 0
