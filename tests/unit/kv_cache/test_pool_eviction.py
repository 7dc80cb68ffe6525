"""Compare the choice of evicted tokens with a plain model of the policies in InfiniGen, §4.4."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.kv_cache.eviction import COUNTER_LIMIT, PRIOR_STEPS, RANKINGS, SlotState, victims

SLOTS, LAYERS, RECENT = 7, 2, 3


@dataclass
class Slot:
    position: int = -1
    last_used: int = -1
    since: int = 0
    counter: int = 0

    def rank(self, policy: str, step: int) -> tuple[int, int]:
        steps = max(0, step - self.since) + PRIOR_STEPS
        share = (self.counter + 1) * 2**16 // steps
        return {"fifo": 0, "lru": self.last_used, "counter": share}[policy], self.position


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.lists(st.integers(0, SLOTS - 1), min_size=LAYERS, max_size=LAYERS)),
        st.tuples(st.sampled_from([0, 1]), st.lists(st.integers(0, SLOTS - 1), max_size=6)),
    ),
    min_size=8,
    max_size=50,
)


@settings(max_examples=examples(60), deadline=None)
@given(
    prompt=st.integers(0, SLOTS),
    steps=STEPS,
    repeat=st.sampled_from([1, 100]),
    protected_slots=st.sets(st.integers(0, SLOTS - 1)),
    count=st.integers(1, SLOTS),
)
def test_victims_equal_those_of_the_plain_model(
    prompt: int, steps: list[tuple[str | int, list[int]]], repeat: int, protected_slots: set[int], count: int
) -> None:
    state = SlotState.empty(LAYERS, SLOTS)
    step = max(0, prompt - 1)
    state.fill(range(prompt), step, RECENT)
    filled = [Slot(position, position, max(step, position + RECENT)) for position in range(prompt)]
    model = [[replace(slot) for slot in filled] + [Slot() for _ in range(prompt, SLOTS)] for _ in range(LAYERS)]
    for action, slots in steps:
        for _ in range(1 if action == "place" else repeat):
            step += 1
            if action == "place":
                state.record_write(torch.tensor(slots), position=step + 10, step=step, recent=RECENT)
                for layer, slot in enumerate(slots):
                    model[layer][slot] = Slot(step + 10, step, step + RECENT)
            else:
                state.touch(int(action), torch.tensor(slots, dtype=torch.int64).view(1, -1), step)
                for slot in set(slots):
                    model[int(action)][slot].last_used = step
                    model[int(action)][slot].counter += 1
                if any(slot.counter >= COUNTER_LIMIT for slot in model[int(action)]):
                    for slot_state in model[int(action)]:
                        slot_state.counter //= 2
    protected = torch.zeros(LAYERS, SLOTS, dtype=torch.bool)
    protected[:, list(protected_slots)] = True
    for policy in RANKINGS:
        evicted = victims(policy, state, protected, step + 5, count)
        for layer in range(LAYERS):
            evictable = [i for i in range(SLOTS) if i not in protected_slots and model[layer][i].position >= 0]
            expected = sorted(evictable, key=lambda i: model[layer][i].rank(policy, step + 5))[:count]
            assert evicted[layer].tolist() == expected + [-1] * (count - len(expected)), policy


def test_counter_policy_does_not_evict_new_tokens_for_low_counts() -> None:
    """A token's count is compared with the number of steps since it left the recent window."""
    state = SlotState.empty(1, 2)
    state.fill(range(1), 8, 8)
    for step in (10, 11):
        state.touch(0, torch.tensor([0]), step)
    state.record_write(torch.tensor([1]), 36, step=36, recent=8)
    protected = torch.zeros(1, 2, dtype=torch.bool)
    # At step 48, token 0 was selected in 2 of 40 steps, and token 1 in none of 4: too few to judge it.
    assert victims("counter", state, protected, 48).tolist() == [[0]]
    assert victims("counter", state, protected, 88).tolist() == [[1]]


def test_token_of_a_prompt_is_counted_from_its_exit_of_the_recent_window() -> None:
    """The newest token of a prompt can be selected `recent` steps later than its first token."""
    state = SlotState.empty(1, 10)
    state.fill(range(10), step=9, recent=8)
    for step, slot in enumerate((0, 0, 0, 9, 9), start=20):
        state.touch(0, torch.tensor([slot]), step)
    protected = torch.ones(1, 10, dtype=torch.bool)
    protected[0, [0, 9]] = False
    # Token 0 was selected in 3 of 23 steps, and token 9 in 2 of 15. From step 9, both could be selected for 23 steps.
    assert victims("counter", state, protected, 32).tolist() == [[0]]


def test_token_that_was_never_selected_was_last_used_when_it_was_stored() -> None:
    state = SlotState.empty(1, 6)
    state.fill(range(4), step=3, recent=1)
    state.touch(0, torch.tensor([0]), 4)
    state.fill(range(4, 6), step=5, recent=1)
    order = victims("lru", state, torch.zeros(1, 6, dtype=torch.bool), 6, count=6)
    assert order.tolist() == [[1, 2, 3, 0, 4, 5]]
    state.record_write(torch.tensor([2]), 6, step=6, recent=1)
    assert victims("lru", state, torch.zeros(1, 6, dtype=torch.bool), 7, count=6).tolist() == [[1, 3, 0, 4, 5, 2]]
