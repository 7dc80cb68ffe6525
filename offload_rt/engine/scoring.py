"""Teacher-forced log-probabilities of continuations, computed in decode steps so that they reflect the policy."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial

import torch

from ..core import BLOCK_SIZE
from ..errors import PoolFullError
from ..kv_cache.stored_rows import blocks_for
from ..model_runner.sequence import Sequence
from ..model_runner.trace import Recorder
from ..outputs import Stats
from .logits_processors import check_logits
from .runner import Runner
from .speculative.verification import accept, verify
from .stats import sequence_stats

VERIFIED_AT_ONCE = 64  # tokens per verification pass with `exact`; the logits of all these tokens are in memory at once


@dataclass(frozen=True)
class Score:
    """Score of a continuation of n tokens.

    Attributes:
        logprobs: Natural log-probability of each token, `[n]`.
        is_greedy: Whether each token was the most probable one, `[n]`.
    """

    logprobs: list[float]
    is_greedy: list[bool]
    stats: Stats


@dataclass(eq=False)
class _Task:
    # `tokens` holds the prompt and the continuation. Tokens from index `scored_from` on are scored. The last token is
    # scored from the logits of the token before it, so its own KV is never computed.

    tokens: list[int]
    scored_from: int
    on_logprobs: Callable[[torch.Tensor], None]
    logprobs: list[float] = field(default_factory=list)
    is_greedy: list[bool] = field(default_factory=list)
    score: Score | None = None

    @property
    def computed(self) -> int:
        return len(self.tokens) - 1


def score(
    runner: Runner,
    prompts: Seq[Seq[int]],
    continuations: Seq[Seq[int]],
    *,
    decode_from: int | None,
    batch: int,
    on_done: Callable[[], None] = lambda: None,
    on_logprobs: Callable[[int, torch.Tensor], None] = lambda index, logprobs: None,
    recorder: Recorder | None = None,
) -> list[Score]:
    """Score each `continuations[i]` after `prompts[i]`. Both must have at least one token.

    Equal prompts are prefilled once and forked. For other arguments, see `LLM.score`.

    Args:
        on_done: Called after each continuation.
        on_logprobs: Called for each scored token with the index of the continuation and log-probabilities `[V]` on the
            model's device.
        recorder: Receives the tokens that each layer selects in decode steps. Allowed only for a single continuation.

    Raises:
        PoolFullError: A single sequence does not fit in the pool.
    """
    pairs = zip(prompts, continuations, strict=True)
    tasks = [_Task([*p, *c], len(p), partial(on_logprobs, i)) for i, (p, c) in enumerate(pairs)]
    groups: dict[tuple[int, ...], list[_Task]] = {}
    for task in tasks:
        stop = task.scored_from - 1 if decode_from is None else min(decode_from, task.scored_from - 1)
        groups.setdefault(tuple(task.tokens[:stop]), []).append(task)
    # With eviction, sequences run alone, because the evicted tokens must not depend on other sequences.
    batches = _Batches(runner, batch if runner.config.eviction is None else 1, on_done, recorder)
    try:
        for prefix, members in groups.items():
            batches.start(prefix, members)
        batches.decode()
    finally:
        batches.close()
    return [task.score for task in tasks if task.score is not None]


class _Batches:
    """Collects prefilled sequences, and decodes them together as soon as a batch is full or memory runs out."""

    def __init__(
        self, runner: Runner, size: int, on_done: Callable[[], None], recorder: Recorder | None = None
    ) -> None:
        self._runner, self._size, self._on_done, self._recorder = runner, size, on_done, recorder
        self._groups = runner.pool.groups
        self._pending: list[tuple[Sequence, _Task]] = []
        self._origin: tuple[Sequence, _Task] | None = None

    def start(self, prefix: tuple[int, ...], members: Seq[_Task]) -> None:
        groups, last = self._groups, members[-1]
        origin = self._retry_after_decoding(partial(self._prefilled, prefix, last), groups.blocks(last.computed))
        self._origin = origin, last
        for task in members[:-1]:
            blocks = groups.blocks(task.computed) - groups.full * (len(prefix) // BLOCK_SIZE)
            fork = self._retry_after_decoding(partial(self._fork, origin, task), blocks)
            self._pending.append((fork, task))
        blocks = groups.full * (blocks_for(last.computed) - len(origin.blocks.ids))
        self._retry_after_decoding(partial(self._grown, origin, last), blocks)
        self._pending.append((origin, last))
        self._origin = None

    def _retry_after_decoding(self, make: Callable[[], Sequence], blocks: int) -> Sequence:
        """Call `make`, which needs at most `blocks` blocks. If the pool is full, first decode the pending sequences."""
        pool = self._runner.pool
        available = pool.free_blocks + pool.idle_blocks
        crowded = self._groups.sliding > 0 and self._window_blocks_needed + blocks > available
        if self._pending and (crowded or len(self._pending) >= self._size):
            self.decode()
        try:
            return self._runner.retry_after_reclaim(make)
        except PoolFullError:
            if not self._pending:
                raise
            self.decode()
            return self._runner.retry_after_reclaim(make)

    @property
    def _window_blocks_needed(self) -> int:
        waiting = self._pending if self._origin is None else [*self._pending, self._origin]
        windows = {window for sequence, _ in waiting for window in sequence.blocks.windows.values()}
        most = sum(
            self._groups.blocks(task.computed) - self._groups.full * blocks_for(task.computed) for _, task in waiting
        )
        return most - self._groups.sliding * len(windows)

    def _prefilled(self, prefix: tuple[int, ...], task: _Task) -> Sequence:
        self._runner.check_fits(task.computed)
        sequence = self._runner.new_sequence(task.tokens, max(1, len(prefix)), reuse=len(prefix))
        sequence.trace.prompt_tokens, sequence.trace.recorder = len(prefix), self._recorder
        try:
            self._runner.expect(sequence, task.computed)
            if prefix:
                self._runner.prefill(sequence, len(prefix))
        except BaseException:
            self._runner.free(sequence)
            raise
        return sequence

    def _grown(self, origin: Sequence, task: _Task) -> Sequence:
        self._runner.pool.reserve(origin.blocks, self._runner.cache_manager.slots_for(origin.position, task.computed))
        return origin

    def _fork(self, origin: Sequence, task: _Task) -> Sequence:
        fork = self._runner.fork(origin, self._runner.cache_manager.slots_for(origin.position, task.computed))
        fork.tokens = list(task.tokens)
        return fork

    def decode(self) -> None:
        if self._runner.config.exact is not None:
            for sequence, task in self._pending:
                self._verify(sequence, task)
            self._pending = []
        while self._pending:
            logits = self._runner.decode([sequence for sequence, _ in self._pending])
            check_logits(logits)
            logprobs = torch.log_softmax(logits, dim=-1)
            for (sequence, task), row in zip(self._pending, logprobs, strict=True):
                self._advance(sequence, task, row)
            self._pending = [(sequence, task) for sequence, task in self._pending if task.score is None]

    def _verify(self, sequence: Sequence, task: _Task) -> None:
        while task.score is None:
            left = task.computed - sequence.position
            [logits] = verify(self._runner, [(sequence, min(VERIFIED_AT_ONCE, left))])
            check_logits(logits)
            for row in torch.log_softmax(logits, dim=-1):
                accept(self._runner, sequence)
                self._advance(sequence, task, row)

    def _advance(self, sequence: Sequence, task: _Task, logprobs: torch.Tensor) -> None:
        target = sequence.position
        if target >= task.scored_from:
            value = logprobs[task.tokens[target]]
            task.logprobs.append(float(value))
            task.is_greedy.append(bool(value == logprobs.max()))
            task.on_logprobs(logprobs)
        if target == task.computed:
            task.score = Score(task.logprobs, task.is_greedy, sequence_stats(self._runner, sequence))
            self._runner.free(sequence)
            self._on_done()

    def close(self) -> None:
        waiting = self._pending if self._origin is None else [*self._pending, self._origin]
        for sequence, task in waiting:
            if task.score is None:
                self._runner.free(sequence)
        self._pending, self._origin = [], None
