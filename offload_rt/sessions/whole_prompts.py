"""Sessions by whole prompts: a front end sends all of a conversation each time, and what a session has computed of it
comes back from host memory or disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from contextlib import ExitStack

from ..engine.constraints import check_answerable
from ..engine.room import salt_provenance
from ..errors import InputError, SessionBusyError
from ..model_runner.trace import Recorder
from ..sampling_params import SamplingParams
from .chat_template import TurnTokens
from .host_tier import TierStats
from .session import Session
from .store import SessionStore
from .turn import Turn

MOST_OPEN = 256
"""Sessions that stay open between turns; the one used longest ago is saved and closed."""


def tokens_of_prompt(held: Seq[int], prompt: Seq[int]) -> TurnTokens:
    """What the whole `prompt` does to a session's tokens `held`: those before the first difference stay, at least one
    token is added."""
    most = min(len(held), len(prompt) - 1)
    same = next((i for i in range(most) if held[i] != prompt[i]), most)
    return TurnTokens(len(held), len(held) - same, tuple(prompt[same:]))


class WholePrompts:
    """Turns of a store's sessions for an engine that somebody else runs. Not thread-safe."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self._opened: OrderedDict[str, Session] = OrderedDict()
        store.hold(self)

    @property
    def stats(self) -> TierStats:
        """Where the tokens before each turn's new ones came from."""
        return self.store.host.stats

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files of the store."""
        return self.store.context.storage.bytes_used

    def turn(
        self,
        name: str,
        number: int,
        prompt: Seq[int],
        params: SamplingParams,
        recorder: Recorder | None = None,
        cache_salt: str = "",
    ) -> Turn:
        """The request `number`, for `submit`, which answers `prompt` in the session `name`; `ended` is to be told when
        it has. Raises SessionBusyError where the session is answering, InputError, ModelError, PoolFullError,
        StoreError."""
        runner = self.store.context.runner
        if params.n > 1 or params.num_beams > 1:
            raise InputError("a session has one answer to a turn: n and num_beams must be 1")
        if params.prompt_logprobs is not None:
            raise InputError("a session's earlier turns are not computed again: leave prompt_logprobs or session out")
        check_answerable(params, runner.model)
        runner.check_fits(len(prompt) + params.max_tokens)
        session = self.store.session(name, prompts_are_whole=True)
        self._opened[name] = session
        self._opened.move_to_end(name)
        if session.busy:
            raise SessionBusyError(f"session {name!r} is answering: wait for it, or abort it")
        if not session.history.tokens:
            # A session keeps the salt that it began with: its chunks on disk are named by it, and the server's salts
            # change with every start.
            session.history.salt = salt_provenance(cache_salt)
        tokens = tokens_of_prompt(session.history.tokens, prompt)
        turn = Turn(session.kv, session.host, number, "", tokens, params, recorder)
        session.busy = True
        return turn

    def ended(self, name: str) -> None:
        """The turn of the session `name` has ended: the next one may come."""
        self._opened[name].busy = False
        idle = [name for name, session in self._opened.items() if not session.busy]
        for oldest in idle[: len(self._opened) - MOST_OPEN]:
            self._opened.pop(oldest).close()

    def look_ahead(self) -> None:
        """To be called before each step: nobody is known to wait."""
        self.store.host.look_ahead(())

    def delete(self, name: str) -> bool:
        """Delete a session. Return whether there was one. Raises SessionBusyError, StoreError."""
        if name in self._opened and self._opened[name].busy:
            raise SessionBusyError(f"session {name!r} is answering: wait for it, or abort it")
        self._opened.pop(name, None)
        known = self.store.exists(name)
        self.store.delete(name)
        return known

    def close(self) -> None:
        """Saves and closes the sessions. A second call does nothing. Raises StoreError where one cannot be saved; all
        others are."""
        with ExitStack() as ends:
            ends.callback(self.store.release, self)
            ends.callback(self._opened.clear)
            for session in self._opened.values():
                ends.callback(session.close)
