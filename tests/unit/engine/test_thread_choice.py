"""Test that decode steps use several threads only while that is faster."""

from __future__ import annotations

import random

import torch

from offload_rt.engine import thread_choice
from offload_rt.engine.thread_choice import ThreadChoice


def run_steps(
    choice: ThreadChoice, steps: int, several_threads: float, one_thread: float, noise: float = 0.1
) -> list[bool]:
    """Simulate steps that take the given number of seconds. Return, for each step, whether it used several threads."""
    rng, modes = random.Random(1), []
    for _ in range(steps):
        mode = choice._several ^ (choice._trying > 0)
        modes.append(mode)
        choice.record(mode, (several_threads if mode else one_thread) * (1 + noise * rng.random()))
    return modes


def test_the_faster_mode_is_kept() -> None:
    choice = ThreadChoice()
    assert sum(run_steps(choice, 1000, several_threads=0.03, one_thread=0.05)) > 960
    choice = ThreadChoice()
    assert sum(run_steps(choice, 1000, several_threads=0.15, one_thread=0.05)) < 40, "few steps try the slower mode"


def test_several_threads_must_be_clearly_faster() -> None:
    """With several threads, steps use more processor time and their duration varies more."""
    choice = ThreadChoice()
    assert sum(run_steps(choice, 1000, several_threads=0.049, one_thread=0.05)) < 60


def test_a_mode_with_occasional_slow_steps_is_not_kept() -> None:
    choice, used = ThreadChoice(), 0
    for step in range(1000):
        mode = choice._several ^ (choice._trying > 0)
        used += mode
        # With several threads, two of three steps are faster, but the mean is slower.
        choice.record(mode, (0.09 if step % 3 == 0 else 0.04) if mode else 0.05)
    assert used < 80


def test_the_first_step_of_a_batch_size_does_not_count() -> None:
    choice = ThreadChoice()
    choice.record(True, 1.0)
    assert sum(run_steps(choice, 100, several_threads=0.04, one_thread=0.05)) > 80


def test_the_choice_follows_changes_of_speed() -> None:
    choice = ThreadChoice()
    run_steps(choice, 600, several_threads=0.03, one_thread=0.05)
    assert sum(run_steps(choice, 100, several_threads=0.15, one_thread=0.05)) < 40
    run_steps(choice, 600, several_threads=0.15, one_thread=0.05)
    assert sum(run_steps(choice, 600, several_threads=0.03, one_thread=0.05)[300:]) > 280


def test_another_batch_size_is_measured_separately() -> None:
    choice = ThreadChoice()
    run_steps(choice, 200, several_threads=0.15, one_thread=0.05)
    assert not choice._several
    with choice.step(torch.device("cpu"), 3):
        pass
    assert choice._several and choice._interval <= thread_choice.SHORTEST_INTERVAL


def test_steps_on_a_device_are_not_measured() -> None:
    choice, before = ThreadChoice(), torch.get_num_threads()
    torch.set_num_threads(2)  # a step on a CPU would set the number of threads to one
    try:
        with choice.step(torch.device("meta"), 1):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert not any(choice._times.values())
