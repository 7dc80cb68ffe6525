"""Who runs: a queue of waiting requests, the one whose prompt is prefilled, and those that decode."""

from __future__ import annotations

from collections import deque

from ..errors import OffloadError, PoolFullError
from ..forward.prefill import Prefill
from .request import Served
from .runner import Runner
from .swap import Swap, Swapped


class Scheduler:
    """First come, first served. A request is admitted when the pool has room for its prompt and a chunk for each
    running sequence besides; it then grows chunk by chunk. When the pool runs out, the youngest gives way: it keeps its
    tokens and goes back to the head of the queue. When there is room its rows come back from disk, if there is a
    `swap` and that was estimated cheaper, or are computed again (but for what the prefix tree still has). The oldest
    is never preempted, so something always finishes; one that would not fit an empty pool is refused at once.

    Owns `waiting`, `prefilling` and `running` (in order of admission); a request is in at most one of them."""

    def __init__(self, runner: Runner, max_batch: int, swap: Swap | None = None) -> None:
        self._runner, self._max_batch, self._spill = runner, max_batch, swap
        self._spilled: dict[Served, Swapped] = {}
        self.waiting: deque[Served] = deque()
        self.prefilling: tuple[Served, Prefill] | None = None
        self.running: list[Served] = []
        self.preemptions = self.restored = 0
        self._full = False

    @property
    def idle(self) -> bool:
        """Whether nothing waits, prefills or runs."""
        return not (self.waiting or self.prefilling or self.running)

    def add(self, request: Served) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Starts the prefill of the next request, if none is running, one waits and it fits now; one that comes back
        from disk runs at once.

        Raises what `Served.start` raises, PoolFullError only where nothing runs that could make room; the request is
        taken out of the queue.
        """
        if self.prefilling is not None or not self.waiting or self._full:
            return
        served = self.waiting[0]
        width = sum(r.width for r in self.running)
        if self.running and width + served.width > self._max_batch:
            return
        try:
            came_back = self._restore(served, width)
            if not came_back:
                prefill = served.start(self._runner)
            if self.running:
                self._runner.retry_after_reclaim(lambda: self._runner.check_spare(width))
        except OffloadError as error:
            served.drop(self._runner)
            if isinstance(error, PoolFullError) and self.running:
                self._full = True  # until somebody leaves: trying every step would cost every step
                return
            self.remove(served)
            raise
        self.waiting.popleft()
        self._forget(served)
        if came_back:
            self.restored += 1
            self.running.append(served)
        else:
            self.prefilling = served, prefill

    def _restore(self, served: Served, width: int) -> bool:
        """Whether a request that was preempted has its rows again, from disk. Raises PoolFullError."""
        tokens = served.tokens
        if self._spill is None or tokens is None or served not in self._spilled:
            return False
        swap, spilled = self._spill, self._spilled[served]
        sequence = self._runner.retry_after_reclaim(lambda: swap.restore(spilled, tokens, spare=width))
        if sequence is None:
            self._forget(served)
            return False
        served.resume(sequence)
        return True

    def _forget(self, served: Served) -> None:
        """What is on disk of a request is not needed any more."""
        if self._spill is not None and (spilled := self._spilled.pop(served, None)) is not None:
            self._spill.forget(spilled)

    def prefilled(self) -> list[Served]:
        """The prefill is done: its request runs, and so do the completions that fork from it, those that fit; the
        others wait. Returns all that begin to run."""
        assert self.prefilling is not None and self.prefilling[1].done
        served, prefill = self.prefilling
        self.prefilling = None
        started = [served]
        for fork in served.take_pending():
            try:
                fork.fork_from(self._runner, prefill.sequence)
                started.append(fork)
            except PoolFullError:
                self.waiting.append(fork)
        self.running += started
        return started

    def make_room(self) -> None:
        """Takes room for the next step of all that run, oldest first, at the expense of the youngest.

        Raises PoolFullError where not even one alone can go on; it is then in no queue and holds nothing.
        """
        for served in list(self.running):
            while served in self.running:
                try:
                    served.reserve(self._runner)
                    break
                except PoolFullError:
                    if self.prefilling is None and self.running == [served]:
                        self.remove(served)
                        served.finish(self._runner, "cancelled")
                        raise
                    self.preempt(self.running[-1] if self.prefilling is None else self.prefilling[0])

    def preempt(self, served: Served) -> None:
        """Sends a request back to the head of the queue; it gives back what it holds, maybe to the disk."""
        spilled = self._keep(served)
        self.remove(served)
        served.drop(self._runner)
        self.waiting.appendleft(served)
        if spilled is not None:
            self._spilled[served] = spilled
        self.preemptions += 1
        self._full = True  # what was given back is for those that run; it waits until one of them leaves

    def _keep(self, served: Served) -> Swapped | None:
        """Writes the rows of a running request to disk where that is the cheaper way to have them again."""
        if self._spill is None or served not in self.running or served.tokens is None:
            return None
        [sequence] = served.sequences
        return self._spill.keep(sequence, sum(len(one.sequences) for one in self.running))

    def restart(self, served: Served) -> None:
        """Sends the request whose prefill runs back to the head of the queue, to start again at once."""
        self.remove(served)
        served.drop(self._runner)
        self.waiting.appendleft(served)

    def remove(self, served: Served) -> None:
        """Takes a request out of wherever it is."""
        self._full = False
        self._forget(served)
        if self.prefilling is not None and self.prefilling[0] is served:
            self.prefilling = None
        if served in self.waiting:
            self.waiting.remove(served)
        elif served in self.running:
            self.running.remove(served)

    def check_integrity(self) -> None:
        """Asserts that nobody is in two places and that only those that started hold sequences."""
        prefilling = [] if self.prefilling is None else [self.prefilling[0]]
        everybody = [*self.waiting, *prefilling, *self.running]
        assert len({id(served) for served in everybody}) == len(everybody)
        assert all(served.sequences for served in [*self.running, *prefilling])
        assert not any(served.sequences for served in self.waiting)
        assert set(self._spilled) <= set(self.waiting)
