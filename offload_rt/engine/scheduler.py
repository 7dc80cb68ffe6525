"""Who runs: a queue of waiting requests, the one whose prompt is prefilled, and those that decode."""

from __future__ import annotations

from collections import deque
from weakref import WeakSet

from ..errors import OffloadError, PoolFullError
from ..forward.prefill import Prefill
from .request import Request
from .runner import Runner
from .swap import Swap, SwappedSequence


class Scheduler:
    """First come, first served. A request is admitted when the pool has room for its prompt and a chunk for each
    running sequence besides; it then grows chunk by chunk. When the pool runs out, the youngest is preempted: it keeps
    its tokens and goes back to the head of the queue. When there is room its rows come back from disk, if there is a
    `swap` and that was estimated cheaper, or are computed again (but for what the prefix tree still has). The oldest is
    never preempted, so something always finishes; one that would not fit an empty pool is refused at once. Where
    engines of other threads use the same pool, the only one here gives way to theirs, and waits for what they free.

    Owns `waiting`, `prefilling` and `running` (in order of admission); a request is in at most one of them. What could
    not go on has left them and is in `failed`, with its error, until the engine says so."""

    def __init__(self, runner: Runner, max_batch: int, swap: Swap | None = None) -> None:
        self._runner, self._max_batch, self._swap = runner, max_batch, swap
        self._swapped_out: dict[Request, SwappedSequence] = {}
        self._stay: WeakSet[Request] = WeakSet()
        self.waiting: deque[Request] = deque()
        self.prefilling: tuple[Request, Prefill] | None = None
        self.running: list[Request] = []
        self.failed: deque[tuple[Request, Exception]] = deque()
        self.ended: deque[Request] = deque()
        self.preemptions = self.restored = 0
        self._full = False
        self.neighbour = runner.neighbours.join(self)

    @property
    def holds(self) -> bool:
        """Whether something prefills or runs."""
        return bool(self.prefilling or self.running)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, prefills or runs."""
        return not (self.waiting or self.holds)

    def add(self, request: Request, *, swaps: bool = True) -> None:
        """Queues a request behind those that wait. swaps: what it holds is its own, so that its rows may go to disk and
        come back without it."""
        self.waiting.append(request)
        if not swaps:
            self._stay.add(request)

    def admit(self) -> None:
        """Starts the prefill of the next request, if none is running, one waits and it fits now; one that comes back
        from disk runs at once. One whose `start` raises fails; of a PoolFullError only where nothing runs that could
        free chunks, here or in another thread's engine."""
        if self.prefilling is not None or not self.waiting or self._full:
            return
        request = self.waiting[0]
        width = sum(r.width for r in self.running)
        if self.running and width + request.width > self._max_batch:
            return
        try:
            swapped_in = self._swap_in(request, width)
            if not swapped_in:
                prefill = request.start(self._runner)
            self._runner.expect(request.sequences[0], request.expected_tokens, forks=request.width - 1)
            if self.running:
                self._runner.retry_after_reclaim(lambda: self._runner.pool.check_spare(width))
        except OffloadError as error:
            request.drop(self._runner)
            if isinstance(error, PoolFullError) and self.running:
                self._full = True  # until somebody leaves: trying every step would cost every step
            elif not isinstance(error, PoolFullError) or not self.neighbour.may_free():
                self.fail(request, error)
            return
        self.neighbour.found_room()
        self.waiting.popleft()
        request.times.scheduled()
        self._discard_swapped(request)
        if swapped_in:
            self.restored += 1
            self.running.append(request)
        else:
            self.prefilling = request, prefill

    def _swap_in(self, request: Request, width: int) -> bool:
        """Whether a request that was preempted has its rows again, from disk. Raises PoolFullError."""
        tokens = request.tokens
        if self._swap is None or tokens is None or request not in self._swapped_out:
            return False
        swap, swapped = self._swap, self._swapped_out[request]
        sequence = self._runner.retry_after_reclaim(lambda: swap.swap_in(swapped, tokens, spare=width))
        if sequence is None:
            self._discard_swapped(request)
            return False
        request.resume(sequence)
        return True

    def _discard_swapped(self, request: Request) -> None:
        """Removes what is on disk of a request, if there is anything."""
        if self._swap is not None and (swapped := self._swapped_out.pop(request, None)) is not None:
            self._swap.discard(swapped)

    def prefilled(self) -> list[Request]:
        """The prefill is done: its request runs, and so do the completions that fork from it, those that fit; the
        others wait. Returns all that begin to run."""
        assert self.prefilling is not None and self.prefilling[1].done
        request, prefill = self.prefilling
        self.prefilling = None
        started = [request]
        for fork in request.take_pending():
            try:
                fork.fork_from(self._runner, prefill.sequence)
                started.append(fork)
            except PoolFullError:
                self.waiting.append(fork)
        self.running += started
        return started

    def allocate(self) -> None:
        """Allocates the next step of all that run, oldest first, and preempts the youngest where the pool is full. One
        that cannot go on alone fails."""
        for request in list(self.running):
            while request in self.running:
                try:
                    request.reserve(self._runner)
                    break
                except PoolFullError as error:
                    if self.prefilling is None and self.running == [request]:
                        self.stop(request, error)
                        break
                    self.preempt(self.running[-1] if self.prefilling is None else self.prefilling[0])

    def stop(self, request: Request, error: PoolFullError) -> None:
        """Of one that runs alone and has no room: it waits for what other threads' engines free, or else fails."""
        if not self.neighbour.may_free():
            self.fail(request, error)
            return
        self.preempt(request)
        self._full = False

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request that cannot go on; it holds nothing any more, and what it has written stays with it."""
        self.remove(request)
        self.finish(request)
        self.failed.append((request, error))

    def finish(self, request: Request) -> None:
        """Ends a request that has left the queues; it is in `ended` until it has been made durable."""
        request.finish(self._runner, "abort")
        self.ended.append(request)

    def preempt(self, request: Request) -> None:
        """Sends a request back to the head of the queue and frees what it holds; its rows may go to disk."""
        swapped = self._swap_out(request)
        self.remove(request)
        request.drop(self._runner)
        self.waiting.appendleft(request)
        if swapped is not None:
            self._swapped_out[request] = swapped
        self.preemptions += 1
        self._full = True  # what was freed is for those that run; it waits until one of them leaves

    def _swap_out(self, request: Request) -> SwappedSequence | None:
        """Writes the rows of a running request to disk where that is the cheaper way to have them again."""
        if self._swap is None or request in self._stay or request not in self.running or request.tokens is None:
            return None
        [sequence] = request.sequences
        return self._swap.swap_out(sequence, sum(len(one.sequences) for one in self.running))

    def restart(self, request: Request) -> None:
        """Sends the request whose prefill runs back to the head of the queue, to start again at once."""
        self.remove(request)
        request.drop(self._runner)
        self.waiting.appendleft(request)

    def remove(self, request: Request) -> None:
        """Takes a request out of wherever it is."""
        self._full = False
        self.neighbour.found_room()
        self._discard_swapped(request)
        for sequence in request.sequences:
            self._runner.expect(sequence, 0)
        if self.prefilling is not None and self.prefilling[0] is request:
            self.prefilling = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)

    def check_integrity(self) -> None:
        """Asserts that no request is in two places and that only those that started hold sequences."""
        prefilling = [] if self.prefilling is None else [self.prefilling[0]]
        requests = [*self.waiting, *prefilling, *self.running]
        assert len({id(request) for request in requests}) == len(requests)
        assert all(request.sequences for request in [*self.running, *prefilling])
        assert not any(request.sequences for request in self.waiting)
        assert set(self._swapped_out) <= set(self.waiting)
