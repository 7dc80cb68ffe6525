"""Test requests whose attention reads the pool in place, for the head dimensions and dtypes of the C kernels.

The reference is transformers in float32 with the same weights. Sparse policies have a full budget: they select all
tokens, so the code for selected KV runs too. `support.kernel_calls` checks that the kernels ran.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.kernel_calls import assert_in_place, count_kernels
from support.outputs import completed
from support.tiny_models import VOCAB, depth, tiny_model, tiny_prompt
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams, offload
from offload_rt.core import BLOCK_SIZE
from offload_rt.kernels import decode_attention
from offload_rt.kv_cache.pool import HostPool
from offload_rt.model_runner.batch import SharedPrefixes

pytestmark = pytest.mark.skipif(decode_attention.library(32, torch.float32) is None, reason="there is no compiled code")

GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
SELECT_ALL: dict[str, Any] = {"budget": 1.0, "recent": 8, "sinks": 2, "dense_layers": ()}
Answers = Iterator[tuple[list[int], list[int]]]


def model_factories() -> dict[str, Callable[[torch.dtype], PreTrainedModel]]:
    factories: dict[str, Callable[[torch.dtype], PreTrainedModel]] = {
        f"llama {size}": lambda dtype, size=size: tiny_model("llama", dtype=dtype, num_hidden_layers=2, head_dim=size)  # type: ignore[misc]
        for size in (32, 64, 96, 128)
    }
    for name in ("mistral", "qwen2", "opt"):
        factories[name] = lambda dtype, name=name: tiny_model(name, dtype=dtype, **depth(name, 2))  # type: ignore[misc]
    for name in ("gemma2", "gemma3", "qwen3_moe"):
        factories[name] = lambda dtype, name=name: architecture(name, dtype=dtype, head_dim=32, vocab_size=VOCAB)  # type: ignore[misc]
    return factories


MODEL_FACTORIES = model_factories()
TYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """A model, the same model in float32, a policy and a folder for files."""

    model: PreTrainedModel
    reference: PreTrainedModel
    policy: str
    folder: Path

    @property
    def tolerance(self) -> float:
        """Largest error of a logit, relative to the range of logits."""
        return 1e-5 if self.model.dtype == torch.float32 else 0.03

    def make(self, blocks: int = 128, **options: Any) -> LLM:
        defaults = {"policy": self.policy, "policy_options": SELECT_ALL if self.policy == "infinigen" else {}}
        if "exact" in options:
            defaults = {"policy": "infinigen"}
        shared: dict[str, Any] = {"dtype": self.model.dtype, "verify": "off"}
        pool = LLM(self.model, policy="full", host_memory="8MiB", **shared).runner.pool
        windows = 6 if len(set(pool.groups.group)) > 1 else 0
        return LLM(self.model, host_memory=(blocks + windows) * pool.block_bytes, **shared, **defaults | options)


# --------------------------------------------------------------------------------------------------------- scenarios


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> Answers:
    """Yield each prompt with its generated tokens."""
    outputs = completed(llm.generate(prompts, params))
    repeated_prompts = itertools.chain.from_iterable([prompt] * params.n for prompt in prompts)
    yield from ((prompt, output.token_ids) for prompt, output in zip(repeated_prompts, outputs, strict=True))
    llm.runner.check_integrity()


def shared_prefixes(case: Case) -> Answers:
    llm, prefix = case.make(), tiny_prompt(200)
    llm.runner.prefixes = SharedPrefixes(1, min_saved=1)
    yield from generate(llm, [prefix + tiny_prompt(20 + i, seed=i) for i in range(3)])
    yield from generate(llm, [prefix[: 64 * i] + tiny_prompt(70, seed=9 + i) for i in range(4)] + [prefix])


def samples_and_beams(case: Case) -> Answers:
    llm = case.make()
    yield from generate(llm, [tiny_prompt(100)], SamplingParams(max_tokens=30, temperature=1e-4, n=3, ignore_eos=True))
    beams = SamplingParams(max_tokens=30, temperature=0, num_beams=3, n=2)
    check_beams(case, tiny_prompt(100), [tokens for _, tokens in generate(llm, [tiny_prompt(100)], beams)])
    yield from generate(llm, [tiny_prompt(100) + tiny_prompt(40, seed=1)])


def evicted_prefixes(case: Case) -> Answers:
    llm = case.make(blocks=8)
    for seed in (0, 1, 0, 2, 1, 0):
        yield from generate(llm, [tiny_prompt(200, seed=seed) + tiny_prompt(30, seed=seed + 5)])


def preemption(case: Case) -> Answers:
    llm = case.make(blocks=7, enable_prefix_caching=False)
    long = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    yield from generate(llm, [tiny_prompt(60 + i, seed=i) for i in range(4)], long)


def swapping(case: Case) -> Answers:
    llm = case.make(blocks=7, enable_prefix_caching=False, swap=case.folder / "swap")
    long = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    yield from generate(llm, [tiny_prompt(60 + i, seed=i) for i in range(4)], long)


def eviction(case: Case) -> Answers:
    """Enable eviction, but end before any token is evicted."""
    yield from generate(case.make(blocks=4, eviction="counter"), [tiny_prompt(150)])


def drafts(case: Case) -> Answers:
    llm = case.make(exact={"method": "sparse", "adaptive": False}, policy_options={"budget": 0.1, "recent": 8})
    yield from generate(llm, [tiny_prompt(150 + i, seed=i) for i in range(2)])


def sessions(case: Case) -> Answers:
    """Run turns of a session before and after reopening it, and a turn of its fork."""
    turns = [tiny_prompt(150), tiny_prompt(60, seed=1), tiny_prompt(30, seed=2)]

    def send_turn(session: Any, turn: list[int]) -> tuple[list[int], list[int]]:
        prompt = [*session.tokens, *turn]
        answer = [event.token_id for event in session.send(turn, GREEDY)]
        session.check_integrity()
        return prompt, answer

    with case.make().session("s", case.folder) as session:
        yield send_turn(session, turns[0])
        yield send_turn(session, turns[1])
    llm = case.make()
    with llm.session("s", case.folder) as session, session.fork("fork") as fork:
        yield send_turn(fork, turns[2])
        yield send_turn(session, turns[1])
        yield from generate(llm, [turns[0]])


def drop_in(case: Case) -> Answers:
    prompt, model = tiny_prompt(140), case.model
    with offload(model, host_memory="8MiB", policy_options=SELECT_ALL):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, pad_token_id=0)
    yield prompt, out[0, len(prompt) :].tolist()


SCENARIOS = (
    shared_prefixes, samples_and_beams, evicted_prefixes, preemption, swapping, eviction, drafts, sessions, drop_in,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- test


def check_tokens(case: Case, prompt: list[int], tokens: list[int]) -> None:
    """Check that each token's logit is close to the largest one."""
    logits = case.reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    distance = (logits.amax(1) - chosen) / (logits.amax(1) - logits.amin(1))
    assert tokens and distance.max() <= case.tolerance, distance.tolist()


