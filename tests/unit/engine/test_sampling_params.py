"""Compare `SamplingParams` with transformers' `generate` and with explicit formulas."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt
from transformers import LogitsProcessor

from offload_rt import LLM, EngineError, InputError, SamplingParams
from offload_rt.engine.engine import Engine
from offload_rt.outputs import CompletionOutput

PROMPT = tiny_prompt(70)
NEVER_ENDS = {"eos_token_id": None}


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


@pytest.mark.sampled(2)
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


def test_whole_numbers_may_be_integers() -> None:
    free = {"max_tokens": 3, "seed": 1, "repetition_penalty": 2, "temperature": 2, "min_p": 0, "top_p": 1}
    as_floats = {name: float(free[name]) for name in ("repetition_penalty", "temperature", "min_p", "top_p")}
    assert generate(**free).token_ids == generate(**free | as_floats).token_ids


class CountingProcessor(LogitsProcessor):
    """Processor that forces token ids 10, 11 and so on, one per call. It raises an error when it reaches `last`."""

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
    assert unaffected.completions()[0].token_ids == transformers_tokens()
    assert failing.completions()[0].token_ids == [10, 11, 12]
    assert llm.runner.pool.sequence_bytes == 0
    with pytest.raises(EngineError, match="no more numbers"):
        llm.generate(PROMPT, SamplingParams(logits_processors=[CountingProcessor(10)]))
