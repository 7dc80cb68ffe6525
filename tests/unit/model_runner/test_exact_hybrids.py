"""Test lossless mode (`exact=...`) with hybrid models: rejected draft tokens do not change the recurrent state."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.architectures import RECURRENT, VOCAB, architecture
from support.hybrids import SPARSE_DRAFTS as SPARSE
from support.hybrids import make_llm, random_prompt, take_turn
from support.interrupts import interrupt_call
from support.outputs import completed
from support.tiny_models import assert_greedy

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.core import BLOCK_SIZE
from offload_rt.engine.engine import Engine
from offload_rt.engine.speculative import decoder
from offload_rt.engine.speculative.draft_source import Lookup
from offload_rt.engine.speculative.verification import accept, replay, rewind, verify
from offload_rt.model_runner.rollback_states import RollbackStates
from offload_rt.model_runner.sequence import Sequence
from offload_rt.models.shape import load_shape
from offload_rt.planning.device_plan import costs_for
from offload_rt.utils.progress import Progress

FAMILIES = ("qwen3_5", "granite_hybrid", "kimi_linear", "lfm2", "lfm3", "falcon_h1", "nemotron_h")
"""One family for each kind of recurrent state, and one with latent attention."""

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
LOOKUP: dict[str, Any] = {"exact": {"method": "lookup", "tokens": 4, "adaptive": False}}


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    tokens = [completion.token_ids for completion in completed(llm.generate(prompts, params))]
    llm.runner.check_integrity()
    assert llm.runner.states is not None and llm.runner.states.used == 0
    return tokens


class ControlledDrafts:
    """Replacement for prompt lookup whose drafts have a given number of correct tokens, followed by wrong tokens."""

    def __init__(self, texts: list[list[int]], correct_counts: list[int]) -> None:
        """`texts` are prompts followed by their expected answers. Rounds cycle through `correct_counts`."""
        self._texts, self._correct_counts = texts, itertools.cycle(correct_counts)
        self.rounds: list[tuple[int, int]] = []

    def propose(self, lookup: Lookup, tokens: list[int], max_tokens: int) -> list[int]:
        text = next(candidate for candidate in self._texts if candidate[: len(tokens)] == tokens)
        correct = min(max_tokens, next(self._correct_counts))
        draft = text[len(tokens) : len(tokens) + max_tokens]
        self.rounds.append((correct, len(draft)))
        return [token if i < correct else (token + 1) % VOCAB for i, token in enumerate(draft)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", RECURRENT[-2::-1] + RECURRENT[-1:])  # the slow last one runs in other tests
def test_tokens_equal_full_attention(name: str) -> None:
    prompts = [random_prompt(30 + 17 * i, seed=i) for i in range(3)]
    sampled = [SamplingParams(max_tokens=n, temperature=0.8, seed=n, ignore_eos=True) for n in (16, 11, 1)]
    (_, llm), (_, full) = make_llm(name, **SPARSE), make_llm(name)
    for params in (GREEDY, sampled):
        assert generate(llm, prompts, params) == generate(full, prompts, params)
    stats = completed(llm.generate(prompts[:1], GREEDY))[0].stats
    assert stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_number_of_correct_drafts_gives_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(40 + 13 * i, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    model, full = make_llm(name)
    expected = generate(full, prompts, params)
    assert_greedy(model, prompts[0], expected[0])
    # each pair of numbers of correct draft tokens, in consecutive rounds
    pairs = [count for pair in itertools.product(range(5), repeat=2) for count in pair]
    for batch_size in (1, 3):
        drafts = ControlledDrafts([[*p, *t] for p, t in zip(prompts, expected, strict=True)], pairs)
        monkeypatch.setattr(
            Lookup, "propose", lambda self, tokens, max_tokens, d=drafts: d.propose(self, tokens, max_tokens)
        )
        _, llm = make_llm(name, **LOOKUP)
        actual = [
            text
            for start in range(0, 3, batch_size)
            for text in generate(llm, prompts[start : start + batch_size], params)
        ]
        assert actual == expected
        assert {correct for correct, drafted in drafts.rounds if drafted == 4} == {*range(5)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAMILIES[::-1])
@given(st.data())
@settings(max_examples=5, deadline=None)
def test_rejected_drafts_do_not_change_logits_or_states(name: str, data: st.DataObject) -> None:
    runner = make_llm(name, enable_prefix_caching=False, **SPARSE)[1].runner
    pairs = []
    for seed in range(2):
        pair = [runner.new_sequence(random_prompt(30 + 9 * seed, seed), 160) for _ in range(2)]
        for sequence in pair:
            runner.prefill(sequence, len(sequence.tokens) - 1)
        pairs.append((pair[0], pair[1]))
    for _ in range(data.draw(st.integers(1, 4))):
        _draft_and_verify(data, runner, pairs)
        runner.check_integrity()
    for drafted, reference in pairs:
        for layer in runner.states.processed:  # type: ignore[union-attr]
            state, expected = (runner.states.layer_state(layer, s.state_slot) for s in (drafted, reference))  # type: ignore[union-attr]
            for a, b in zip(state, expected, strict=True):
                if a is not None and b is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        for sequence in (drafted, reference):
            runner.free(sequence)
    runner.check_integrity()


def _draft_and_verify(data: st.DataObject, runner: Any, pairs: list[tuple[Sequence, Sequence]]) -> None:
    """Draft random tokens for the first sequence of each pair. Verify all drafts together, and accept some tokens."""
    drafts = [data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=5)) for _ in pairs]
    for (sequence, _), drafted in zip(pairs, drafts, strict=True):
        start = sequence.position
        runner.rollbacks.set(sequence, record=True)
        sequence.draft_start = start
        for token in drafted:
            runner.decode([sequence])
            sequence.tokens.append(token)
        sequence.draft_start = None
        rewind(runner, sequence, start)
    rows = verify(runner, [(sequence, len(drafted) + 1) for (sequence, _), drafted in zip(pairs, drafts, strict=True)])
    rejected = []
    for (sequence, reference), drafted, logits in zip(pairs, drafts, rows, strict=True):
        accepted, start = data.draw(st.integers(0, len(drafted))), sequence.position
        for row in range(accepted + 1):
            accept(runner, sequence)
            [expected] = verify(runner, [(reference, 1)])
            accept(runner, reference)
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-3)
            reference.tokens.append(drafted[row] if row < accepted else data.draw(st.integers(0, VOCAB - 1)))
        sequence.tokens[start + 1 :] = reference.tokens[start + 1 :]
        runner.reload(sequence)
        if accepted < len(drafted):
            rejected.append(sequence)
    if rejected:
        replay(runner, rejected)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_snapshots_are_taken_after_verified_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill of a prompt that continues an answer starts at a snapshot within this answer."""
    prompt, params = random_prompt(125), SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    model, full = make_llm(name)
    [text] = generate(full, [prompt], params)
    drafts = ControlledDrafts([[*prompt, *text]], [4, 4, 1, 3])
    monkeypatch.setattr(Lookup, "propose", lambda self, tokens, max_tokens: drafts.propose(self, tokens, max_tokens))
    _, llm = make_llm(name, **LOOKUP)
    assert generate(llm, [prompt], params) == [text]
    monkeypatch.undo()
    following = [*prompt, *text[:75], *random_prompt(5, seed=3)]
    [output] = llm.generate([following], SamplingParams(max_tokens=6, temperature=0))
    assert output.num_cached_tokens == 200 // BLOCK_SIZE * BLOCK_SIZE
    assert_greedy(model, following, output.outputs[0].token_ids)