def relative_score(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """Return the mean log-probability of `tokens`, relative to the range of logits."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])
    return float(logprobs.mean() / (logits.amax(1) - logits.amin(1)).mean())


def check_beams(case: Case, prompt: list[int], beams: list[list[int]]) -> None:
    """Check that no beam is worse than that of transformers. Rounding to bfloat16 may change the beams."""
    length, ids = len(beams[0]), torch.tensor([prompt])
    expected: Any = case.reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, num_beams=3,
        num_return_sequences=len(beams), pad_token_id=0,
    )  # fmt: skip
    for want, found in zip(expected[:, len(prompt) :].tolist(), beams, strict=True):
        scores = [relative_score(case.reference, prompt, tokens) for tokens in (want, found)]
        assert len(found) == length and scores[0] - scores[1] <= case.tolerance, scores


ALL = "OFFLOAD_RT_CELLS" in os.environ
CASES = [
    (kind, TYPES[(i + j) % 2 * (kind != "qwen3_moe")], policy, scenario)  # rounding to bfloat16 changes experts
    for i, kind in enumerate(MODEL_FACTORIES)
    for j, scenario in enumerate(SCENARIOS)
    for policy in (("full", "infinigen")[(i // 2 + j) % 2],)
    if ((i + j) % 3 == 0 or i == 0 if ALL else j == 2 * i % len(SCENARIOS))
]
"""Cases to run. `make stress PART=composition` runs a third of them. Otherwise, each model and each scenario runs."""


@pytest.mark.parametrize(
    ("kind", "dtype", "policy", "scenario"), CASES, ids=lambda x: getattr(x, "__name__", str(x).removeprefix("torch."))
)
def test_tokens_equal_transformers(
    kind: str, dtype: torch.dtype, policy: str, scenario: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HostPool.__init__.__kwdefaults__, "slab_tokens", 2 * BLOCK_SIZE)  # KV is in several runs
    calls, make = count_kernels(monkeypatch), MODEL_FACTORIES[kind]
    case = Case(make(dtype), make(dtype).float(), policy, tmp_path)
    for prompt, tokens in scenario(case):
        check_tokens(case, prompt, tokens)
    assert_in_place(calls)
