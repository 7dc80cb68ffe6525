"""Persistent sessions: conversations whose KV cache is kept in host memory and on disk (CachedAttention)."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from ..engine.checks import check_sampling_params
from ..engine.engine import Engine
from ..errors import InputError
from ..outputs import Stats, TokenOutput
from ..sampling_params import SamplingParams
from .chat_template import TurnTokens
from .deletion import Removed
from .history import History
from .host_tier import HostTier
from .names import check_name
from .session_kv import SessionKV
from .truncate import SINKS, truncate
from .turn import Turn, WholeTurn, check_fits, prompt_text, tokens_of_turn

T = TypeVar("T")
P = ParamSpec("P")


# A protocol avoids a circular import.
class SessionRegistry(Protocol):
    """Methods of `SessionStore` that a session calls."""

    def exists(self, name: str) -> bool: ...

    def open_history(self, history: History) -> Session: ...

    def delete_stored(self, name: str) -> Removed: ...

    def session_closed(self, session: Session) -> None: ...


def pool_locked(method: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    @wraps(method)
    def locked(session: Session, /, *args: P.args, **named: P.kwargs) -> T:
        with session.kv.runner.pool.lock:
            return method(session, *args, **named)

    return locked


class Session:
    """A conversation with a persistent KV cache.

    `send` computes one turn. Between turns, the KV stays in host memory until another request needs the memory. The
    next turn loads evicted KV from disk. After every turn, the session is saved in the background.

    Not thread-safe. To compute turns of several sessions in one batch, use a `TurnQueue`.
    """

    def __init__(self, kv: SessionKV, host: HostTier, store: SessionRegistry) -> None:
        self.context, self.kv, self.host = kv.context, kv, host
        self._store = store
        self._answers: weakref.WeakSet[Generator[TokenOutput]] = weakref.WeakSet()
        self._ids = itertools.count()
        self._closed = False
        self.busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "answering" if self.busy else "open"
        turns, tokens = len(self.history.turns) // 2, len(self.history.tokens)
        return f"Session({self.name!r}, {self.history.model!r}, turns={turns}, tokens={tokens}, {state})"

    @property
    def history(self) -> History:
        """Tokens, messages and block keys of the session, as stored on disk."""
        return self.kv.history

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def tokens(self) -> list[int]:
        """Tokens of the conversation, excluding truncated tokens."""
        return list(self.history.tokens)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """(role, text) of every message, including messages that were truncated."""
        return list(self.history.turns)

    @property
    def last_stats(self) -> Stats | None:
        return self.kv.last_stats

    @property
    def loaded_tokens(self) -> int:
        """Number of tokens whose KV was read from disk by the last turn or prefetch."""
        return self.kv.loaded_tokens

    @property
    def store_bytes(self) -> int:
        """Size in bytes of the whole store."""
        return self.context.storage.bytes_used

    # ----------------------------------------------------------------------------------------------------------- turns

    def instruct(self, system: str) -> None:
        """Set the system message.

        Raises InputError if a turn was computed with another system message, or if the model has no chat template.
        """
        history, tokenizer = self.history, self.kv.runner.model.tokenizer
        if not isinstance(system, str):
            raise InputError(f"system={system!r:.80} is {type(system).__name__}; it must be a text")
        if system == history.system:
            return
        if history.tokens:
            told = f"the system message {history.system!r:.80}" if history.system else "no system message"
            raise InputError(f"session {self.name!r} has turns with {told}: open a new session for another one")
        if getattr(tokenizer, "chat_template", None) is None:
            raise InputError(f"{history.model} has no chat template for system={system!r:.40}: put it into a message")
        history.system = system

    def send(
        self,
        prompt: str | Seq[int],
        params: SamplingParams | None = None,
        *,
        on_prefill: Callable[[int], None] = lambda layers: None,
    ) -> Iterator[TokenOutput]:
        """Compute one turn and stream its response.

        If the iterator is closed early, the response ends there, and its tokens are kept.

        Args:
            prompt: The user message, as text or token ids. Text is rendered with the chat template if the model has
                one.
            params: Sampling parameters, or None for the model's defaults.
            on_prefill: Called with the number of finished layers of the prefill.

        Raises:
            InputError, PoolFullError: See `LLM.stream`.
            ModelError: See `LLM.stream`. Also raised if the conversation would exceed the model's positions and
                `StoreOptions.overflow` is "error".
        """
        self.check_idle()
        params = check_sampling_params(params, self.kv.runner.model.sampling)
        events = self._send(prompt, self.encode(prompt, params), params, on_prefill)
        self._answers.add(events)
        return events

    def encode(self, prompt: str | Seq[int], params: SamplingParams) -> TurnTokens:
        """Tokenize a turn and check that it can be computed. For errors, see `tokens_of_turn` and `check_fits`."""
        tokens = tokens_of_turn(self.kv, prompt)
        check_fits(self.kv, tokens, params)
        return tokens

    def _send(
        self, prompt: str | Seq[int], tokens: TurnTokens, params: SamplingParams, on_prefill: Callable[[int], None]
    ) -> Generator[TokenOutput]:
        self.check_idle()
        # another turn ran between the call of `send` and the first output
        if tokens.tokens_before != len(self.history.tokens):
            tokens = self.encode(prompt, params)
        yield from self._run(Turn(self.kv, self.host, next(self._ids), prompt_text(prompt), tokens, params), on_prefill)

    def extend(
        self,
        tokens: Seq[int],
        params: SamplingParams,
        *,
        replaced: int = 0,
        on_prefill: Callable[[int], None] = lambda layers: None,
    ) -> Generator[TokenOutput]:
        """Replace the last `replaced` tokens of the session with `tokens`, and stream up to `max_tokens` new tokens.

        If the iterator is closed early, the session is unchanged. If the process is killed, the session on disk is in
        the state either before or after the call.

        Args:
            tokens: Token ids to append. There must be at least one.
            replaced: Number of tokens to remove from the end first, 0 or 1. The last token of a session has no KV. To
                continue the text without changing it, set `replaced` to 1 and begin `tokens` with that last token.
            on_prefill: Called with the number of finished layers of the prefill.

        Raises:
            InputError, ModelError, PoolFullError: See `send`.
        """
        self.check_idle()
        added = tokens_of_turn(self.kv, tokens).added
        check_fits(self.kv, TurnTokens(len(self.history.tokens), replaced, added), params)
        events = self._extend(added, replaced, params, on_prefill)
        self._answers.add(events)
        return events

    def _extend(
        self, added: tuple[int, ...], replaced: int, params: SamplingParams, on_prefill: Callable[[int], None]
    ) -> Generator[TokenOutput]:
        self.check_idle()
        # Another turn may have run between the call of `extend` and the first output.
        turn = TurnTokens(len(self.history.tokens), replaced, added)
        check_fits(self.kv, turn, params)
        yield from self._run(WholeTurn(self.kv, self.host, next(self._ids), "", turn, params), on_prefill)

    def _run(self, turn: Turn, on_prefill: Callable[[int], None] = lambda layers: None) -> Generator[TokenOutput]:
        engine = Engine(self.kv.runner, max_num_seqs=1, on_prefill=lambda _, layers: on_prefill(layers))
        engine.submit(turn)
        self.busy = True
        try:
            while not engine.idle:
                with self.kv.runner.pool.lock:
                    self.host.look_ahead(())
                yield from engine.step()
        finally:
            try:
                engine.cancel(turn)
            finally:
                self.busy = False

    @pool_locked
    def prefetch(self) -> None:
        """Start loading the session's KV from disk for the next turn.

        Raises PoolFullError if the KV does not fit in the pool.
        """
        self.check_idle()
        with self.host.unparked(self.kv):
            self.host.retry_after_reclaim(lambda: self.kv.fetch(all_layers=False))

    # ----------------------------------------------------------------------------------- saving, forking and truncation

    @pool_locked
    def save(self) -> None:
        """Write the whole session to disk and wait until this is done. Warn if part of the KV cannot be stored.

        Raises StoreError.
        """
        self.check_idle()
        self._save()

    def _save(self) -> None:
        kv = self.kv
        missing = kv.write_out() if kv.sequence is not None and kv.loader is None else []
        kv.save()
        if missing:
            limited = self.context.options.limit is not None
            limit = "the store has reached its limit" if limited else "not written"
            reason = self.context.storage.last_error or limit
            warnings.warn(
                f"session {self.name!r} is not saved completely ({reason}): the missing KV will be computed again",
                stacklevel=3,
            )

    @pool_locked
    def fork(self, name: str) -> Session:
        """Return a new session called `name` with the same history. The two sessions share KV until it changes.

        Raises InputError if a turn of the session is running, or if the name is invalid or in use. Raises StoreError if
        the new session cannot be saved. It then does not exist.
        """
        self.check_idle()
        check_name(name)
        if self._store.exists(name):
            raise InputError(f"there is a session {name!r} already: choose another name")
        kv, runner, host, forked = self.kv, self.kv.runner, self.host, None
        if kv.sequence is not None and kv.loader is None and runner.continues(kv.sequence):
            sequence, size = kv.sequence, len(self.history.tokens)
            with host.unparked(kv):
                forked = host.retry_after_reclaim(lambda: runner.fork(sequence, size))
        if runner.states is not None:
            self.context.saver.flush()  # The fork finds snapshots of recurrent state only on disk.
        twin = self._store.open_history(self.history.fork(name))
        twin.kv.sequence = forked
        try:
            twin.kv.save()
        except BaseException:
            with twin._closing():  # free its memory and its name
                pass
            raise
        self.host.park(twin.kv)
        return twin

    @pool_locked
    def truncate(self, *, keep_last: int | None = None, sinks: int = SINKS, drop: Seq[int] | None = None) -> int:
        """Remove tokens from the conversation without recomputing the KV of the remaining tokens.

        The remaining tokens keep their positions, and new tokens continue after the last position. Set either
        `keep_last` or `drop`.

        Args:
            keep_last: Number of tokens to keep at the end, in addition to the first `sinks` tokens.
            sinks: Number of tokens to keep at the start.
            drop: Tokens to remove, as indices into `tokens`.

        Returns:
            The number of removed tokens.

        Raises:
            InputError: A turn of the session is running, or the arguments are invalid.
            ModelError: The model does not support truncation.
            PoolFullError: The KV does not fit in the pool.
        """
        self.check_idle()
        with self.host.unparked(self.kv):
            gone = truncate(self.kv, self.host, keep_last=keep_last, sinks=sinks, drop=drop)
        if gone:
            self.kv.save()
        return gone

    @pool_locked
    def undo(self) -> str:
        """Remove the last turn and return its user message. The KV of earlier turns is kept.

        If the turn truncated tokens, these are not restored. If a turn has replaced earlier tokens, neither this turn
        nor any earlier turn can be removed.

        Raises:
            InputError: A turn of the session is running, or the last turn cannot be removed.
            StoreError: The session cannot be saved. The turn is removed nevertheless.
        """
        self.check_idle()
        history = self.history
        if not history.starts:
            raise InputError(f"session {self.name!r} has no turn that can be undone")
        with self.host.unparked(self.kv):
            self.kv.drop()
            text = history.undo()
        self.kv.save()
        return text

    @pool_locked
    def close(self) -> None:
        """Save the session and free its memory. If a response is being streamed, it ends. A second call has no effect.

        Raises:
            InputError: A queue is computing a turn of the session.
            StoreError: The session cannot be saved.
        """
        if self._closed:
            return
        with self._closing():
            self._save()

    @pool_locked
    def discard(self) -> Removed:
        """Close the session and delete it from the store. If a response is being streamed, it ends.

        Blocks that other sessions or requests use are kept. If the session is already closed, nothing is deleted. Warns
        if files of other sessions cannot be read.

        Raises:
            InputError: A queue is computing a turn of the session.
            StoreError: A file cannot be deleted.
        """
        if self._closed:
            return Removed()
        with self._closing():
            self.kv.discard()
            return self._store.delete_stored(self.name)

    @contextmanager
    def _closing(self) -> Iterator[None]:
        for events in list(self._answers):
            events.close()
        self.check_idle()
        self._closed = True
        self.host.unpark(self.kv)
        try:
            yield
        finally:
            self.kv.drop()
            self.kv.blocks.unpin_all()
            self._store.session_closed(self)

    def check_idle(self) -> None:
        """Raise InputError if the session is closed or is computing a turn."""
        if self._closed:
            raise InputError(f"session {self.name!r} is closed: open it again with llm.session")
        if self.busy:
            raise InputError(f"session {self.name!r} is answering: read the response to its end, or close its iterator")

    def check_integrity(self) -> None:
        self.kv.check_integrity()
        self.host.check_integrity()