def test_approximate_drafts_leave_no_snapshots() -> None:
    """When a sparse draft reaches the end of a block, its state is approximate and must not be shared."""
    model, llm = make_llm("qwen3_5", **SPARSE)
    prompt = random_prompt(60)
    [text] = generate(llm, [prompt], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    following = [*prompt, *text[:10], *random_prompt(4, seed=1)]
    [output] = llm.generate([following], SamplingParams(max_tokens=8, temperature=0))
    assert output.num_cached_tokens == BLOCK_SIZE
    assert_greedy(model, following, output.outputs[0].token_ids)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm3", "kimi_linear"])
def test_session_with_drafts_equals_full_attention(name: str, tmp_path: Path) -> None:
    """The session is reopened from disk for each turn, and each answer fills a block."""
    conversations, params = [], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for options in (SPARSE, {}):
        answers = []
        for turn in range(3):
            _, llm = make_llm(name, **options)
            session = llm.session("talk", tmp_path / str(bool(options)))
            answers.append(take_turn(session, random_prompt(56 + turn, seed=turn), params))
            assert not turn or session.last_stats.reused_tokens >= BLOCK_SIZE  # type: ignore[union-attr]
            session.check_integrity()
            session.close()
        conversations.append(answers)
    assert conversations[0] == conversations[1]


@pytest.mark.parametrize("where", ["decode", "verify", "replay"])
def test_session_continues_after_an_interrupted_round(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, llm = make_llm("qwen3_5", **SPARSE)
    session = llm.session("talk", tmp_path)
    events, target = session.send(random_prompt(40), GREEDY), llm.runner if where == "decode" else decoder
    interrupt_call(monkeypatch, target, where, 6 if where == "decode" else 2)
    received: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        received.extend(event.token_id for event in events)
    monkeypatch.undo()
    tokens = session.tokens
    assert tokens[:40] == random_prompt(40) and tokens[40 : 40 + len(received)] == received
    turn = random_prompt(5, seed=1)
    assert_greedy(model, [*tokens, *turn], take_turn(session, turn))
    session.close()


@pytest.mark.parametrize("requests", [1, 3])
def test_failed_replay_fails_a_single_request_or_restarts_a_batch(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(30 + 7 * i, seed=i) for i in range(requests)]
    (_, llm), (_, full) = make_llm("qwen3_5", **SPARSE), make_llm("qwen3_5")
    replay_states, calls = RollbackStates.replay, itertools.count()

    def fail(self: RollbackStates, sequences: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        replay_states(self, sequences)

    monkeypatch.setattr(RollbackStates, "replay", fail)
    if requests == 1:
        with pytest.raises(Exception, match="no memory"):
            llm.generate(prompts, GREEDY)
    assert generate(llm, prompts) == generate(full, prompts)
    assert next(calls) > 2


def test_failed_replay_restarts_only_requests_with_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(30 + 7 * i, seed=i) for i in range(2)]
    _, full = make_llm("qwen3_5")
    expected = generate(full, prompts)
    correct, incorrect = (
        ControlledDrafts([[*p, *t] for p, t in zip(prompts, expected, strict=True)], [n]) for n in (4, 0)
    )

    def propose(self: Lookup, tokens: list[int], max_tokens: int) -> list[int]:
        drafts = correct if tokens[: len(prompts[0])] == prompts[0] else incorrect
        return drafts.propose(self, tokens, max_tokens)

    replay_states, calls = RollbackStates.replay, itertools.count()

    def fail(self: RollbackStates, sequences: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        replay_states(self, sequences)

    monkeypatch.setattr(Lookup, "propose", propose)
    monkeypatch.setattr(RollbackStates, "replay", fail)
    _, llm = make_llm("qwen3_5", **LOOKUP)
    engine = Engine(llm.runner, max_num_seqs=2)
    requests = engine.run_all(prompts, [GREEDY] * 2, "", Progress(enabled=False))
    assert [list(request.completions()[0].token_ids) for request in requests] == expected
    assert next(calls) > 2 and engine.scheduler.preemptions == 1


@pytest.mark.parametrize(("target", "draft"), [("qwen3_5", "qwen3_5"), ("qwen3_5", "llama3"), ("llama3", "falcon_h1")])
@pytest.mark.sampled(3)
@pytest.mark.parametrize("same_weights", [False, True])
def test_draft_models_give_the_tokens_of_full_attention(
    target: str, draft: str, same_weights: bool, tmp_path: Path
) -> None:
    """The draft model, the target or both are hybrids. If their weights differ, nearly all drafts are rejected."""
    draft_model = architecture(draft) if same_weights else architecture(draft, num_attention_heads=2)
    draft_model.save_pretrained(tmp_path / "draft")
    exact = {"model": str(tmp_path / "draft"), "tokens": 3, "adaptive": False}
    prompts = [random_prompt(30 + 11 * i, seed=i) for i in range(3)]
    (_, llm), (_, full) = make_llm(target, exact=exact), make_llm(target)
    sampled = SamplingParams(max_tokens=12, temperature=0.9, seed=1, ignore_eos=True)
    for params in (GREEDY, sampled):
        expected = [output.token_ids for output in completed(full.generate(prompts, params))]
        outputs = completed(llm.generate(prompts, params))
        assert [output.token_ids for output in outputs] == expected
        llm.runner.check_integrity()
        assert all(output.stats.drafted_tokens for output in outputs)
        if target == draft and same_weights and params is GREEDY:
            assert all(output.stats.acceptance_rate == 1 for output in outputs)


def test_samples_and_beams_equal_full_attention() -> None:
    (_, llm), (_, full) = make_llm("qwen3_5", **SPARSE), make_llm("qwen3_5")
    samples = SamplingParams(max_tokens=14, temperature=0.9, seed=3, n=3)
    beams = SamplingParams(max_tokens=8, temperature=0, num_beams=3, n=2)
    for params in (samples, beams):
        assert generate(llm, [random_prompt(40), random_prompt(30, seed=1)], params) == generate(
            full, [random_prompt(40), random_prompt(30, seed=1)], params
        )


def test_planned_state_memory_includes_rollback_copies() -> None:
    _, llm = make_llm("granite_hybrid", **SPARSE)
    runner = llm.runner
    assert runner.states is not None and runner.rollbacks is not None
    shape = load_shape(architecture("granite_hybrid"))
    costs, without_drafts = costs_for(EngineConfig(**SPARSE), shape), costs_for(EngineConfig(policy="full"), shape)
    for count in range(1, 8):
        runner.rollbacks.set(runner.new_sequence(random_prompt(5), 6), record=True)
        assert runner.states.bytes + runner.rollbacks._copies.bytes <= costs.states(count)
        assert costs.states(count) >= 2 * without_drafts.states(count)
