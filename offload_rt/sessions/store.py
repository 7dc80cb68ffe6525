"""The sessions of one model in one store: their names, and what they share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

from ..config import StoreOptions
from ..engine.reclaim import Holding
from ..engine.runner import Runner
from ..errors import ConfigError, InputError, StoreError
from ..storage.chunk_file import LAYOUT_VERSION
from ..storage.chunk_store import StorageTier
from ..storage.disk_store import DiskStore
from ..storage.home_saver import HomeSaver
from ..storage.index import DOCUMENTS
from ..storage.saver import Saver
from .context import SessionContext
from .history import History, check_name, document_name, remove_orphans
from .host_tier import HostTier
from .session import Session
from .session_kv import SessionKV

OpenTier = Callable[[str, int], StorageTier]
"""Opens a tier for the chunks of one namespace (the model, its number format and the layout), L layers each."""


class Holder(Protocol):
    """Who keeps a store open without sessions, such as a queue of turns."""

    def close(self) -> None:
        """Ends what it does, and releases the store."""
        ...


class SessionStore:
    """The sessions of one model by name, and what they share (`context`): a storage tier and the thread that saves to
    it. Host memory is the tier above (`host`): open sessions stay there while there is room, and so do, in the prefix
    tree, chunks of closed ones.

    Raises ConfigError where sessions cannot be restored exactly under the runner's policy, StoreError.
    """

    def __init__(self, runner: Runner, open_tier: OpenTier, options: StoreOptions | None = None) -> None:
        """open_tier: is called once; the store closes what it returns."""
        _check_restorable(runner)
        namespace = f"{runner.model.fingerprint} {runner.adapter.dtype} {runner.pool.format.name} v{LAYOUT_VERSION}"
        storage = open_tier(namespace, runner.pool.groups.layers)
        make_saver = Saver if runner.pool.file is None else HomeSaver
        saver = make_saver(storage, runner.pool, runner.link.storage)
        self.context = SessionContext(runner, storage, saver, options or StoreOptions())
        self.host = HostTier(self.context)
        self.closed = False
        self._open: dict[str, Session] = {}
        self._holders: set[Holder] = set()
        runner.reclaimables.append(self)

    @classmethod
    def on_disk(cls, runner: Runner, folder: Path, options: StoreOptions | None = None) -> Self:
        """Returns the sessions in `folder`, of which this process is the only one that writes until `close`. Raises as
        the class."""
        return cls(runner, lambda namespace, layers: DiskStore(folder, namespace, layers, options), options)

    def open(self, name: str) -> Session:
        """Returns the session `name` as it was left, or a new one; where its history is damaged as it was before that,
        with a warning. Raises InputError where it is open already, StoreError where nothing of its history can be read,
        or it is not understood."""
        check_name(name)
        if name in self._open:
            raise InputError(f"session {name!r} is open already: close it first, or fork it")
        return self.enter(self._history(name) or History(name, self.context.runner.model.name))

    def _history(self, name: str) -> History | None:
        """The stored history of the session `name`; None where there is none. Raises StoreError."""
        mend = f"put a copy of the file back, or `offload-rt sessions repair {name}` rebuilds its text from its chunks"
        try:
            document = self.context.storage.get(document_name(name))
        except StoreError as error:
            raise StoreError(f"session {name!r} cannot be opened, and nothing was changed: {error}; {mend}") from error
        if document is None:
            return None
        history, vocab = History.from_bytes(document.data), self.context.runner.adapter.geometry.vocab
        place = f"the file {document_name(name) + DOCUMENTS!r} of its store"
        if history is None:
            raise StoreError(
                f"session {name!r} cannot be opened: {place} is of another format, perhaps a newer version's; use the "
                "version that wrote it, or another name"
            )
        if history.name != name or max(history.tokens, default=0) >= vocab:
            raise StoreError(
                f"session {name!r} cannot be opened: {place} holds the history of another session ({history.name!r} "
                f"with {history.model}); give it the name that it had"
            )
        if document.damage:
            warnings.warn(
                f"session {name!r} was opened as it was saved the time before last, with {len(history.turns) // 2:,} "
                f"turns, because {document.damage}; what was said since then, the last turn at most, is lost",
                stacklevel=4,
            )
        return history

    def enter(self, history: History) -> Session:
        """Returns a session with this history, open from now on."""
        session = Session(SessionKV(self.context, history), self.host, self)
        self._open[history.name] = session
        return session

    def session(self, name: str) -> Session:
        """Returns the session `name`, opened if it is not open yet. Raises InputError."""
        check_name(name)
        return self._open.get(name) or self.open(name)

    def exists(self, name: str) -> bool:
        """Whether there is such a session, open or stored."""
        return name in self._open or self.context.storage.get(document_name(name)) is not None

    def forget(self, history: History) -> None:
        """Deletes a history and its tail, and the originals of its sinks where no fork has them too."""
        self.context.storage.delete(history.document)
        if history.tail and not history.tail_shared:
            self.context.storage.remove([bytes.fromhex(history.tail)])
        remove_orphans(self.context.storage)

    def left(self, session: Session) -> None:
        """Takes note that a session has closed; with the last one the store closes."""
        self._open.pop(session.name, None)
        self.close_if_idle()

    def hold(self, holder: Holder) -> None:
        """Keeps the store open without sessions until `release`."""
        self._holders.add(holder)

    def release(self, holder: Holder) -> None:
        """Takes a hold back."""
        self._holders.discard(holder)
        self.close_if_idle()

    def reclaim(self) -> bool:
        """Takes one parked session out of host memory; False where none can leave (`engine.reclaim.Reclaimable`)."""
        return self.host.reclaim()

    def holdings(self) -> list[Holding]:
        """What the open sessions hold of host memory, and why it stays."""
        pool, parked, found = self.context.runner.pool, set(self.host.parked), []
        for session in self._open.values():
            if (sequence := session.kv.sequence) is not None:
                refused = self.context.storage.last_error or "the limit of its files is reached"
                reason = f"its store cannot take it: {refused}" if session.kv in parked else "answering"
                found.append(Holding(session.name, pool.bytes_of(sequence.blocks), reason))
        return found

    def close_if_idle(self) -> None:
        """Closes the store where no session is open and nobody holds it."""
        if not (self._open or self._holders):
            self.close()

    def close(self) -> None:
        """Closes all queues and sessions, the saver and the store: another process may write then. A second call does
        nothing. Raises StoreError where a session cannot be saved; all others are, and everything is closed."""
        with ExitStack() as ends:
            ends.callback(self._close)
            for holder in list(self._holders):
                ends.callback(holder.close)

    def _close(self) -> None:
        if self.closed:
            return
        self.closed = True
        with ExitStack() as ends:
            ends.callback(self.context.storage.close)
            ends.callback(self.context.saver.close)
            ends.callback(self.context.runner.reclaimables.remove, self)
            for session in list(self._open.values()):
                ends.callback(session.close)


def _check_restorable(runner: Runner) -> None:
    """Raises ConfigError where what is restored would not be what was left."""
    if runner.policy.wants_queries:
        raise ConfigError(
            f"policy {runner.policy.name!r} (with these options) learns from every query of a text, which a stored "
            "session does not hold: use 'full' or 'infinigen' with columns by calibration"
        )
    if runner.config.eviction is not None:
        raise ConfigError(
            "eviction overwrites tokens in place, so that chunks are no longer what their names say: open sessions "
            "without eviction, and truncate them where they grow too long"
        )
