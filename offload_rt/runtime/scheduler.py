"""Who runs: a queue of waiting generations and the list of running ones."""

from __future__ import annotations

from collections import deque

from ..errors import OffloadError, PoolFullError
from .generation import Generation
from .runner import Runner


class Scheduler:
    """First come, first served. A generation waits until the pool has room for its prompt and its new tokens; one
    that would not fit an empty pool is refused at once. Owns `waiting` and `running`; a generation is in at most one
    of them."""

    def __init__(self, runner: Runner, max_batch: int) -> None:
        self._runner, self._max_batch = runner, max_batch
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []

    def add(self, generation: Generation) -> None:
        """Queues a generation."""
        self.waiting.append(generation)

    def admit(self) -> Generation | None:
        """The next generation to prefill, with its sequence made; None where none waits or fits now.

        Raises what `Generation.start` raises, PoolFullError only where nothing runs that could make room; the
        generation is taken out of the queue.
        """
        if not self.waiting or len(self.running) >= self._max_batch:
            return None
        generation = self.waiting[0]
        try:
            generation.start(self._runner)
        except OffloadError as error:
            if isinstance(error, PoolFullError) and self.running:
                return None
            self.waiting.popleft()
            raise
        return self.waiting.popleft()

    def remove(self, generation: Generation) -> None:
        """Takes a generation out of wherever it is."""
        if generation in self.waiting:
            self.waiting.remove(generation)
        elif generation in self.running:
            self.running.remove(generation)

    def check_integrity(self) -> None:
        """Asserts that nobody is in both queues and that only started generations run."""
        assert not set(self.waiting) & set(self.running)
        assert all(g.sequence is not None for g in self.running)
        assert all(g.sequence is None for g in self.waiting)
