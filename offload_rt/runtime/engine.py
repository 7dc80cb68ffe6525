"""The engine: `step()` admits, prefills, decodes, samples and commits; requests join and leave between steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from ..config import SamplingParams
from ..core import Request
from .generation import Event, Generation
from .prefill import Prefill
from .runner import Runner
from .scheduler import Scheduler


class Engine:
    """Serves requests on one runner. A prefill runs layer by layer between the decode steps of the others: all its
    layers at once where nothing else runs. `on_prefill(generation, layers done)` is called after each."""

    def __init__(
        self,
        runner: Runner,
        *,
        max_batch: int,
        on_prefill: Callable[[Generation, int], None] = lambda generation, layers: None,
    ) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner, max_batch)
        self._on_prefill = on_prefill
        self._prefill: tuple[Generation, Prefill] | None = None
        self._ids = itertools.count()

    def add(self, prompt: Seq[int], params: SamplingParams) -> Generation:
        """Queues a prompt of at least one token."""
        model = self.runner.model
        request = Request(next(self._ids), tuple(prompt))
        generation = Generation(request, params, model.tokenizer, model.eos_token_ids)
        self.scheduler.add(generation)
        return generation

    @property
    def idle(self) -> bool:
        """Whether nothing waits, prefills or runs."""
        return not (self.scheduler.waiting or self.scheduler.running or self._prefill)

    def step(self) -> list[Event]:
        """One step: a new token for every running generation, and prefill work for at most one. Raises PoolFullError
        for a prompt that can never fit (it has left the queue; the others go on with the next step)."""
        self._schedule()
        return self._decode() + self._advance_prefill()

    def cancel(self, generation: Generation) -> None:
        """Ends a generation where it stands; nothing happens if it has ended."""
        if generation.finish_reason is None:
            self._retire(generation)

    def _schedule(self) -> None:
        if self._prefill is None and (generation := self.scheduler.admit()) is not None:
            assert generation.sequence is not None
            stop = len(generation.request.prompt)
            self._prefill = generation, self.runner.begin_prefill(generation.sequence, stop, want_logits=True)

    def _decode(self) -> list[Event]:
        running = list(self.scheduler.running)
        if not running:
            return []
        logits = self.runner.decode([g.sequence for g in running if g.sequence is not None])
        return [self._accept(generation, row) for generation, row in zip(running, logits, strict=True)]

    def _advance_prefill(self) -> list[Event]:
        while self._prefill is not None:
            generation, prefill = self._prefill
            self.runner.advance_prefill(prefill)
            self._on_prefill(generation, prefill.layer)
            if prefill.done:
                assert prefill.logits is not None
                self._prefill = None
                self.scheduler.running.append(generation)
                return [self._accept(generation, prefill.logits)]
            if self.scheduler.running:
                break
        return []

    def _accept(self, generation: Generation, logits: torch.Tensor) -> Event:
        event = generation.accept(logits)
        if event.finish_reason is not None:
            self._retire(generation)
        return event

    def _retire(self, generation: Generation) -> None:
        if self._prefill is not None and self._prefill[0] is generation:
            self._prefill = None
        self.scheduler.remove(generation)
        generation.finish(self.runner, "cancelled")

    def check_integrity(self) -> None:
        """Asserts that queues, sequences and pool agree."""
        self.scheduler.check_integrity()
        self.runner.check_integrity()
