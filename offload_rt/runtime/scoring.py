"""Log-probabilities of given continuations, through the decode path: every scored token's predecessor is decoded under
the policy, so the policy is what is measured."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from .metrics import Stats
from .runner import Runner
from .sequence import Sequence


@dataclass(frozen=True)
class Score:
    """Of one continuation of n tokens: natural log-probability `[n]` of each, whether each was the likeliest token
    `[n]`, and what computing it cost."""

    logprobs: list[float]
    is_greedy: list[bool]
    stats: Stats


@dataclass(eq=False)
class _Task:
    """tokens: prompt and continuation; tokens [scored_from, end) are scored."""

    tokens: list[int]
    scored_from: int
    logprobs: list[float] = field(default_factory=list)
    is_greedy: list[bool] = field(default_factory=list)
    score: Score | None = None


def score(
    runner: Runner,
    prompts: Seq[Seq[int]],
    continuations: Seq[Seq[int]],
    *,
    decode_from: int | None,
    batch: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Scores `continuations[i]` (at least one token) after `prompts[i]` (at least one), `batch` at a time.

    Prefilled exactly are all but the last token of each prompt, or its first `decode_from` tokens if that is fewer;
    equal prompts are prefilled once and forked. `on_done` is called after each continuation.
    """
    tasks = [_Task([*p, *c], len(p)) for p, c in zip(prompts, continuations, strict=True)]
    groups: dict[tuple[int, ...], list[_Task]] = {}
    for task in tasks:
        stop = task.scored_from - 1 if decode_from is None else min(decode_from, task.scored_from - 1)
        groups.setdefault(tuple(task.tokens[:stop]), []).append(task)
    pending: list[tuple[Sequence, _Task]] = []
    for prefix, members in groups.items():
        pending += _prefill(runner, prefix, members)
        while len(pending) >= batch:
            _decode(runner, pending[:batch], on_done)
            del pending[:batch]
    _decode(runner, pending, on_done)
    return [task.score for task in tasks if task.score is not None]


def _prefill(runner: Runner, prefix: tuple[int, ...], members: Seq[_Task]) -> list[tuple[Sequence, _Task]]:
    """A sequence for each member, the first with its own prefill of `prefix`, the others its forks."""
    first = runner.new_sequence(members[0].tokens, len(members[0].tokens))
    first.trace.prompt_tokens = len(prefix)
    if prefix:
        runner.prefill(first, len(prefix))
    started = [(first, members[0])]
    for task in members[1:]:
        fork = runner.fork(first, len(task.tokens))
        fork.tokens = list(task.tokens)
        started.append((fork, task))
    return started


def _decode(runner: Runner, started: list[tuple[Sequence, _Task]], on_done: Callable[[], None]) -> None:
    """Runs a batch of teacher-forced sequences to their ends, and frees them."""
    running = list(started)
    while running:
        logprobs = torch.log_softmax(runner.decode([sequence for sequence, _ in running]), dim=-1)
        for (sequence, task), row in zip(running, logprobs, strict=True):
            target = sequence.position
            if target >= task.scored_from:
                best = row.max()
                value = row[task.tokens[target]]
                task.logprobs.append(float(value))
                task.is_greedy.append(bool(value == best))
            if target == len(task.tokens) - 1:
                task.score = Score(task.logprobs, task.is_greedy, runner.stats(sequence))
                runner.free(sequence)
                on_done()
        running = [(sequence, task) for sequence, task in running if task.score is None]
