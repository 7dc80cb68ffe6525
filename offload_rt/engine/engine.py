"""The engine. `step()` allocates, admits, decodes (or drafts and verifies), prefills and samples.

Requests join and leave between steps.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import islice
from weakref import WeakKeyDictionary

from ..core import Prompt
from ..errors import PoolFullError
from ..model_runner.trace import Recorder
from ..outputs import TokenOutput
from ..sampling_params import SamplingParams
from .beam_search import BeamSearchRequest
from .logits_processors import check_answerable
from .request import Request, SampledRequest, StartAgainError
from .runner import Runner
from .sampler import Answer, best_tokens
from .scheduler import Scheduler, failure
from .speculative.decoder import SpeculativeDecoder
from .swap import Swap

logger = logging.getLogger(__name__)


class Engine:
    """Serves requests on one runner.

    A prefill runs layer by layer between the decode steps of other requests, as many layers per step as
    `max_num_batched_tokens` of the configuration allows. If no other request runs, all layers run in one step. An
    exception in one request ends only this request.

    Args:
        on_prefill: Called as `on_prefill(request, layers_done)` after each layer of a prefill.
        swap: Keeps the KV cache of preempted requests on disk.
        on_failure: Called with a failed request and its error. Without it, `step` raises the error.
        waited_for: Returns whether a client waits for the step to end. Called after each layer of a prefill.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_num_seqs: int,
        on_prefill: Callable[[Request, int], None] = lambda request, layers: None,
        swap: Swap | None = None,
        on_failure: Callable[[Request, Exception], None] | None = None,
        waited_for: Callable[[], bool] = lambda: False,
    ) -> None:
        self.runner = runner
        exact = runner.config.exact
        self._speculative = None if exact is None else SpeculativeDecoder(runner, exact)
        self.scheduler = Scheduler(runner, max_num_seqs, swap)
        self._on_prefill, self._on_failure, self._waited_for = on_prefill, on_failure, waited_for
        self._ids = itertools.count()
        self._suspects = Suspects()

    def next_id(self) -> int:
        """Return a number for a request that the caller creates and passes to `submit`."""
        return next(self._ids)

    def add(
        self, token_ids: Seq[int], params: SamplingParams, recorder: Recorder | None = None, cache_salt: str = ""
    ) -> Request:
        """Queue a prompt of at least one token, and return its request.

        Args:
            recorder: Receives the selections of the first completion's decode steps. Unused for beam search.
            cache_salt: KV is shared only with prompts of the same salt.

        Raises:
            InputError: The model does not support `params`.
            EngineError: The engine has failed for good.
        """
        model = self.runner.model
        check_answerable(params, model)
        prompt = Prompt(self.next_id(), tuple(token_ids), cache_salt)
        request: Request
        if params.num_beams > 1:
            request = BeamSearchRequest(prompt, params, model.tokenizer, model.eos_token_ids)
        else:
            request = SampledRequest(prompt, params, model.tokenizer, model.eos_token_ids, recorder=recorder)
        self.submit(request, swaps=True)
        return request

    def submit(self, request: Request, *, swaps: bool = False) -> None:
        """Queue an existing request, such as a turn of a session.

        Args:
            swaps: Whether its KV cache may be swapped to disk. False if a session owns it.
        """
        with self.runner.pool.lock:  # engines of other threads look at the queue
            self.scheduler.add(request, swaps=swaps)

    @property
    def idle(self) -> bool:
        """Whether there are no requests, and `step` has no failure to report."""
        return self.scheduler.idle and not self.scheduler.failed and not self.scheduler.ended

    def step(self) -> list[TokenOutput]:
        """Compute a new token of every running request, and prefill layers of at most one request.

        Engines of several threads take turns on their pool, step by step. An engine that has no room for any of its
        requests waits a moment. Requests that end are persisted before their last output is returned, without the
        pool's lock, so a slow disk delays only this engine.

        Raises:
            OffloadError: A request has failed, and there is no `on_failure`. It has left the queue, and the next call
                continues with the others. Unexpected exceptions are wrapped in an EngineError.
        """
        scheduler = self.scheduler
        with scheduler.stepping():
            try:
                with self.runner.pool.lock:
                    if (broken := self.runner.order.broken) is not None:
                        scheduler.fail_all(broken)
                    scheduler.allocate()
                    scheduler.admit()
                    self._report_failures()
                    events = self._decode() + self._advance_prefill()
                scheduler.wait()
                return events
            finally:
                scheduler.failed.extend(self._persist())

    def _persist(self) -> list[tuple[Request, Exception]]:
        """Persist the requests that have ended. Return the requests for which this failed, with their errors."""
        ended, lost = self.scheduler.ended, list[tuple[Request, Exception]]()
        while ended:
            try:
                ended[0].persist()  # stays in the queue if this is interrupted
            except Exception as error:
                lost.append((ended[0], failure(ended[0], error)))
            ended.popleft()
        return lost

    def _report_failures(self) -> None:
        while self.scheduler.failed:
            request, error = self.scheduler.failed.popleft()
            if self._on_failure is None:
                raise error
            self._on_failure(request, error)

    def cancel(self, request: Request) -> None:
        """End a request and all its completions that have not ended yet.

        Raises:
            StoreError: The result cannot be written to disk.
            EngineError: Writing the result failed unexpectedly.
        """
        with self.runner.pool.lock:
            for sample in request.samples:
                if sample.finish_reason is None:
                    self._retire(sample)
        for _, error in self._persist():
            raise error

    def _decode(self) -> list[TokenOutput]:
        """Decode all running requests together, or one at a time while any of them is a suspect."""
        running = [] if self.scheduler.stalled else self.scheduler.running
        return [event for group in self._suspects.groups(running) for event in self._decode_group(group)]

    def _decode_group(self, group: list[Request]) -> list[TokenOutput]:
        try:
            steps = self._steps(group)
        except Exception as error:
            self._decode_failed(group, error)
            return []
        events = [event for step in steps for event in self._accept_all(step)]
        for request in group:
            self._suspects.decoded(request)
        return events

    def _steps(self, group: list[Request]) -> list[tuple[Request, Iterable[Answer]]]:
        """Return the logits of each request of `group`: of one token, or of several if drafts are verified.

        The best tokens of all requests are copied together, so that the host waits for the device once.
        """
        if self._speculative is not None:
            speculative = self._speculative
            return [(draft.request, speculative.accepted(draft)) for draft in speculative.round(group)]
        logits = self.runner.decode([sequence for request in group for sequence in request.sequences])
        best, rows = iter(best_tokens(logits)), logits.split([len(request.sequences) for request in group])
        return [(request, [(one, list(islice(best, len(one))))]) for request, one in zip(group, rows, strict=True)]

    def _decode_failed(self, group: list[Request], error: Exception) -> None:
        """Handle an exception of a decode step. If the group has one request, fail it.

        In a larger group the cause is unknown. All its requests start again, and are decoded one by one until they have
        passed this position.
        """
        if len(group) == 1:
            self.scheduler.fail(group[0], error)
            return
        logger.warning("a decode step of %d requests failed: they are decoded alone", len(group), exc_info=error)
        for request in reversed(group):
            self._suspects.add(request)
            # Resident KV and policy state may be a token ahead in some layers, so the sequence is not swapped to disk.
            self.scheduler.preempt(request, swap=False)

    def _advance_prefill(self) -> list[TokenOutput]:
        scheduler, spent = self.scheduler, 0.0
        while scheduler.prefilling is not None:
            request, prefill = scheduler.prefilling
            try:
                self.runner.advance_prefill(prefill)
                following = request.next_prefill(self.runner) if prefill.done else None
                self._on_prefill(request, request.layers_prefilled(prefill))
            except StartAgainError:
                scheduler.restart(request)
                break
            except PoolFullError as error:
                scheduler.retry_later(request, error)
                break
            except Exception as error:
                scheduler.fail(request, error)
                break
            if following is not None:
                scheduler.prefilling = request, following
            elif prefill.done:
                assert prefill.logits is not None
                answer = prefill.logits, best_tokens(prefill.logits)
                return [event for one in scheduler.prefilled() for event in self._accept_all((one, [answer]))]
            spent += prefill.tokens / self.runner.adapter.geometry.layers
            if self._waited_for() or (scheduler.running and spent >= self.runner.config.max_num_batched_tokens):
                break
        return []

    def _accept_all(self, step: tuple[Request, Iterable[Answer]]) -> list[TokenOutput]:
        """Let a request choose a token from each of its logits. Return the outputs, including those before an error."""
        request, each = step
        events: list[TokenOutput] = []
        try:
            for logits, best in each:
                accepted = request.accept(self.runner, logits, best)
                if accepted:
                    request.metrics.record_token()
                if request.finish_reason is not None and (error := self._retire(request)) is not None:
                    self.scheduler.failed.append((request, failure(request, error)))
                    break
                events += accepted
        except PoolFullError as error:  # no room to fork beams: the search starts again later
            self.scheduler.retry_later(request, error)
        except Exception as error:
            self.scheduler.fail(request, error)
        return events

    def _retire(self, request: Request) -> Exception | None:
        """Remove an ended request from the queues. Return the error raised while its memory was freed, or None."""
        request.metrics.finished_time = time.time()
        return self.scheduler.finish(request)

    def check_integrity(self) -> None:
        """Assert that queues, sequences and pool agree."""
        self.scheduler.check_integrity()
        self.runner.check_integrity()


class Suspects:
    """Requests of a failed decode step. Any of them may be the cause.

    Each is decoded in a separate step until it has passed the position of the failure or has failed alone.
    """

    def __init__(self) -> None:
        self._positions: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def add(self, request: Request) -> None:
        """Add a request that still has the sequences of the failed step."""
        self._positions[request] = request.sequences[0].position

    def groups(self, running: Seq[Request]) -> list[list[Request]]:
        """Split the `running` requests into groups to decode together."""
        if any(request in self._positions for request in running):
            return [[request] for request in running]
        return [list(running)] if running else []

    def decoded(self, request: Request) -> None:
        """Clear the suspicion of `request` if it has passed the position at which the step failed."""
        failed_at = self._positions.get(request)
        if failed_at is not None and request.sequences and request.sequences[0].position > failed_at:
            del self._positions[request]
