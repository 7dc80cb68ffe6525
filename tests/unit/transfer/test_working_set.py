"""Test the working set, which caches KV on the device: tokens must not change, and only misses are copied."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.outputs import completed
from support.sampling import examples
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, ConfigError, SamplingParams
from offload_rt.core import BLOCK_SIZE, RowShape
from offload_rt.engine.engine import Engine
from offload_rt.transfer import working_set
from offload_rt.transfer.plan import first_occurrences
from offload_rt.transfer.working_set import LayerSet, look_up

OPTIONS: dict[str, Any] = {"preset": "rows", "sinks": 2, "recent": 8}
BLOCK_BYTES = 2 * 3 * 2 * 32 * BLOCK_SIZE * 4


SLIDING: dict[str, Any] = {"use_sliding_window": True, "max_window_layers": 2}
"""Options for a sliding window in the last layer of a Qwen model."""


def make_llm(working_set: int = 0, policy: str = "infinigen", blocks: int = 64, **settings: Any) -> LLM:
    model = tiny_model(settings.pop("model", "llama"), dtype=torch.float32, **settings.pop("config", {}))
    options = settings.pop("policy_options", OPTIONS)
    return LLM(
        model,
        policy=policy,
        policy_options=options,
        host_memory=blocks * BLOCK_BYTES,
        dtype="float32",
        working_set=working_set,
        **settings,
    )


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0)


class ReferenceTable:
    """Reference implementation of the replacement rule for one list. The decay is 1/2, so scores are exact."""

    def __init__(self, capacity: int) -> None:
        self.slots: list[int | None] = [None] * capacity
        self.scores = [-1.0] * capacity

    def look_up(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return, for each token, its slot or -1, and the slot that it replaces or -1."""
        found = [self.slots.index(token) if token in self.slots else -1 for token in tokens]
        self.scores = [score / 2 if score >= 0 else score for score in self.scores]
        for slot in found:
            if slot >= 0:
                self.scores[slot] += 1
        free = [slot for slot in range(len(self.slots)) if slot not in found]
        free.sort(key=lambda slot: self.scores[slot])
        into = []
        for token, slot in zip(tokens, found, strict=True):
            into.append(-1 if slot >= 0 or not free else free.pop(0))
            if into[-1] >= 0:
                self.slots[into[-1]], self.scores[into[-1]] = token, 1.0
        return found, into

    def forget(self, token: int) -> None:
        if token in self.slots:
            slot = self.slots.index(token)
            self.slots[slot], self.scores[slot] = None, -1.0


@patch.object(working_set, "DECAY", 0.5)
@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_table_equals_the_reference_implementation(data: st.DataObject) -> None:
    capacity, lists = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    layer = LayerSet.empty(RowShape(lists, 1), capacity, torch.float32, torch.device("cpu"))
    references = [ReferenceTable(capacity) for _ in range(lists)]
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(("look up", "look up", "look up", "forget", "clone")))
        if action == "forget":
            token = data.draw(st.integers(0, 9))
            layer.forget(token)
            for one in references:
                one.forget(token)
        elif action == "clone":
            twin = layer.clone()
            look_up(layer.table, torch.tensor([[100]] * lists))
            layer = twin
        else:
            count = data.draw(st.integers(1, 9))
            draw = st.lists(st.integers(0, 9), min_size=count, max_size=count, unique=True)
            tokens = [data.draw(draw) for _ in range(lists)]
            found = look_up(layer.table, torch.tensor(tokens))
            want = [one.look_up(row) for one, row in zip(references, tokens, strict=True)]
            assert found.slots.tolist() == [slots for slots, _ in want]
            assert found.into.tolist() == [into for _, into in want]
            assert found.hits.tolist() == [sum(slot >= 0 for slot in slots) for slots, _ in want]
        layer.check_integrity()
        assert [[None if t < 0 else t for t in row] for row in layer.tokens.tolist()] == [
            one.slots for one in references
        ]


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.integers(-1, 6), min_size=1, max_size=20))
def test_first_occurrences_of_duplicate_ids(ids: list[int]) -> None:
    want = [-1 if row < 0 or ids.index(row) == at else ids.index(row) for at, row in enumerate(ids)]
    assert first_occurrences(torch.tensor(ids)).tolist() == want


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("infinigen", {}),
        ("infinigen", {"policy_options": {"preset": "paper"}}),
        ("infinigen", {"policy_options": OPTIONS | {"max_missed_mass": 0.05, "dense_layers": ()}}),
        ("infinigen", {"kv_cache_dtype": "int4"}),
        ("h2o", {"policy_options": {"budget": 0.3, "recent": 8}}),
        ("infinigen", {"model": "qwen2", "config": SLIDING}),
    ],
    ids=["default", "paper", "repair", "int4", "h2o", "sliding"],
)
def test_tokens_are_the_same_and_fewer_bytes_are_transferred(rows: int, policy: str, settings: dict[str, Any]) -> None:
    prompts = [tiny_prompt(length, seed=length) for length in (1, 40, 150)]
    plain = completed(make_llm(policy=policy, **settings).generate(prompts, greedy(12)))
    llm = make_llm(rows, policy, **settings)
    engine = Engine(llm.runner, max_num_seqs=3)
    requests = [engine.add(prompt, greedy(12)) for prompt in prompts]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    done = [one.completions()[0] for one in requests]
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    for with_set, without in zip(done, plain, strict=True):
        assert with_set.stats.exact_fraction == without.stats.exact_fraction
        assert with_set.stats.h2d_bytes <= without.stats.h2d_bytes
        assert with_set.stats.fetched_fraction <= without.stats.fetched_fraction
    assert done[-1].stats.h2d_bytes < plain[-1].stats.h2d_bytes
    assert llm.runner.transfer.device_bytes == 0


