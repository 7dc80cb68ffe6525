"""Test lossless mode (`exact=...`) of hybrid models: rejected draft tokens do not change the recurrent state."""

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
from offload_rt.engine.swap import Swap
from offload_rt.model_runner.rollback_states import RollbackStates
from offload_rt.model_runner.sequence import Sequence
from offload_rt.models.shape import load_shape
from offload_rt.planning.device_plan import costs_for
from offload_rt.utils.progress import Progress

FAMILIES = ("qwen3_5", "granite_hybrid", "kimi_linear", "lfm2", "lfm3", "falcon_h1", "nemotron_h")
"""One family of each kind of state, and one with latent attention."""

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
LOOKUP: dict[str, Any] = {"exact": {"method": "lookup", "tokens": 4, "adaptive": False}}


def texts(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    found = [one.token_ids for one in completed(llm.generate(prompts, params))]
    llm.runner.check_integrity()
    assert llm.runner.states is not None and llm.runner.states.used == 0
    return found


class ControlledDrafts:
    """Replace prompt lookup by drafts with `right` correct tokens of the known text, then wrong ones."""

    def __init__(self, known: list[list[int]], right: list[int]) -> None:
        """`known` are prompts with their texts. `right` repeats from round to round."""
        self._known, self._right = known, itertools.cycle(right)
        self.rounds: list[tuple[int, int]] = []

    def propose(self, lookup: Lookup, tokens: list[int], most: int) -> list[int]:
        text = next(one for one in self._known if one[: len(tokens)] == tokens)
        right = min(most, next(self._right))
        draft = text[len(tokens) : len(tokens) + most]
        self.rounds.append((right, len(draft)))
        return [token if i < right else (token + 1) % VOCAB for i, token in enumerate(draft)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", RECURRENT[::-1])
def test_the_text_equals_full_attention(name: str) -> None:
    """Three sequences with drafts of different lengths, greedy and sampled. They end at different times."""
    prompts = [random_prompt(30 + 17 * i, seed=i) for i in range(3)]
    sampled = [SamplingParams(max_tokens=n, temperature=0.8, seed=n, ignore_eos=True) for n in (16, 11, 1)]
    (_, llm), (_, plain) = make_llm(name, **SPARSE), make_llm(name)
    for params in (GREEDY, sampled):
        assert texts(llm, prompts, params) == texts(plain, prompts, params)
    stats = completed(llm.generate(prompts[:1], GREEDY))[0].stats
    assert stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_number_of_accepted_drafts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover 0 to 4 correct draft tokens in each order of two rounds, alone and in a batch of three."""
    prompts = [random_prompt(40 + 13 * i, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    model, plain = make_llm(name)
    expected = texts(plain, prompts, params)
    assert_greedy(model, prompts[0], expected[0])
    pairs = [count for pair in itertools.product(range(5), repeat=2) for count in pair]
    for at_once in (1, 3):
        drafts = ControlledDrafts([[*p, *t] for p, t in zip(prompts, expected, strict=True)], pairs)
        monkeypatch.setattr(Lookup, "propose", lambda self, tokens, most, d=drafts: d.propose(self, tokens, most))
        _, llm = make_llm(name, **LOOKUP)
        found = [text for at in range(0, 3, at_once) for text in texts(llm, prompts[at : at + at_once], params)]
        assert found == expected
        assert {right for right, drafted in drafts.rounds if drafted == 4} == {*range(5)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FAMILIES[::-1])
@given(st.data())
@settings(max_examples=5, deadline=None)
def test_rejected_drafts_do_not_change_logits_or_states(name: str, data: st.DataObject) -> None:
    """Logits and states equal those of sequences without drafts, for any drafts of two sequences."""
    runner = make_llm(name, enable_prefix_caching=False, **SPARSE)[1].runner
    pairs = []
    for seed in range(2):
        pair = [runner.new_sequence(random_prompt(30 + 9 * seed, seed), 160) for _ in range(2)]
        for one in pair:
            runner.prefill(one, len(one.tokens) - 1)
        pairs.append((pair[0], pair[1]))
    for _ in range(data.draw(st.integers(1, 4))):
        _round(data, runner, pairs)
        runner.check_integrity()
    for mine, theirs in pairs:
        for layer in runner.states.processed:  # type: ignore[union-attr]
            one, other = (runner.states.layer_state(layer, each.state_slot) for each in (mine, theirs))  # type: ignore[union-attr]
            for a, b in zip(one, other, strict=True):
                if a is not None and b is not None:
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        for one in (mine, theirs):
            runner.free(one)
    runner.check_integrity()


def _round(data: st.DataObject, runner: Any, pairs: list[tuple[Sequence, Sequence]]) -> None:
    """Draft random tokens for the first sequence of each pair, verify them together, and accept some of them."""
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
    rows = verify(runner, [(one, len(drafted) + 1) for (one, _), drafted in zip(pairs, drafts, strict=True)])
    rejected = []
    for (sequence, plain), drafted, logits in zip(pairs, drafts, rows, strict=True):
        kept, start = data.draw(st.integers(0, len(drafted))), sequence.position
        for row in range(kept + 1):
            accept(runner, sequence)
            [expected] = verify(runner, [(plain, 1)])
            accept(runner, plain)
            torch.testing.assert_close(logits[row : row + 1], expected, rtol=0, atol=1e-3)
            plain.tokens.append(drafted[row] if row < kept else data.draw(st.integers(0, VOCAB - 1)))
        sequence.tokens[start + 1 :] = plain.tokens[start + 1 :]
        runner.reload(sequence)
        if kept < len(drafted):
            rejected.append(sequence)
    if rejected:
        replay(runner, rejected)


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1"])
def test_snapshots_are_taken_after_verified_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that continues an answer starts at a snapshot within the answer. Rounds end there."""
    prompt, params = random_prompt(125), SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    model, plain = make_llm(name)
    [text] = texts(plain, [prompt], params)
    drafts = ControlledDrafts([[*prompt, *text]], [4, 4, 1, 3])
    monkeypatch.setattr(Lookup, "propose", lambda self, tokens, most: drafts.propose(self, tokens, most))
    _, llm = make_llm(name, **LOOKUP)
    assert texts(llm, [prompt], params) == [text]
    monkeypatch.undo()
    following = [*prompt, *text[:75], *random_prompt(5, seed=3)]
    [output] = llm.generate([following], SamplingParams(max_tokens=6, temperature=0))
    assert output.num_cached_tokens == 200 // BLOCK_SIZE * BLOCK_SIZE
    assert_greedy(model, following, output.outputs[0].token_ids)


def test_approximate_drafts_leave_no_snapshots() -> None:
    """The state of sparse drafts at the end of a block must not be shared."""
    model, llm = make_llm("qwen3_5", **SPARSE)
    prompt = random_prompt(60)
    [text] = texts(llm, [prompt], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    following = [*prompt, *text[:10], *random_prompt(4, seed=1)]
    [output] = llm.generate([following], SamplingParams(max_tokens=8, temperature=0))
    assert output.num_cached_tokens == BLOCK_SIZE
    assert_greedy(model, following, output.outputs[0].token_ids)


@pytest.mark.parametrize("slots", [0, 8])
def test_preempted_requests(slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three growing prompts do not fit together. With memory for snapshots, the exact state is swapped."""
    monkeypatch.setattr(Swap, "_recompute_seconds", lambda *_: float("inf"))
    prompts = [random_prompt(60, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
    _, plain = make_llm("qwen3_5")
    assert plain.runner.pool.states is not None
    snapshots = max(1, slots * plain.runner.pool.states.slot_bytes)
    memory = 3 * plain.runner.pool.block_bytes + snapshots
    _, tight = make_llm("qwen3_5", host_memory=memory, snapshot_memory=snapshots, swap=tmp_path, **SPARSE)
    engine = tight.make_engine()
    requests = [engine.add(prompt, params) for prompt in prompts]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions and bool(engine.scheduler.restored) == bool(slots)
    assert [one.new_tokens for one in requests] == texts(plain, prompts, params)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm3", "kimi_linear"])
def test_sessions(name: str, tmp_path: Path) -> None:
    """Turns of a session that is reopened from disk equal those with full attention. Each answer fills a block."""
    found, params = [], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for options in (SPARSE, {}):
        answers = []
        for turn in range(3):
            _, llm = make_llm(name, **options)
            session = llm.session("talk", tmp_path / str(bool(options)))
            answers.append(take_turn(session, random_prompt(56 + turn, seed=turn), params))
            assert not turn or session.last_stats.reused_tokens >= BLOCK_SIZE  # type: ignore[union-attr]
            session.check_integrity()
            session.close()
        found.append(answers)
    assert found[0] == found[1]


@pytest.mark.parametrize("where", ["decode", "verify", "replay"])
def test_an_interrupted_round_is_no_answer(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C, the session contains the returned tokens, and continues with the right ones."""
    model, llm = make_llm("qwen3_5", **SPARSE)
    session = llm.session("talk", tmp_path)
    events, target = session.send(random_prompt(40), GREEDY), llm.runner if where == "decode" else decoder
    interrupt_call(monkeypatch, target, where, 6 if where == "decode" else 2)
    seen: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        seen.extend(event.token_id for event in events)
    monkeypatch.undo()
    kept = session.tokens
    assert kept[:40] == random_prompt(40) and kept[40 : 40 + len(seen)] == seen
    turn = random_prompt(5, seed=1)
    assert_greedy(model, [*kept, *turn], take_turn(session, turn))
    session.close()


@pytest.mark.parametrize("requests", [1, 3])
def test_a_failed_replay_fails_one_request_or_starts_a_batch_again(
    requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(30 + 7 * i, seed=i) for i in range(requests)]
    (_, llm), (_, plain) = make_llm("qwen3_5", **SPARSE), make_llm("qwen3_5")
    real, calls = RollbackStates.replay, itertools.count()

    def fail(self: RollbackStates, sequences: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        real(self, sequences)

    monkeypatch.setattr(RollbackStates, "replay", fail)
    if requests == 1:
        with pytest.raises(Exception, match="no memory"):
            llm.generate(prompts, GREEDY)
    assert texts(llm, prompts) == texts(plain, prompts)
    assert next(calls) > 2


def test_a_failed_replay_starts_only_requests_with_rejected_drafts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two requests, one has only correct drafts and continues. The other one restarts."""
    prompts = [random_prompt(30 + 7 * i, seed=i) for i in range(2)]
    _, plain = make_llm("qwen3_5")
    expected = texts(plain, prompts)
    right, wrong = (ControlledDrafts([[*p, *t] for p, t in zip(prompts, expected, strict=True)], [n]) for n in (4, 0))

    def propose(self: Lookup, tokens: list[int], most: int) -> list[int]:
        drafts = right if tokens[: len(prompts[0])] == prompts[0] else wrong
        return drafts.propose(self, tokens, most)

    real, calls = RollbackStates.replay, itertools.count()

    def fail(self: RollbackStates, sequences: Any) -> None:
        if next(calls) == 1:
            raise RuntimeError("no memory")
        real(self, sequences)

    monkeypatch.setattr(Lookup, "propose", propose)
    monkeypatch.setattr(RollbackStates, "replay", fail)
    _, llm = make_llm("qwen3_5", **LOOKUP)
    engine = Engine(llm.runner, max_num_seqs=2)
    requests = engine.run_all(prompts, [GREEDY] * 2, "", Progress(enabled=False))
    assert [list(one.completions()[0].token_ids) for one in requests] == expected
    assert next(calls) > 2 and engine.scheduler.preemptions == 1


@pytest.mark.parametrize(("target", "draft"), [("qwen3_5", "qwen3_5"), ("qwen3_5", "llama3"), ("llama3", "falcon_h1")])
@pytest.mark.sampled(3)
@pytest.mark.parametrize("right", [False, True])
def test_draft_models(target: str, draft: str, right: bool, tmp_path: Path) -> None:
    """The draft model, the target model or both are hybrids. Drafts of other weights are nearly always rejected."""
    small = architecture(draft) if right else architecture(draft, num_attention_heads=2)
    small.save_pretrained(tmp_path / "draft")
    exact = {"model": str(tmp_path / "draft"), "tokens": 3, "adaptive": False}
    prompts = [random_prompt(30 + 11 * i, seed=i) for i in range(3)]
    (_, llm), (_, plain) = make_llm(target, exact=exact), make_llm(target)
    sampled = SamplingParams(max_tokens=12, temperature=0.9, seed=1, ignore_eos=True)
    for params in (GREEDY, sampled):
        expected = [one.token_ids for one in completed(plain.generate(prompts, params))]
        done = completed(llm.generate(prompts, params))
        assert [one.token_ids for one in done] == expected
        llm.runner.check_integrity()
        assert all(one.stats.drafted_tokens for one in done)
        if target == draft and right and params is GREEDY:
            assert all(one.stats.acceptance_rate == 1 for one in done)


def test_completions_and_beams() -> None:
    """Several completions and beams are verified without drafts, and fork the state."""
    (_, llm), (_, plain) = make_llm("qwen3_5", **SPARSE), make_llm("qwen3_5")
    several = SamplingParams(max_tokens=14, temperature=0.9, seed=3, n=3)
    beams = SamplingParams(max_tokens=8, temperature=0, num_beams=3, n=2)
    for params in (several, beams):
        assert texts(llm, [random_prompt(40), random_prompt(30, seed=1)], params) == texts(
            plain, [random_prompt(40), random_prompt(30, seed=1)], params
        )


def test_planned_state_includes_marks() -> None:
    _, llm = make_llm("granite_hybrid", **SPARSE)
    runner = llm.runner
    assert runner.states is not None and runner.rollbacks is not None
    shape = load_shape(architecture("granite_hybrid"))
    costs, plain = costs_for(EngineConfig(**SPARSE), shape), costs_for(EngineConfig(policy="full"), shape)
    for count in range(1, 8):
        runner.rollbacks.set(runner.new_sequence(random_prompt(5), 6), record=True)
        assert runner.states.bytes + runner.rollbacks._copies.bytes <= costs.states(count)
        assert costs.states(count) >= 2 * plain.states(count)
