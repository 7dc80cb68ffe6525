"""Sessions that survive: conversations whose KV cache comes back from host memory or disk (CachedAttention)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from ..config import SamplingParams
from ..engine.engine import Engine
from ..engine.request import TokenOutput
from ..engine.stats import Stats
from ..errors import InputError, ModelError
from .chat_template import turn_tokens
from .history import History
from .session_kv import SessionRows
from .truncate import cut, tokens_after
from .turn import Turn
from .window import SINKS

if TYPE_CHECKING:
    from .store import SessionStore


class Session:
    """One conversation. `send` takes a turn; in between its rows stay in the pool until `close`, or until somebody else
    needs the room: they are on disk too, and come back with the next turn. It is saved at the end of every turn, while
    the caller goes on. Not thread-safe; turns of several sessions are computed together by a `TurnQueue`."""

    def __init__(self, store: SessionStore, history: History) -> None:
        self.store, self.rows = store, SessionRows(store, history)
        self._ids = itertools.count()
        self._closed = False
        self.busy = False

    @property
    def history(self) -> History:
        """What the session is when nothing of it is in memory."""
        return self.rows.history

    @property
    def name(self) -> str:
        """The session's name."""
        return self.history.name

    @property
    def tokens(self) -> list[int]:
        """All tokens of the conversation that have not been cut."""
        return list(self.history.tokens)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """(role, text) of every turn, also of those whose tokens were cut."""
        return list(self.history.turns)

    @property
    def last_stats(self) -> Stats | None:
        """What the last turn cost; None before the first."""
        return self.rows.last_stats

    @property
    def loaded_tokens(self) -> int:
        """Tokens whose rows came from disk the last time they had to."""
        return self.rows.loaded_tokens

    @property
    def store_bytes(self) -> int:
        """Bytes of all files of the store, this session's and the others'."""
        return self.store.disk.bytes_used

    # ----------------------------------------------------------------------------------------------------------- turns

    def send(self, prompt: str | Seq[int], params: SamplingParams | None = None) -> Iterator[TokenOutput]:
        """One turn: events of the answer as it comes. A string goes through the tokenizer's chat template, if it has
        one; token ids are taken as they are. Closing the iterator ends the answer where it stands. What happens where
        the conversation would outgrow the model's positions is the store's `overflow` to say (`StoreOptions`).

        Raises InputError, ModelError and PoolFullError as `LLM.stream`.
        """
        self.check_idle()
        params = params or SamplingParams()
        text, added = self.encode(prompt, params)
        return self._send(text, added, params)

    def encode(self, prompt: str | Seq[int], params: SamplingParams) -> tuple[str, list[int]]:
        """What a turn says, for people, and the tokens it adds. Raises InputError, and ModelError and PoolFullError
        where no answer would fit."""
        if params.n > 1 or params.num_beams > 1:
            raise InputError("a session has one answer to a turn: n and num_beams must be 1")
        added = self._tokens(prompt)
        new = len(added) + params.max_new_tokens
        self._check_overflow(new)
        self.rows.runner.check_fits(tokens_after(self.rows, new) + new)
        return prompt if isinstance(prompt, str) else "", added

    def _check_overflow(self, new: int) -> None:
        """Raises ModelError where `new` more tokens outgrow the model's positions, and nothing may be forgotten."""
        most, held = self.rows.runner.adapter.geometry.max_positions, len(self.history.tokens)
        if self.store.disk.options.overflow == "error" and held + new > most:
            raise ModelError(
                f"session {self.name!r} has {held:,} tokens, {new:,} more (the turn and max_new_tokens) are needed, "
                f"and {self.history.model} has {most:,} positions: call truncate, ask for fewer new ones, or open the "
                "store with overflow='truncate'"
            )

    def _tokens(self, prompt: str | Seq[int]) -> list[int]:
        runner = self.rows.runner
        if isinstance(prompt, str):
            if runner.model.tokenizer is None:
                raise InputError(f"{runner.model.name} has no tokenizer: give token ids, or pass tokenizer=")
            return turn_tokens(runner.model.tokenizer, self.history.turns, self.history.tokens, prompt)
        added, vocab = [int(token) for token in prompt], runner.adapter.geometry.vocab
        if not added or any(not 0 <= token < vocab for token in added):
            raise InputError(f"a turn needs at least one token id, each from 0 to {vocab - 1}")
        return added

    def _send(self, text: str, added: list[int], params: SamplingParams) -> Iterator[TokenOutput]:
        self.check_idle()
        engine = Engine(self.rows.runner, max_batch=1)
        turn = Turn(self.rows, next(self._ids), text, added, params)
        engine.submit(turn)
        self.busy = True
        try:
            while not engine.idle:
                self.store.tiers.look_ahead(())
                yield from engine.step()
        finally:
            try:
                engine.cancel(turn)
            finally:
                self.busy = False

    def prefetch(self) -> None:
        """Begins to bring the session's rows into host memory, as many layers as the read buffer has, before its next
        turn is known. Raises PoolFullError."""
        self.check_idle()
        self.store.tiers.take(self.rows)
        self.store.tiers.retry_after_reclaim(lambda: self.rows.fetch(whole=False))
        self.store.tiers.park(self.rows)

    # ---------------------------------------------------------------------------------------- saving, forks, cuts, end

    def save(self) -> None:
        """Returns when the whole session is on disk. Raises StoreError where it cannot be written."""
        self.check_idle()
        self._save()

    def _save(self) -> None:
        rows = self.rows
        missing = rows.write_out() if rows.sequence is not None and rows.preload is None else []
        rows.save()
        if missing:
            reason = self.store.disk.last_error or "the store is full"
            warnings.warn(
                f"session {self.name!r} is not saved whole ({reason}): what is missing will be computed again",
                stacklevel=3,
            )

    def fork(self, name: str) -> Session:
        """A second session that goes on from here; rows are shared until one of the two writes. Raises InputError where
        the name is taken."""
        self.check_idle()
        if self.store.exists(name):
            raise InputError(f"there is a session {name!r} already: choose another name")
        rows, runner, tiers, forked = self.rows, self.rows.runner, self.store.tiers, None
        if rows.sequence is not None and rows.preload is None:
            sequence, size = rows.sequence, len(self.history.tokens)
            tiers.take(rows)
            try:
                forked = tiers.retry_after_reclaim(lambda: runner.fork(sequence, size))
            finally:
                tiers.park(rows)
        twin = self.store.enter(self.history.fork(name))
        twin.rows.sequence = forked
        twin.rows.save()
        self.store.tiers.park(twin.rows)
        return twin

    def truncate(self, *, keep_last: int | None = None, sinks: int = SINKS, drop: Seq[int] | None = None) -> int:
        """Cuts tokens out, with nothing computed again: all but the first `sinks` and the last `keep_last`, or those
        whose places in `tokens` are in `drop`. What is left keeps its positions, and new tokens' go on growing. Returns
        how many were cut. Raises InputError, ModelError for models that cannot, PoolFullError."""
        self.check_idle()
        self.store.tiers.take(self.rows)
        try:
            gone = cut(self.rows, keep_last=keep_last, sinks=sinks, drop=drop)
        finally:
            self.store.tiers.park(self.rows)
        if gone:
            self.rows.save()
        return gone

    def close(self) -> None:
        """Saves the session and gives its memory back; it can be opened again. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.store.tiers.take(self.rows)
        try:
            self._save()
        finally:
            self._leave()

    def discard(self) -> None:
        """Closes the session without saving it, and deletes what is stored of it; chunks that others may have stay
        until they are evicted. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.store.tiers.take(self.rows)
        self.store.forget(self.history)
        self._leave()

    def _leave(self) -> None:
        self.rows.drop()
        self.rows.unpin()
        self.store.left(self)

    def check_idle(self) -> None:
        """Raises InputError where the session is closed, or takes a turn."""
        if self._closed:
            raise InputError(f"session {self.name!r} is closed: open it again with llm.session")
        if self.busy:
            raise InputError(f"session {self.name!r} is answering: take all events first, or close their iterator")

    def check_integrity(self) -> None:
        """Asserts that history, sequence and tiers agree."""
        self.rows.check_integrity()
        self.store.tiers.check_integrity()
