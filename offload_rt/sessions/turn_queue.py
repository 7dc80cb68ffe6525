"""Turns of many sessions, computed together; the queue tells the store what will be needed (CachedAttention §3.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ..engine.arguments import sampling
from ..engine.engine import Engine
from ..errors import InputError, OffloadError
from ..outputs import FinishReason, Stats, TokenOutput
from ..sampling_params import SamplingParams
from .host_tier import TierStats
from .session import Session
from .session_kv import SessionKV
from .store import SessionStore
from .turn import Turn, said


class QueuedTurn:
    """A turn that waits, is computed, or is done. `number` is the `request_id` of its events."""

    def __init__(self, number: int, session: Session, prompt: str | Sequence[int], params: SamplingParams) -> None:
        self.number, self.session, self.prompt, self.params = number, session, prompt, params
        self.turn: Turn | None = None
        self._cancelled = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it waits or runs."""
        if self._cancelled:
            return "abort"
        return None if self.turn is None else self.turn.finish_reason

    @property
    def text(self) -> str:
        """The answer so far."""
        return "" if self.turn is None else self.turn.text

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens so far."""
        return [] if self.turn is None else list(self.turn.new_tokens)

    def cancel(self) -> None:
        """Marks one that never began."""
        self._cancelled = True


class TurnQueue:
    """First come, first served; turns of different sessions are decoded in one batch, those of one session follow each
    other. Before every step the store hears whose turns are waiting: what they need is not evicted, and comes from disk
    to host memory before they begin. Not thread-safe."""

    def __init__(self, store: SessionStore, max_num_seqs: int) -> None:
        self.store = store
        self._engine = Engine(store.context.runner, max_num_seqs=max_num_seqs)
        self._backlog: list[QueuedTurn] = []
        self._running: list[QueuedTurn] = []
        self._opened: dict[str, Session] = {}
        self._ids = itertools.count()
        store.hold(self)

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._backlog and self._engine.idle

    @property
    def stats(self) -> TierStats:
        """What the tiers did for the store's turns so far."""
        return self.store.host.stats

    @property
    def last_stats(self) -> dict[str, Stats | None]:
        """What each session's last turn cost."""
        return {name: session.last_stats for name, session in self._opened.items()}

    def add(self, name: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> QueuedTurn:
        """Queues a turn of the session `name`, which is opened, or begun, if it is not open. What cannot be answered at
        all raises when the turn begins: `step` then raises InputError, ModelError or PoolFullError."""
        params = sampling(params, self.store.context.runner.model.sampling)
        session = self.store.session(name)
        if session.busy and not any(one.session is session for one in [*self._backlog, *self._running]):
            raise InputError(f"session {name!r} is answering elsewhere: take all events first")
        self._opened[name] = session
        queued = QueuedTurn(next(self._ids), session, prompt, params)
        self._backlog.append(queued)
        return queued

    def step(self) -> list[TokenOutput]:
        """One step of all that run. Raises as `Engine.step`, for one turn, which has left the queue then; the others go
        on with the next step."""
        try:
            with self.store.context.runner.pool.lock:
                self._feed()
                self.store.host.look_ahead(self._waiting())
            return self._engine.step()
        except OffloadError:
            self._end_lost()
            raise
        except BaseException:  # interrupted within a step: what was being computed is interrupted, and ends
            self.cancel()
            raise
        finally:
            self._settle()

    def run(self) -> Iterator[TokenOutput]:
        """Events of all turns as they come, until the queue is empty; it may be added to meanwhile."""
        while not self.idle:
            yield from self.step()

    def cancel(self) -> None:
        """Ends all turns where they stand; those that have not begun never do."""
        for queued in self._backlog:
            queued.cancel()
        self._backlog.clear()
        for queued in self._running:
            assert queued.turn is not None
            self._engine.cancel(queued.turn)
        self._settle()

    def close(self) -> None:
        """Ends all turns, and saves and closes the sessions. A second call does nothing. Raises StoreError where one
        cannot be saved; all others are."""
        with ExitStack() as ends:
            ends.callback(self.store.release, self)
            ends.callback(self._opened.clear)
            for session in self._opened.values():
                ends.callback(session.close)
            ends.callback(self.cancel)

    def _feed(self) -> None:
        """Hands turns to the engine whose sessions are idle, in order."""
        for queued in list(self._backlog):
            session = queued.session
            if session.busy:
                continue
            self._backlog.remove(queued)
            try:
                tokens = session.encode(queued.prompt, queued.params)
            except OffloadError:
                queued.cancel()
                raise
            queued.turn = Turn(session.kv, session.host, queued.number, said(queued.prompt), tokens, queued.params)
            session.busy = True
            self._running.append(queued)
            self._engine.submit(queued.turn)

    def _end_lost(self) -> None:
        """A turn that could not begin has left the engine's queue: its session is free again."""
        scheduler = self._engine.scheduler
        known = [*scheduler.waiting, *scheduler.running, *(scheduler.prefilling or ())[:1]]
        for queued in self._running:
            if queued.turn not in known and queued.turn is not None:
                self._engine.cancel(queued.turn)

    def _settle(self) -> None:
        """Sessions whose turn has ended may take the next one."""
        for queued in list(self._running):
            if queued.finish_reason is not None:
                queued.session.busy = False
                self._running.remove(queued)

    def _waiting(self) -> list[SessionKV]:
        """Sessions whose turns wait, soonest first, each once."""
        turns = {id(queued.turn): queued.session.kv for queued in self._running}
        begun = (turns[id(request)] for request in self._engine.scheduler.waiting)
        behind = (queued.session.kv for queued in self._backlog if not queued.session.busy)
        return list(dict.fromkeys([*begun, *behind]))

    def check_integrity(self) -> None:
        """Asserts that queue, engine, sessions and tiers agree."""
        self._engine.check_integrity()
        self.store.host.check_integrity()
        for session in self._opened.values():
            if not session.busy:
                session.check_integrity()