def test_saved_bytes_and_fractions_equal_the_hits() -> None:
    prompt, steps = tiny_prompt(150), 20
    [plain] = completed(make_llm().generate([prompt], greedy(steps + 1)))
    [done] = completed(make_llm(9).generate([prompt], greedy(steps + 1)))
    before, after = plain.stats, done.stats
    assert before.working_set_hit_rate is None and before.working_set_bytes == 0
    rate, row = after.working_set_hit_rate, 2 * 32 * 4
    assert rate is not None and 0 < rate < 1
    layers, heads = 2, 2
    dense = sum(range(150, 150 + steps)) - steps * 9
    selected = (before.h2d_bytes - dense * heads * row) / row
    assert before.h2d_bytes - after.h2d_bytes == round(rate * selected) * row
    assert after.sparse_fetched_fraction == pytest.approx(before.sparse_fetched_fraction * (1 - rate), rel=0.02)
    assert after.fetched_fraction == pytest.approx(
        before.fetched_fraction - before.sparse_fetched_fraction * rate * 2 / 3, 0.02
    )
    assert after.working_set_rows == 9
    assert after.working_set_bytes == layers * heads * (9 + 1) * (row + 8)


def test_working_set_of_all_tokens_fetches_each_entry_once() -> None:
    options = OPTIONS | {"dense_layers": (), "max_fraction": 1.0, "alpha": float("inf")}
    prompt = tiny_prompt(60)
    [done] = completed(make_llm(256, policy_options=options).generate([prompt], greedy(31)))
    candidates = 60 + 30 - 2 - 8  # each candidate of the last step was fetched once
    assert done.stats.h2d_bytes == 3 * 2 * candidates * 2 * 32 * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("eviction", "policy_options"), [("lru", OPTIONS), ("fifo", {"preset": "paper"})])
def test_evicted_slots_leave_the_working_set(eviction: str, policy_options: dict[str, Any]) -> None:
    prompt, made = tiny_prompt(115), []
    for rows in (0, 30):
        llm = make_llm(rows, blocks=2, eviction=eviction, policy_options=policy_options)
        engine = Engine(llm.runner, max_num_seqs=1)
        request = engine.add(prompt, greedy(50))
        while not engine.idle:
            engine.step()
            engine.check_integrity()
        made.append(request.completions()[0])
    assert made[0].token_ids == made[1].token_ids
    assert (made[1].stats.working_set_hit_rate or 0) > 0.05


def test_forks_copy_the_working_set() -> None:
    prompt = tiny_prompt(150, seed=1)
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=3)
    beams = SamplingParams(max_tokens=12, temperature=0, num_beams=3)
    for params in (sampled, beams):
        plain, done = (
            completed(make_llm().generate([prompt], params)),
            completed(make_llm(25).generate([prompt], params)),
        )
        assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    rate = done[0].stats.working_set_hit_rate
    [single] = completed(make_llm(25).generate([prompt], greedy(12)))
    assert rate is not None and rate > 0.8 * (single.stats.working_set_hit_rate or 0)

    runner = make_llm(25).runner
    first = runner.new_sequence(prompt, 200)
    runner.prefill(first, 140)
    for _ in range(5):
        runner.decode([first])
    fork = runner.fork(first, 200)
    runner.check_integrity()
    assert runner.transfer.working_set_bytes(fork.blocks) == runner.transfer.working_set_bytes(first.blocks) > 0
    before = first.trace.bytes_to_device
    runner.decode([first])
    runner.decode([fork])
    assert fork.trace.bytes_to_device == first.trace.bytes_to_device - before
    for sequence in (first, fork):
        runner.free(sequence)


def test_preempted_requests_start_with_an_empty_working_set() -> None:
    prompts = [tiny_prompt(110, seed=i) for i in range(3)]
    expected = [one.token_ids for one in completed(make_llm().generate(prompts, greedy(30)))]
    engine = Engine(make_llm(20, blocks=8).runner, max_num_seqs=3)
    requests = [engine.add(prompt, greedy(30)) for prompt in prompts]
    while not engine.idle:
        engine.step()
        engine.check_integrity()
    assert engine.scheduler.preemptions > 0
    assert [one.completions()[0].token_ids for one in requests] == expected


def test_negative_working_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="working_set=-1 must not be negative"):
        make_llm(-1)
