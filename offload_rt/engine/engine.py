"""The engine. Each call of `step()` advances all running requests by one step.

A step reserves memory, decodes one token per sequence (or drafts and verifies several), admits a waiting request, and
prefills some of its layers. Requests join and leave between steps.
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
from ..utils.progress import Progress
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

    A prefill runs layer by layer between decode steps. While other requests run, `max_num_batched_tokens` limits the
    number of layers per step. An exception in one request ends only this request.

    Args:
        max_num_seqs: Maximum number of sequences that are decoded together.
        on_prefill: Called as `on_prefill(request, layers_done)` after each layer of a prefill.
        swap: Writes the KV of preempted requests to disk. If None, this KV is computed again.
        on_failure: Called with a failed request and its error. If None, `step` raises the error.
        waited_for: Called after each layer of a prefill. Returns whether a client is waiting for the step to end.
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
        """Return a new id for a request that is created outside the engine."""
        return next(self._ids)

    def add(
        self, token_ids: Seq[int], params: SamplingParams, recorder: Recorder | None = None, cache_salt: str = ""
    ) -> Request:
        """Queue a prompt of at least one token, and return its request.

        Args:
            recorder: Receives the tokens that each layer selects for the first completion. Not used with beam search.
            cache_salt: See `LLM.generate`.

        Raises:
            InputError: The model does not support `params`.
            EngineError: The engine has failed and cannot continue.
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
        """Queue a request that was created outside the engine, such as a turn of a session.

        `swaps` tells whether the request's KV may be swapped to disk. It is False if a session owns the KV.
        """
        with self.runner.pool.lock:  # engines on other threads read the queue
            self.scheduler.add(request, swaps=swaps)

    def run_all(
        self, prompts: Seq[list[int]], params: Seq[SamplingParams], cache_salt: str, progress: Progress
    ) -> list[Request]:
        """Run one request per prompt until all of them have ended. Return the requests in the order of the prompts.

        Raises:
            InputError, ModelError, PoolFullError: One request failed, and all others were cancelled.
        """
        each = list(zip(prompts, params, strict=True))
        for prompt, one in each:
            self.runner.cache_manager.check(len(prompt), len(prompt) + one.max_tokens)
        requests = [self.add(prompt, one, cache_salt=cache_salt) for prompt, one in each]
        try:
            with progress.items("generate", sum(one.n for one in params)) as on_done:
                while not self.idle:
                    for event in self.step():
                        if event.finish_reason is not None:
                            on_done()
        finally:
            for request in requests:
                self.cancel(request)
        return requests

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self.scheduler.failed and not self.scheduler.ended

    def step(self) -> list[TokenOutput]:
        """Run one decode step for all running requests, and prefill some layers of at most one request.

        If no request of this engine can get memory from the pool, the call waits briefly for other engines. The results
        of ended requests are written to disk before their last output is returned.

        Returns:
            The new output tokens of all requests.

        Raises:
            OffloadError: A request has failed and there is no `on_failure`. The next call continues with the remaining
                requests. Unexpected exceptions are wrapped in an EngineError.
        """
        scheduler = self.scheduler
        with scheduler.stepping():
            try:
                with self.runner.pool.lock:  # engines on other threads may share the pool
                    if (broken := self.runner.order.broken) is not None:
                        scheduler.fail_all(broken)
                    scheduler.allocate()
                    scheduler.admit()
                    self._report_failures()
                    events = self._decode() + self._advance_prefill()
                scheduler.wait()
                return events
            finally:
                # Do this without the lock, so that a slow disk delays only this engine.
                scheduler.failed.extend(self._persist())

    def _persist(self) -> list[tuple[Request, Exception]]:
        ended, lost = self.scheduler.ended, list[tuple[Request, Exception]]()
        while ended:
            try:
                ended[0].persist()  # if this is interrupted, the request stays in the queue
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
        """End a request and all its completions. Raises StoreError or EngineError if its results cannot be written."""
        with self.runner.pool.lock:
            for sample in request.samples:
                if sample.finish_reason is None:
                    self._retire(sample)
        for _, error in self._persist():
            raise error

    def _decode(self) -> list[TokenOutput]:
        running = [] if self.scheduler.stalled else self.scheduler.running
        return [event for group in self._suspects.groups(running) for event in self._decode_group(group)]

    def _decode_group(self, group: list[Request]) -> list[TokenOutput]:
        try:
            steps = self._compute_logits(group)
        except Exception as error:
            self._decode_failed(group, error)
            return []
        events = [event for step in steps for event in self._accept_all(step)]
        self._end_round(group)
        for request in group:
            self._suspects.decoded(request)
        return events

    def _end_round(self, group: list[Request]) -> None:
        if self._speculative is not None:
            try:
                self._speculative.end_round()
            except Exception as error:
                self._decode_failed(group, error, self._speculative.rejected)

    def _compute_logits(self, group: list[Request]) -> list[tuple[Request, Iterable[Answer]]]:
        if self._speculative is not None:
            speculative = self._speculative
            return [(draft.request, speculative.accepted(draft)) for draft in speculative.round(group)]
        logits = self.runner.decode([sequence for request in group for sequence in request.sequences])
        # One copy for all requests, so that the host waits for the device only once.
        best, rows = iter(best_tokens(logits)), logits.split([len(request.sequences) for request in group])
        return [(request, [(one, list(islice(best, len(one))))]) for request, one in zip(group, rows, strict=True)]

    def _decode_failed(self, group: list[Request], error: Exception, lost: list[Request] | None = None) -> None:
        """Handle an exception in a decode step of `group`.

        If the group has only one request, this request fails. Otherwise, each request may be the cause. The requests in
        `lost`, whose state is incomplete, start again and are decoded alone (see `Suspects`). None means the whole
        group.
        """
        if len(group) == 1:
            self.scheduler.fail(group[0], error)
            return
        lost = group if lost is None else lost
        logger.warning(
            "a decode step of %d requests failed; %d are decoded alone", len(group), len(lost), exc_info=error
        )
        for request in reversed(lost):
            self._suspects.add(request)
            # In some layers, resident KV and policy state may already include the next token. A sequence in this state
            # cannot be swapped to disk.
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
                return [event for one in scheduler.finish_prefill() for event in self._accept_all((one, [answer]))]
            spent += prefill.tokens / prefill.layers
            if self._waited_for() or (scheduler.running and spent >= self.runner.config.max_num_batched_tokens):
                break
        return []

    def _accept_all(self, step: tuple[Request, Iterable[Answer]]) -> list[TokenOutput]:
        """Let a request sample tokens from its logits. Return the outputs that precede the first error."""
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
        except PoolFullError as error:  # no memory for forking beams, so the beam search starts again later
            self.scheduler.retry_later(request, error)
        except Exception as error:
            self.scheduler.fail(request, error)
        return events

    def _retire(self, request: Request) -> Exception | None:
        request.metrics.finished_time = time.time()
        return self.scheduler.finish(request)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        self.runner.check_integrity()


class Suspects:
    """Requests that took part in a failed decode step.

    Each is decoded alone until it has passed the position of the failure.
    """

    def __init__(self) -> None:
        self._positions: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    def add(self, request: Request) -> None:
        """Add a request with its current position. Call this before its sequences are freed."""
        self._positions[request] = request.sequences[0].position

    def groups(self, running: Seq[Request]) -> list[list[Request]]:
        """Split `running` into groups that are decoded together.

        If any request is a suspect, every request is its own group.
        """
        if any(request in self._positions for request in running):
            return [[request] for request in running]
        return [list(running)] if running else []

    def decoded(self, request: Request) -> None:
        failed_at = self._positions.get(request)
        if failed_at is not None and request.sequences and request.sequences[0].position > failed_at:
            del self._positions[request]
