"""Schedule the requests of one engine."""

from __future__ import annotations

import logging
import time
from collections import deque
from weakref import WeakKeyDictionary, WeakSet

from ..errors import EngineError, OffloadError, PoolFullError
from ..model_runner.prefill import Prefill
from .pool_order import PoolMember
from .request import Request
from .runner import Runner
from .swap import Swap, SwappedSequence

logger = logging.getLogger(__name__)


class Scheduler(PoolMember):
    """Decides which requests are prefilled, decoded, queued or preempted. Requests are served first come, first served.

    A request is admitted if the pool has memory for its prompt and for one more block per running sequence. A request
    that would not fit even in an empty pool fails immediately. If the pool runs out of memory, the youngest request is
    preempted: it goes back to the head of the queue, and its KV is later read from disk (`swap`) or computed again. The
    oldest request is never preempted for a younger one, so every request eventually ends.

    Attributes:
        waiting, prefilling, running: A request is in at most one of these. `running` is in the order of admission.
        failed: Failed requests and their errors, until the engine reports them.
        ended: Ended requests whose results are not on disk yet.
    """

    def __init__(self, runner: Runner, max_num_seqs: int, swap: Swap | None = None) -> None:
        super().__init__(runner.order)
        self._runner, self._max_num_seqs, self._swap = runner, max_num_seqs, swap
        self._swapped_out: dict[Request, SwappedSequence] = {}
        self._unswappable: WeakSet[Request] = WeakSet()
        self._arrivals: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self.waiting: deque[Request] = deque()
        self.prefilling: tuple[Request, Prefill] | None = None
        self.running: list[Request] = []
        self.failed: deque[tuple[Request, Exception]] = deque()
        self.ended: deque[Request] = deque()
        self.preemptions = self.restored = 0
        self.stalled = False
        """Whether the only running request is waiting for another engine to free memory while it keeps its own."""
        self._full = False
        self.order.join(self)  # do this last, because other threads may read this scheduler as soon as it has joined

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *(self.prefilling or ())[:1], *self.waiting]

    @property
    def uses_memory(self) -> bool:
        return bool(self.prefilling or self.running)

    @property
    def oldest(self) -> int | None:
        return min((self._arrivals[request] for request in self.requests), default=None)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.uses_memory)

    def add(self, request: Request, *, swaps: bool = True) -> None:
        """Queue a request. For `swaps`, see `Engine.submit`.

        Raises EngineError if an earlier failure has left the pool in an inconsistent state.
        """
        if (broken := self.order.broken) is not None:
            raise broken
        self._arrivals[request] = self.order.arrival()
        self.waiting.append(request)
        if not swaps:
            self._unswappable.add(request)

    def admit(self) -> None:
        """Start the prefill of the next waiting request if there is enough memory and no other prefill is running.

        A request whose KV is restored from disk skips the prefill and runs immediately.
        """
        if self.prefilling is not None or not self.waiting or self._full or not self.may_admit():
            return
        request = self.waiting[0]
        width = sum(r.width for r in self.running)
        if self.running and width + request.width > self._max_num_seqs:
            return
        try:
            swapped_in = self._swap_in(request, width)
            if not swapped_in:
                prefill = request.start(self._runner)
            self._runner.expect(request.sequences[0], request.expected_tokens, forks=request.width - 1)
            if self.running:
                self._runner.retry_after_reclaim(lambda: self._runner.pool.check_spare(width))
        except Exception as error:
            self._handle_start_error(request, error)
            return
        self.waiting.popleft()
        request.metrics.first_scheduled_time = request.metrics.first_scheduled_time or time.time()
        self._discard_swapped(request)
        if swapped_in:
            self.restored += 1
            self.running.append(request)
        else:
            self.prefilling = request, prefill

    def _handle_start_error(self, request: Request, error: Exception) -> None:
        try:
            request.drop(self._runner)
        except Exception as other:
            error = other
        if not isinstance(error, PoolFullError):
            self.fail(request, error)
        elif self.running:
            self._full = True  # until a request leaves the pool; trying again in every step would be slow
        elif not self.wait_for_others():
            self.fail(request, self.add_hint(error))

    def _swap_in(self, request: Request, width: int) -> bool:
        """Restore the KV of a preempted request. Return False if the KV must be computed again.

        Raises PoolFullError if fewer than `width` free blocks would remain, one for each running sequence.
        """
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
        if self._swap is not None and (swapped := self._swapped_out.pop(request, None)) is not None:
            self._swap.discard(swapped)

    def finish_prefill(self) -> list[Request]:
        """Move the request whose prefill is complete to `running`, together with its forks. Return these requests.

        Forks that cannot get memory go to the front of `waiting`.
        """
        assert self.prefilling is not None and self.prefilling[1].done
        request, prefill = self.prefilling
        self.prefilling = None
        started, without_memory = [request], list[Request]()
        for fork in request.take_pending():
            self._arrivals[fork] = self._arrivals[request]
            try:
                fork.fork_from(self._runner, prefill.sequence)
                started.append(fork)
            except PoolFullError:
                without_memory.append(fork)
            except Exception as error:
                self.fail(fork, error)
        self.waiting.extendleft(reversed(without_memory))
        self.running += started
        return started

    def allocate(self) -> None:
        """Reserve slots for the next step, starting with the oldest request.

        If the pool is full, preempt the youngest request.
        """
        self.stalled = False
        for request in list(self.running):
            while request in self.running and not self.stalled:
                try:
                    request.reserve(self._runner)
                    break
                except PoolFullError as error:
                    if self.prefilling is None and self.running == [request]:
                        self.stall(request, error)
                        break
                    self.preempt(self.running[-1] if self.prefilling is None else self.prefilling[0])
                except Exception as error:
                    self.fail(request, error)

    def stall(self, request: Request, error: PoolFullError, *, keep: bool = True) -> None:
        """Let the only started request wait until other engines free memory. If none of them can, fail it with `error`.

        The request keeps its memory if `keep` is True and the pool is reserved for it. Otherwise, it is preempted.
        """
        if not self.wait_for_others():
            self.fail(request, self.add_hint(error))
        elif keep and self.reserves_pool:
            self.stalled = self._full = True
        else:
            self.preempt(request)
            if not self.reserves_pool:
                self.pause_admission()

    def retry_later(self, request: Request, error: PoolFullError) -> None:
        """Preempt a request that ran out of memory during a step."""
        if self.running in ([], [request]):
            self.stall(request, error, keep=False)
        else:
            self.preempt(request)

    def fail(self, request: Request, error: Exception) -> None:
        self.finish(request)
        self.failed.append((request, failure(request, error)))

    def fail_all(self, error: EngineError) -> None:
        for request in self.requests:
            self.fail(request, error)

    def finish(self, request: Request) -> Exception | None:
        """Remove a request from its queue and free its memory. If freeing fails, return the error."""
        failed = None
        try:
            self.remove(request)
            request.finish(self._runner, "abort")
        except Exception as error:
            failed = error
            self._free_again(request)
        self.ended.append(request)  # it stays there until its results are on disk
        self.order.freed(ended=True)
        return failed

    def _free_again(self, request: Request) -> None:
        request.finish_reason = request.finish_reason or "abort"
        # If this fails again, the block counts of the pool may be wrong, so all engines of the pool stop.
        try:
            request.drop(self._runner)
        except Exception as error:
            logger.critical("the KV pool is inconsistent", exc_info=error)
            self.order.broken = broken = EngineError(
                f"the memory of request {request.prompt.id} could not be freed ({type(error).__name__}: {error}), so "
                "the KV pool is inconsistent and all requests fail. Load the model again; the traceback is in the log"
            )
            broken.__cause__ = error

    def preempt(self, request: Request, *, swap: bool = True) -> None:
        """Free the memory of a request and put it at the head of the queue. `swap` allows writing its KV to disk."""
        swapped = self._swap_out(request) if swap else None
        if not self.restart(request):
            if self._swap is not None and swapped is not None:
                self._swap.discard(swapped)  # the request has failed, so its KV will not be restored
            return
        if swapped is not None:
            self._swapped_out[request] = swapped
        self.preemptions += 1
        self._full = bool(self.running)  # the freed memory is for running requests, and this request waits
        self.order.freed(ended=False)

    def _swap_out(self, request: Request) -> SwappedSequence | None:
        if self._swap is None or request in self._unswappable or request not in self.running or request.tokens is None:
            return None
        [sequence] = request.sequences
        try:
            return self._swap.swap_out(sequence, sum(len(one.sequences) for one in self.running))
        except Exception:
            logger.warning("a preempted request could not be written to disk; it is computed again", exc_info=True)
            return None

    def restart(self, request: Request) -> bool:
        """Put a request back at the head of the queue and free its KV. Return False if this memory cannot be freed."""
        try:
            self.remove(request)
            request.drop(self._runner)
        except Exception as error:
            self.fail(request, error)
            return False
        self.waiting.appendleft(request)
        return True

    def remove(self, request: Request) -> None:
        self._full = False
        if self.prefilling is not None and self.prefilling[0] is request:
            self.prefilling = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
        for sequence in request.sequences:
            self._runner.expect(sequence, 0)
        self._discard_swapped(request)

    def check_integrity(self) -> None:
        started = [*self.running, *(self.prefilling or ())[:1]]
        assert len({id(request) for request in self.requests}) == len(self.requests)
        assert all(request.sequences for request in started)
        assert not any(request.sequences for request in self.waiting)
        assert set(self._swapped_out) <= set(self.waiting)


def failure(request: Request, error: Exception) -> OffloadError:
    """Return the error to report for a failed request. Unexpected errors are logged and wrapped in an EngineError."""
    if isinstance(error, OffloadError):
        return error
    logger.error("request %s failed", request.prompt.id, exc_info=error)
    wrapped = EngineError(
        f"request {request.prompt.id} failed with {type(error).__name__}: {error}. Other requests are not affected. "
        "The traceback is in the log"
    )
    wrapped.__cause__ = error
    return wrapped
