"""Test that `RecycledMemory` reuses only freed memory, and never allocates more than the peak usage."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples

from offload_rt.utils.allocator import SPARE, RecycledMemory

TAKE = st.tuples(st.just("take"), st.integers(0, 50), st.integers(1, 5))
DROP = st.tuples(st.just("drop"), st.integers(0, 9), st.booleans())


@given(st.lists(st.one_of(TAKE, TAKE, DROP), max_size=40))
@settings(max_examples=examples(50), deadline=None)
def test_no_two_tensors_have_the_same_memory(steps: list[tuple[str, int, int]]) -> None:
    memory, held, most, largest = RecycledMemory(least=0), list[tuple[torch.Tensor, int]](), 0, 0
    for number, (kind, a, b) in enumerate(steps):
        if kind == "take":
            tensor = memory.empty((a, b), torch.int64)
            assert tensor.shape == (a, b) and tensor.is_contiguous()
            held.append((tensor.fill_(number), number))
            most, largest = max(most, sum(len(each) > 0 for each, _ in held)), max(largest, tensor.nbytes)
        elif held:
            tensor, filled = held.pop(a % len(held))
            if b and tensor.shape[0] > 1:
                held.append((tensor[1:], filled))
        tensor = None
        assert all(bool((each == filled).all()) for each, filled in held)
        memory.check_integrity()
    held.clear()
    gc.collect()
    assert memory.nbytes <= most * (largest + largest // SPARE)
    memory.clear()
    assert memory.nbytes == 0


def test_freed_memory_is_reused() -> None:
    memory = RecycledMemory(least=0)
    first = memory.empty((9, 100), torch.bfloat16)
    at = first.data_ptr()
    assert memory.nbytes == 0
    del first
    smaller = memory.empty((100,), torch.float32)
    assert smaller.data_ptr() == at
    other = memory.empty((100,), torch.float32)
    assert other.data_ptr() != at
    del smaller, other
    grown = memory.empty((9, 500), torch.bfloat16)
    assert grown.nbytes == 9000 and memory.nbytes == 400 + 400 // SPARE, "the new buffer replaces the larger free one"
