"""The engine: `step()` allocates, admits, decodes (or drafts and verifies), prefills and samples; requests join and
leave between steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from ..core import Prompt
from ..errors import DiskError, PoolFullError, StoreError
from ..forward.trace import Recorder
from ..outputs import TokenOutput
from ..sampling_params import SamplingParams
from .beam_search import BeamSearchRequest
from .constraints import check_answerable
from .drafting import Draft, Drafting
from .request import Request, SampledRequest, StartAgainError
from .runner import Runner
from .scheduler import Scheduler
from .swap import Swap


class Engine:
    """Serves requests on one runner. A prefill runs layer by layer between the decode steps of the others, as many
    layers a step as the config's `prefill_tokens` pay for: all at once where nothing else runs.
    `on_prefill(request, layers done)` is called after each; `swap` may keep what is preempted; `on_failure` is called
    for a request that cannot go on, where `step` raises its error without one; `waited_for()` says after a layer of a
    prefill whether somebody waits for the step to end, which it then does."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int,
        on_prefill: Callable[[Request, int], None] = lambda request, layers: None,
        swap: Swap | None = None,
        on_failure: Callable[[Request, Exception], None] | None = None,
        waited_for: Callable[[], bool] = lambda: False,
    ) -> None:
        self.runner = runner
        exact = runner.config.exact
        self._drafting = None if exact is None else Drafting(runner, exact)
        self.scheduler = Scheduler(runner, max_batch, swap)
        self._on_prefill, self._on_failure, self._waited_for = on_prefill, on_failure, waited_for
        self._ids = itertools.count()

    def next_id(self) -> int:
        """A number for a request that somebody else makes."""
        return next(self._ids)

    def add(
        self, token_ids: Seq[int], params: SamplingParams, recorder: Recorder | None = None, cache_salt: str = ""
    ) -> Request:
        """Queues a prompt of at least one token, and returns the request that answers it. `recorder` is told what the
        decode steps of its first completion select; nothing of a beam search. Raises InputError where the model has not
        what `params` name."""
        model = self.runner.model
        check_answerable(params, model)
        prompt = Prompt(self.next_id(), tuple(token_ids), cache_salt)
        request: Request
        if params.num_beams > 1:
            request = BeamSearchRequest(prompt, params, model.tokenizer, model.eos_token_ids)
        else:
            request = SampledRequest(prompt, params, model.tokenizer, model.eos_token_ids, recorder=recorder)
        self.scheduler.add(request)
        return request

    def submit(self, request: Request) -> None:
        """Queues a request that somebody else made, such as a turn of a session, whose rows are the session's."""
        self.scheduler.add(request, swaps=False)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, prefills or runs, and nothing has failed that `step` has not said."""
        return self.scheduler.idle and not self.scheduler.failed and not self.scheduler.ended

    def step(self) -> list[TokenOutput]:
        """One step: a new token for everything that runs, and prefill work for at most one request. Raises the error
        of one that has failed (PoolFullError where it can never fit), before anything else happens: it has left the
        queue, and the others go on with the next step. Engines of several threads take turns on their pool, step by
        step; one that has no room for anything waits a moment.

        What ends is durable (`Request.persist`) before its last output is returned, and is written while others may use
        the pool: a disk that blocks holds up this engine alone. Nobody else touches what is written meanwhile: the
        request has ended, and whoever owns it is told only afterwards. Where it cannot be written, the outputs are
        returned all the same, and the next step raises."""
        try:
            with self.runner.pool.lock:
                self.scheduler.allocate()
                self.scheduler.admit()
                self._report_failures()
                events = self._decode() + self._advance_prefill()
                self.scheduler.neighbour.stepped()
            self.scheduler.neighbour.wait()
            return events
        finally:
            self.scheduler.failed.extend(self._persist())

    def _persist(self) -> list[tuple[Request, Exception]]:
        """Makes durable what has ended. Returns what could not be, and why."""
        ended, lost = self.scheduler.ended, list[tuple[Request, Exception]]()
        while ended:
            try:
                ended[0].persist()  # and stays there where this is interrupted
            except StoreError as error:
                lost.append((ended[0], error))
            ended.popleft()
        return lost

    def _report_failures(self) -> None:
        while self.scheduler.failed:
            request, error = self.scheduler.failed.popleft()
            if self._on_failure is None:
                raise error
            self._on_failure(request, error)

    def cancel(self, request: Request) -> None:
        """Ends a request with all its completions where they stand; nothing happens to those that have ended. Raises
        StoreError where what ended cannot be written."""
        with self.runner.pool.lock:
            for sample in request.samples:
                if sample.finish_reason is None:
                    self._retire(sample)
        for _, error in self._persist():
            raise error

    def _decode(self) -> list[TokenOutput]:
        running = list(self.scheduler.running)
        if not running:
            return []
        widths = [len(request.sequences) for request in running]
        try:
            if self._drafting is not None:
                drafts = self._drafting.round(running)
                return [event for draft in drafts for event in self._accept_draft(draft)]
            logits = self.runner.decode([s for request in running for s in request.sequences])
        except DiskError as error:  # what one of them needs cannot be read, and none has a whole step
            for request in running:
                self.scheduler.fail(request, error)
            return []
        pairs = zip(running, logits.split(widths), strict=True)
        return [event for request, rows in pairs for event in self._accept(request, rows)]

    def _accept_draft(self, draft: Draft) -> list[TokenOutput]:
        """Tokens as far as drafts were right, and one more."""
        assert self._drafting is not None
        events: list[TokenOutput] = []
        try:
            for logits in self._drafting.accepted(draft):
                events += self._accept(draft.request, logits)
        except DiskError as error:  # behind a wrong draft its window is read again
            self.scheduler.fail(draft.request, error)
        return events

    def _advance_prefill(self) -> list[TokenOutput]:
        scheduler, spent = self.scheduler, 0.0
        while scheduler.prefilling is not None:
            request, prefill = scheduler.prefilling
            try:
                self.runner.advance_prefill(prefill)
            except StartAgainError:
                scheduler.restart(request)
                break
            except DiskError as error:
                scheduler.fail(request, error)
                break
            self._on_prefill(request, prefill.layer)
            if prefill.done:
                assert prefill.logits is not None
                logits = prefill.logits
                return [event for one in scheduler.prefilled() for event in self._accept(one, logits)]
            spent += prefill.tokens / self.runner.adapter.geometry.layers
            if self._waited_for() or (scheduler.running and spent >= self.runner.config.prefill_tokens):
                break
        return []

    def _accept(self, request: Request, logits: torch.Tensor) -> list[TokenOutput]:
        try:
            events = request.accept(self.runner, logits)
        except PoolFullError as error:  # beams that fork; they start again when there is room
            if self.scheduler.running == [request]:
                self.scheduler.stop(request, error)
            else:
                self.scheduler.preempt(request)
            return []
        except Exception as error:  # of a processor that a caller brought, or where nothing may be chosen
            self.scheduler.fail(request, error)
            return []
        if events:
            request.times.token()
        if request.finish_reason is not None:
            self._retire(request)
        return events

    def _retire(self, request: Request) -> None:
        self.scheduler.remove(request)
        request.times.ended()
        self.scheduler.finish(request)

    def check_integrity(self) -> None:
        """Asserts that queues, sequences and pool agree."""
        self.scheduler.check_integrity()
        self.runner.check_integrity()
