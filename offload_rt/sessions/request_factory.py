"""Create requests that reuse the KV of earlier requests in a session store."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace

from ..engine.async_clients import EngineLoad
from ..engine.cache_manager import salt_provenance
from ..engine.checks import check_token_ids
from ..engine.logits_processors import check_answerable
from ..errors import SessionBusyError
from ..model_runner.trace import Recorder
from ..sampling_params import SamplingParams
from .chat_template import tokens_of_prompt
from .host_tier import TierStats
from .session import Session
from .store import SessionStore
from .stored_prompt import StoredPrompt
from .turn import Turn, check_turn

logger = logging.getLogger(__name__)

MOST_OPEN = 256
"""Maximum number of sessions that stay open between turns.

If there are more, the least recently used are saved and closed.
"""


class StoredRequestFactory:
    """Creates requests for an engine that has a session store. Not thread-safe.

    `call_soon` schedules a function on the engine's thread and is itself thread-safe.
    """

    def __init__(self, store: SessionStore, call_soon: Callable[[Callable[[], None]], None]) -> None:
        self.store, self._call_soon = store, call_soon
        self._ending: set[StoredPrompt] = set()
        self._opened: OrderedDict[str, Session] = OrderedDict()
        store.add_user(self)

    @property
    def stats(self) -> TierStats:
        return self.store.host.stats

    def add_load(self, load: EngineLoad) -> EngineLoad:
        return replace(
            load,
            host_hit_tokens=load.host_hit_tokens + self.stats.host_tokens,
            disk_hit_tokens=self.stats.disk_tokens,
            lost_tokens=self.stats.computed_tokens,
            store_bytes=self.store.context.storage.bytes_used,
        )

    def stores_prompt(self, params: SamplingParams) -> bool:
        """Return whether the store keeps the KV of a request without a session name.

        It does not if prefixes are not shared, if weights have changed, or if the request uses beam search or needs
        prompt log-probabilities.
        """
        runner = self.store.context.runner
        usual = params.num_beams == 1 and params.prompt_logprobs is None
        return usual and runner.cache_manager.shares and not runner.model.weights_provenance()

    def prompt(
        self, number: int, prompt: Seq[int], params: SamplingParams, recorder: Recorder | None, cache_salt: str
    ) -> StoredPrompt:
        """Create a request without a session name. For the arguments, see `turn`.

        When the request ends, the caller must call `prompt_ended`. Raises InputError for an invalid token id or
        parameter.
        """
        context = self.store.context
        check_answerable(params, context.runner.model)
        check_token_ids(prompt, context.runner.model)
        return StoredPrompt(context, self.store.host, number, prompt, params, recorder, cache_salt)

    def prompt_ended(self, request: StoredPrompt) -> None:
        """Free the memory of an ended request as soon as its blocks have been written."""
        self._ending.add(request)
        self.store.context.saver.notify(lambda: self._call_soon(lambda: self._release(request)))

    def _release(self, request: StoredPrompt) -> None:
        self._ending.discard(request)
        if not self.store.closed:
            with self.store.context.runner.pool.lock:
                try:
                    again = request.release()
                except Exception:  # an error here must not fail another request
                    logger.exception("the memory of an ended request could not be freed at the first attempt")
                    request.free_memory(write=False)
                    again = False
            if again:
                self.prompt_ended(request)

    def _drop_ending(self) -> None:
        with self.store.context.runner.pool.lock:
            for request in self._ending:
                request.free_memory(write=True)

    def turn(
        self,
        name: str,
        number: int,
        prompt: Seq[int],
        params: SamplingParams,
        recorder: Recorder | None = None,
        cache_salt: str = "",
    ) -> Turn:
        """Create the request that responds to `prompt` in the session `name`. Open or create the session if needed.

        When the request ends, the caller must call `ended`.

        Args:
            number: Number of the request in the engine.
            prompt: Token ids of the whole conversation.
            cache_salt: Cache salt of the request. Ignored if the session already has tokens.

        Raises:
            SessionBusyError: The session is computing another turn.
            InputError: The name, the prompt or a parameter is invalid for a session.
            ModelError: The prompt and its response would exceed the model's positions.
            PoolFullError: The pool is too small for the turn.
            StoreError: The history of the session cannot be read or has an unsupported format.
        """
        runner = self.store.context.runner
        check_turn(params, runner.model)
        runner.check_fits(len(prompt) + params.max_tokens)
        session = self.store.session(name, prompts_are_whole=True)
        self._opened[name] = session
        self._opened.move_to_end(name)
        if session.busy:
            raise SessionBusyError(f"session {name!r} is answering: wait for it, or abort it")
        if not session.history.tokens:
            # A session keeps the salt of its first turn, because the keys of its blocks on disk depend on this salt.
            # The server's salts can change whenever it starts.
            session.history.salt = salt_provenance(cache_salt)
        tokens = tokens_of_prompt(session.history.tokens, prompt)
        turn = Turn(session.kv, session.host, number, "", tokens, params, recorder)
        session.busy = True
        return turn

    def ended(self, name: str) -> None:
        """Mark the session `name` as idle after its turn.

        If more than MOST_OPEN sessions are open, close idle sessions, starting with the least recently used one.
        """
        self._opened[name].busy = False
        idle = [name for name, session in self._opened.items() if not session.busy]
        for oldest in idle[: max(0, len(self._opened) - MOST_OPEN)]:
            self._opened.pop(oldest).close()

    def look_ahead(self) -> None:
        self.store.host.look_ahead(())

    def delete(self, name: str) -> bool:
        """Delete the session `name`. Return whether it existed.

        Raises:
            SessionBusyError: A turn of the session is running.
            StoreError: A file cannot be deleted.
        """
        if name in self._opened and self._opened[name].busy:
            raise SessionBusyError(f"session {name!r} is answering: wait for it, or abort it")
        opened = self._opened.pop(name, None)
        known = self.store.exists(name)
        if opened is None and not known:
            return False  # a deletion reads every history in the store, which takes time
        self.store.delete(name)
        return known

    def close(self) -> None:
        """Save and close all sessions. A second call has no effect.

        If a session cannot be saved, all others are still saved before StoreError is raised.
        """
        with ExitStack() as ends:
            ends.callback(self.store.remove_user, self)
            ends.callback(self._opened.clear)
            ends.callback(self._drop_ending)
            for session in self._opened.values():
                ends.callback(session.close)
