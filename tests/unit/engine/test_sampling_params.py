"""Test `SamplingParams` against transformers' `generate` and explicit formulas."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from offload_rt import LLM, ConfigError, EngineError, InputError, SamplingParams, offload
from offload_rt.engine.detokenizer import TextStream
from offload_rt.engine.engine import Engine
from offload_rt.engine.sampler import Sampler
from offload_rt.errors import LogitsError
from offload_rt.models.loading import load_model
from offload_rt.outputs import CompletionOutput

PROMPT = tiny_prompt(70)
NEVER_ENDS = {"eos_token_id": None}
BEAMS = {"num_beams": 2, "temperature": 0}


@cache
def make_llm(exact: str | None = None) -> LLM:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, **NEVER_ENDS)
    options: dict[str, Any] = {"policy": "full"}
    if exact is not None:
        # With a small budget, many drafts are rejected.
        options = {"policy": "infinigen", "policy_options": {"budget": 0.3}, "exact": exact}
    return LLM(model, dtype="float32", host_memory="8MiB", **options)


def generate(exact: str | None = None, **params: Any) -> CompletionOutput:
    [found] = completed(
        make_llm(exact).generate(PROMPT, SamplingParams(**({"max_tokens": 16, "temperature": 0} | params)))
    )
    return found


def transformers_tokens(tokens: int = 16, **options: Any) -> list[int]:
    model, ids = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, **NEVER_ENDS), torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **options)
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.parametrize("exact", [None, "sparse", "lookup"])
def test_constraints_equal_those_of_transformers(exact: str | None) -> None:
    free = transformers_tokens()
    assert generate(exact).token_ids == free
    most = Counter(free).most_common(1)[0][0]
    assert generate(exact, logit_bias={most: -50.0, 7: 1.5}).token_ids == transformers_tokens(
        sequence_bias=[[[most], -50.0], [[7], 1.5]]
    )
    allowed = sorted({*free[::2], 3, 4, 5})
    found = generate(exact, allowed_token_ids=allowed).token_ids
    assert found == transformers_tokens(prefix_allowed_tokens_fn=lambda _, ids: allowed) and set(found) <= set(allowed)
    assert generate(exact, repetition_penalty=1.7).token_ids == transformers_tokens(repetition_penalty=1.7)
    ended = generate(exact, stop_token_ids=[free[4]], min_tokens=6).token_ids
    assert ended == transformers_tokens(min_new_tokens=6, eos_token_id=free[4]) and len(ended) > 5


@pytest.mark.parametrize("exact", [None, "sparse"])
def test_penalties_apply_only_to_generated_tokens(exact: str | None) -> None:
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, **NEVER_ENDS)
    few = sorted({*PROMPT[:4], 3, 4})

    def penalised_tokens(frequency: float, presence: float) -> list[int]:
        tokens: list[int] = []
        for _ in range(16):
            logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
            for token, count in Counter(tokens).items():
                logits[token] -= frequency * count + presence
            tokens.append(max(few, key=lambda token: float(logits[token])))
        return tokens

    found = [
        penalised_tokens(0.0, 0.0),
        penalised_tokens(0.3, 0.0),
        penalised_tokens(0.0, 1.5),
        penalised_tokens(0.05, 0.3),
    ]
    assert len({tuple(tokens) for tokens in found}) == 4
    every = [(0.0, 0.0), (0.3, 0.0), (0.0, 1.5), (0.05, 0.3)]
    for tokens, (frequency, presence) in zip(found, every, strict=True):
        penalties = {"frequency_penalty": frequency, "presence_penalty": presence}
        assert generate(exact, allowed_token_ids=few, **penalties).token_ids == tokens


@pytest.mark.parametrize("exact", [None, "sparse"])
def test_logprobs_are_computed_before_any_filter(exact: str | None) -> None:
    done = generate(exact, logprobs=3, logit_bias={9: 30.0}, max_tokens=5)
    assert done.token_ids == [9] * 5 and done.logprobs is not None
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, **NEVER_ENDS)
    logits = model(torch.tensor([[*PROMPT, *done.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits.float(), dim=-1)
    for place, row in zip(done.logprobs, expected, strict=True):
        best = row.topk(3).indices.tolist()
        assert set(place) == {9, *best} and next(iter(place)) == 9
        for token, one in place.items():
            assert one.logprob == pytest.approx(float(row[token]), abs=1e-5) and one.decoded_token is None
            assert one.rank == 1 + int((row > row[token]).sum())
    assert done.cumulative_logprob == pytest.approx(float(expected[:, 9].sum()), abs=1e-4)
    assert [len(place) for place in generate(exact, logprobs=0).logprobs or ()] == [1] * 16
    assert [len(place) for place in generate(exact, logprobs=-1, max_tokens=2).logprobs or ()] == [logits.shape[1]] * 2
    assert generate(exact).logprobs is None and generate(exact).cumulative_logprob is None


def test_prompt_logprobs_include_cached_tokens() -> None:
    llm, prompt = make_llm(), tiny_prompt(200, seed=4)
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2)
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, **NEVER_ENDS)
    expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    for _ in range(2):  # the prompt of the second request is cached
        [output] = llm.generate(prompt, params)
        found = output.prompt_logprobs
        assert found is not None and found[0] is None and len(found) == 200 and output.num_cached_tokens == 0
        for token, place, row in zip(prompt[1:], found[1:], expected, strict=False):
            assert place is not None and set(place) == {token, *row.topk(2).indices.tolist()}
            assert place[token].logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert place[token].rank == 1 + int((row > row[token]).sum())
    [plain] = llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0))
    assert plain.outputs[0].token_ids == output.outputs[0].token_ids and plain.prompt_logprobs is None
    assert plain.num_cached_tokens == 192
    llm.runner.check_integrity()


def test_a_stop_token_ends_an_answer_after_min_tokens() -> None:
    free = transformers_tokens()
    done = generate(stop_token_ids=[free[3], 1])
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (free[: free.index(free[3]) + 1], "stop", free[3])
    beams = {"num_beams": 3, "max_tokens": 8}
    ended = generate(stop_token_ids=[free[1]], min_tokens=3, **beams)
    assert ended.token_ids == transformers_tokens(8, num_beams=3, eos_token_id=free[1], min_new_tokens=3)
    assert generate(allowed_token_ids=[5, 6, 7], **beams).token_ids == transformers_tokens(
        8, num_beams=3, prefix_allowed_tokens_fn=lambda _, ids: [5, 6, 7]
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    loaded = load_model("reference").tokenizer
    assert loaded is not None
    return loaded


def test_stop_strings_are_kept_or_delayed_if_requested(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "It was a dark and stormy night"
    ids = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]

    def stream_text(stop: list[str], late: int = 0, **options: Any) -> tuple[str, str | None]:
        stream, out = TextStream(tokenizer, stop, **options), ""
        for count, token in enumerate(ids, 1):
            out += stream.push(token, may_stop=count > late)
            if stream.stopped is not None:
                break
        return out + stream.flush(), stream.stopped

    whole = tokenizer.decode(ids)
    assert stream_text(["dark", "night"]) == (whole[: whole.index("dark")], "dark")
    assert stream_text(["dark", "night"], keep_stop=True) == (whole[: whole.index("dark") + 4], "dark")
    assert stream_text(["dark", "night"], late=len(ids) - 1, keep_stop=True) == (whole, "night")
    assert stream_text(["dark"], late=len(ids)) == (whole, None)


def test_bad_words_are_never_generated(tokenizer: PreTrainedTokenizerBase) -> None:
    vocab, word = len(tokenizer), "night"
    for spelled in (word, f" {word}"):
        ids = [int(token) for token in tokenizer(spelled, add_special_tokens=False)["input_ids"]]
        logits = torch.zeros(vocab)
        logits[ids[-1]] = 30.0  # the most probable token completes the word
        assert Sampler(SamplingParams(temperature=0), 0, (), tokenizer).pick(logits, [1, *ids[:-1]]) == ids[-1]
        params = SamplingParams(temperature=0, bad_words=[word])
        assert Sampler(params, 0, (), tokenizer).pick(logits, [1, *ids[:-1]]) != ids[-1]


class CountingProcessor(LogitsProcessor):
    """Force the token ids 10, 11 and so on, one per call. Raise an error after `last`."""

    def __init__(self, last: int = 99) -> None:
        self.next, self.last = 10, last

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[:, self.next] += 1000
        self.next += 1
        if self.next > self.last:
            raise ArithmeticError("no more numbers")
        return scores


@pytest.mark.parametrize("exact", [None, "sparse", "lookup"])
def test_a_logits_processor_is_called_once_per_token(exact: str | None) -> None:
    assert generate(exact, logits_processors=[CountingProcessor()]).token_ids == list(range(10, 26))


def test_a_processor_that_raises_ends_its_own_request() -> None:
    failed: list[Exception] = []
    llm = make_llm()
    engine = Engine(llm.runner, max_num_seqs=4, on_failure=lambda _, error: failed.append(error))
    failing = engine.add(
        PROMPT, SamplingParams(max_tokens=16, temperature=0, logits_processors=[CountingProcessor(13)])
    )
    none = engine.add(PROMPT, SamplingParams(logits_processors=[lambda _, scores: scores - torch.inf]))
    unaffected = engine.add(PROMPT, SamplingParams(max_tokens=16, temperature=0))
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert [type(error) for error in failed] == [InputError, EngineError]
    assert isinstance(failed[1].__cause__, ArithmeticError)
    assert (failing.finish_reason, none.finish_reason, unaffected.finish_reason) == ("abort", "abort", "length")
    assert unaffected.completions()[0].token_ids == transformers_tokens() and failing.completions()[0].token_ids == [
        10,
        11,
        12,
    ]
    assert llm.runner.pool.sequence_bytes == 0
    with pytest.raises(EngineError, match="no more numbers"):
        llm.generate(PROMPT, SamplingParams(logits_processors=[CountingProcessor(10)]))


@pytest.mark.parametrize(
    "options", [{"policy": "full"}, {}, {"policy_options": {"preset": "rows"}}, {"exact": "sparse"}]
)
def test_only_requests_with_nan_logits_fail(options: dict[str, Any]) -> None:
    model, failed = tiny_model("llama", **NEVER_ENDS), list[Exception]()
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
def test_parameters_beyond_the_model_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(**params)


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
    ("options", "error", "message"),
    [
        ({"allowed_token_ids": [6], "stop_token_ids": [6], "min_tokens": 2}, InputError, "no token is allowed"),
        ({"logits_processors": [lambda _, scores: None]}, InputError, "returned None"),
        ({"logits_processors": [lambda _, scores: scores[:, :3]]}, InputError, "must return floating-point logits"),
        ({"logits_processors": [lambda _, scores: scores * torch.nan]}, InputError, "returned NaN"),
        ({"logits_processors": [lambda _, scores: scores - torch.inf]}, InputError, "no token is allowed"),
        ({"logits_processors": [lambda _, scores: scores.numpy()]}, InputError, "returned a ndarray"),
        ({"logits_processors": [lambda _, scores: scores.to("meta")]}, InputError, "on meta"),
        ({"logits_processors": [lambda _, scores: scores.to_sparse()]}, InputError, "sparse"),
        ({"logit_bias": {5: 1e300}}, InputError, "a logit became infinite"),
    ],
)
def test_constraints_without_allowed_tokens_are_errors(
    beams: int, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    llm = LLM(tiny_model("llama"), host_memory="8MiB", policy="full")
    with pytest.raises(error, match=message):
        llm.generate(tiny_prompt(20), SamplingParams(max_tokens=4, temperature=0, num_beams=beams, **options))
    llm.runner.check_integrity()
    assert llm.runner.pool.sequence_bytes == 0


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


def test_a_closed_runtime_creates_no_other_policies() -> None:
    llm = LLM(tiny_model("llama"), host_memory="8MiB")
    llm.close()
    with pytest.raises(InputError, match="is closed"):
        llm.under("full")


@pytest.mark.parametrize("model", ["a folder", None, torch.nn.Linear(2, 2)])
def test_offload_accepts_only_models(model: Any) -> None:
    with pytest.raises(InputError, match="takes a loaded transformers model"), offload(model):
        pass


@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 8.0])
@pytest.mark.parametrize("allowed", [[5], [5, 6]])
def test_beams_never_return_forbidden_tokens(allowed: list[int], length_penalty: float) -> None:
    """There are more beams than allowed sequences, so some beams have no allowed continuation."""
    llm = LLM(tiny_model("llama"), host_memory="8MiB", policy="full")
    for n, most in product((1, 3), (1, 3)):
        params = SamplingParams(
            max_tokens=most, temperature=0, num_beams=3, n=n, length_penalty=length_penalty, allowed_token_ids=allowed
        )
        with suppress(InputError) if n > 1 else nullcontext():  # there may be fewer than n answers
            [output] = llm.generate(tiny_prompt(20), params)
            assert all(one.token_ids and set(one.token_ids) <= set(allowed) for one in output.outputs)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_beam_with_only_forbidden_continuations_is_dropped(beams: int) -> None:
    def only_once(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if ids.shape[1] == 20 else torch.where(scores == scores.max(), 0.0, -torch.inf)

    llm = LLM(tiny_model("llama"), host_memory="8MiB", policy="full")
    params = SamplingParams(max_tokens=2, temperature=0, num_beams=beams, n=beams, logits_processors=[only_once])
    if beams == 1:
        assert len(llm.generate(tiny_prompt(20), params)[0].outputs[0].token_ids) == 2
        return
    with pytest.raises(InputError, match="the constraints leave fewer than n=3 completions of num_beams=3 beams"):
        llm.generate(tiny_prompt(20), params)
    assert llm.runner.pool.sequence_bytes == 0


def test_logits_that_overflow_when_drawn_are_an_error() -> None:
    llm = LLM(tiny_model("llama"), host_memory="8MiB", policy="full")
    params = SamplingParams(max_tokens=2, temperature=1e-5, logit_bias={5: 1e38})
    with pytest.raises(InputError, match="too large for float32"):
        llm.generate(tiny_prompt(20), params)
    assert llm.runner.pool.sequence_bytes == 0


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
