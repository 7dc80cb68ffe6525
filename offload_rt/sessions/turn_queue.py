"""Compute turns of many sessions in one batch, and prefetch the sessions of waiting turns (CachedAttention §3.3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ..engine.checks import check_sampling_params
from ..engine.engine import Engine
from ..errors import InputError, OffloadError
from ..outputs import FinishReason, Stats, TokenOutput
from ..sampling_params import SamplingParams
from .host_tier import TierStats
from .session import Session
from .session_kv import SessionKV
from .store import SessionStore
from .turn import Turn, prompt_text


class QueuedTurn:
    """A waiting, running or finished turn of a `TurnQueue`. Its outputs have `number` as their `request_id`."""

    def __init__(self, number: int, session: Session, prompt: str | Sequence[int], params: SamplingParams) -> None:
        self.number, self.session, self.prompt, self.params = number, session, prompt, params
        self.turn: Turn | None = None
        self._cancelled = False

    @property
    def finish_reason(self) -> FinishReason | None:
        if self._cancelled:
            return "abort"
        return None if self.turn is None else self.turn.finish_reason

    @property
    def text(self) -> str:
        return "" if self.turn is None else self.turn.text

    @property
    def token_ids(self) -> list[int]:
        return [] if self.turn is None else list(self.turn.new_tokens)

    def cancel(self) -> None:
        self._cancelled = True


class TurnQueue:
    """Queue of session turns, served first come, first served. Not thread-safe.

    Turns of different sessions are decoded in one batch. Turns of the same session run one after another. Before every
    step, the KV of the next sessions in the queue is protected from eviction and loaded from disk.
    """

    def __init__(self, store: SessionStore, max_num_seqs: int) -> None:
        self.store = store
        self._engine = Engine(store.context.runner, max_num_seqs=max_num_seqs)
        self._backlog: list[QueuedTurn] = []
        self._running: list[QueuedTurn] = []
        self._opened: dict[str, Session] = {}
        self._ids = itertools.count()
        store.add_user(self)

    @property
    def idle(self) -> bool:
        return not self._backlog and self._engine.idle

    @property
    def stats(self) -> TierStats:
        return self.store.host.stats

    @property
    def last_stats(self) -> dict[str, Stats | None]:
        return {name: session.last_stats for name, session in self._opened.items()}

    def add(self, name: str, prompt: str | Sequence[int], params: SamplingParams | None = None) -> QueuedTurn:
        """Queue a turn of the session `name`. If the session is not open, open or create it.

        If the turn cannot be computed, it fails when it starts, and `step` raises InputError, ModelError or
        PoolFullError. If `params` is None, the model's defaults are used.

        Raises:
            InputError: An argument is invalid, or the session is computing a turn outside this queue.
            StoreError: The stored session cannot be opened.
        """
        params = check_sampling_params(params, self.store.context.runner.model.sampling)
        session = self.store.session(name)
        if session.busy and not any(one.session is session for one in [*self._backlog, *self._running]):
            raise InputError(f"session {name!r} is answering elsewhere: read the response to its end first")
        self._opened[name] = session
        queued = QueuedTurn(next(self._ids), session, prompt, params)
        self._backlog.append(queued)
        return queued

    def step(self) -> list[TokenOutput]:
        """Compute one step for all running turns.

        If a turn fails, it is removed and its error is raised (see `Engine.step`). The next call continues with the
        remaining turns.
        """
        try:
            with self.store.context.runner.pool.lock:
                self._submit_waiting()
                self.store.host.look_ahead(self._waiting())
            return self._engine.step()
        except OffloadError:
            self._cancel_lost()
            raise
        except BaseException:  # a step was interrupted, so the running turns must end
            self.cancel()
            raise
        finally:
            self._release_finished()

    def run(self) -> Iterator[TokenOutput]:
        """Yield the outputs of all turns until the queue is empty. Turns may be added during the iteration."""
        while not self.idle:
            yield from self.step()

    def cancel(self) -> None:
        for queued in self._backlog:
            queued.cancel()
        self._backlog.clear()
        for queued in self._running:
            assert queued.turn is not None
            self._engine.cancel(queued.turn)
        self._release_finished()

    def close(self) -> None:
        """End all turns, then save and close the sessions. A second call has no effect.

        If a session cannot be saved, all others are still closed before StoreError is raised.
        """
        with ExitStack() as ends:
            ends.callback(self.store.remove_user, self)
            ends.callback(self._opened.clear)
            for session in self._opened.values():
                ends.callback(session.close)
            ends.callback(self.cancel)

    def _submit_waiting(self) -> None:
        for queued in list(self._backlog):
            session = queued.session
            if session.busy:
                continue
            self._backlog.remove(queued)
            try:
                session.check_idle()  # it may have been closed or deleted since `add`
                tokens = session.encode(queued.prompt, queued.params)
            except BaseException:  # the turn is no longer in any list, so end it here
                queued.cancel()
                raise
            queued.turn = Turn(
                session.kv, session.host, queued.number, prompt_text(queued.prompt), tokens, queued.params
            )
            session.busy = True
            self._running.append(queued)
            self._engine.submit(queued.turn)

    def _cancel_lost(self) -> None:
        scheduler = self._engine.scheduler
        known = [*scheduler.waiting, *scheduler.running, *(scheduler.prefilling or ())[:1]]
        for queued in self._running:
            if queued.turn not in known and queued.turn is not None:
                self._engine.cancel(queued.turn)

    def _release_finished(self) -> None:
        for queued in list(self._running):
            if queued.finish_reason is not None:
                queued.session.busy = False
                self._running.remove(queued)

    def _waiting(self) -> list[SessionKV]:
        turns = {id(queued.turn): queued.session.kv for queued in self._running}
        begun = (turns[id(request)] for request in self._engine.scheduler.waiting)
        queued = (queued.session.kv for queued in self._backlog if not queued.session.busy)
        return list(dict.fromkeys([*begun, *queued]))

    def check_integrity(self) -> None:
        self._engine.check_integrity()
        self.store.host.check_integrity()
        for session in self._opened.values():
            if not session.busy:
                session.check_integrity()
