"""Open, restore and delete the sessions of one model in a folder."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, get_args

import torch

from ..config import DType, KVFormatName
from ..engine.cache_manager import MemoryUse
from ..engine.checks import check_store_path
from ..engine.runner import Runner
from ..errors import ConfigError, InputError, OffloadError, StoreError
from ..kv_cache.prefix_tree import root_key
from ..storage.block_file import LAYOUT_VERSION
from ..storage.disk_store import DiskStore
from ..storage.index import DOCUMENTS
from ..storage.options import StoreOptions
from ..storage.saver import Saver
from ..utils.config_fields import configured
from .context import SessionContext
from .deletion import Removed, remove_session
from .history import History, document_name
from .host_tier import HostTier
from .names import check_name
from .session import Session
from .session_kv import SessionKV
from .stored_states import StoredStates


@dataclass(frozen=True)
class Namespace:
    """Properties of a runner that determine its stored KV. KV is reused only within one namespace.

    Attributes:
        kv_cache_dtype: Number format of the KV cache. "auto" is replaced by the name of `dtype`.
        planes: Number of vectors that are stored per token and KV head (`RowShape`).
    """

    fingerprint: str
    dtype: torch.dtype
    kv_cache_dtype: str
    planes: int = 2

    def __str__(self) -> str:
        planes = "" if self.planes == 2 else f" {self.planes} plane"
        return f"{self.fingerprint} {self.dtype} {self.kv_cache_dtype} v{LAYOUT_VERSION}{planes}"

    @property
    def folder_name(self) -> str:
        return root_key(str(self)).hex()

    @property
    def options(self) -> str:
        """The number formats, written as arguments of `LLM` for error messages."""
        dtype = str(self.dtype).removeprefix("torch.")
        shown = "auto" if self.kv_cache_dtype == dtype else self.kv_cache_dtype
        return f"dtype={dtype!r} and kv_cache_dtype={shown!r}"

    def other_formats(self) -> Iterator[Namespace]:
        """Yield the namespaces of the same model that have other number formats."""
        dtypes = [name for name in get_args(DType) if name != "auto"]
        for dtype, kv_cache_dtype in itertools.product(dtypes, get_args(KVFormatName)):
            stored = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
            sibling = replace(self, dtype=getattr(torch, dtype), kv_cache_dtype=stored)
            if sibling != self:
                yield sibling


class StoreUser(Protocol):
    """An object that keeps a store open, such as a `TurnQueue`."""

    def close(self) -> None: ...


class SessionStore:
    """The sessions of one model in one folder, accessed by name.

    A thread writes the KV of open sessions to the folder. This KV stays in host memory until other requests need the
    memory.
    """

    def __init__(
        self, runner: Runner, folder: Path, options: StoreOptions | None = None, *, read_only: bool = False
    ) -> None:
        """Open the store in `folder`.

        Unless it is `read_only`, no other process can write to it until `close` is called. A read-only store reuses
        stored KV but must not be used for sessions.

        Raises:
            ConfigError: With the runner's policy or eviction, sessions cannot be restored exactly.
            ModelError: The model's weights were changed after loading.
            StoreError: The folder cannot be used.
        """
        _check_restorable(runner)
        runner.model.check_weights_unchanged()
        planes = runner.adapter.geometry.planes
        namespace = Namespace(runner.model.fingerprint, runner.adapter.dtype, runner.pool.format.name, planes)
        storage = DiskStore(folder, str(namespace), runner.pool.groups.layers, options, read_only=read_only)
        saver = Saver(storage, runner.pool, runner.transfer.storage)
        states = None
        if runner.snapshots is not None and runner.pool.states is not None:
            states = StoredStates(storage, saver, runner.pool.states, runner.snapshots)
        self.context = SessionContext(runner, storage, saver, options or StoreOptions(), states)
        self.host = HostTier(self.context)
        self.closed, self.read_only = False, read_only
        self._namespace, self._folder = namespace, folder
        self._open: dict[str, Session] = {}
        self._users: set[StoreUser] = set()
        runner.reclaimables.append(self)

    def open(self, name: str, *, prompts_are_whole: bool = False) -> Session:
        """Open a stored session or create a new one.

        If the latest history is damaged, warn and open the previous version.

        Args:
            prompts_are_whole: Whether every turn contains the whole conversation. If so, a stored session with a
                different number format is replaced, because no text is lost.

        Raises:
            InputError: The name is invalid, or the session is already open.
            StoreError: The history is damaged, or it has a different format version, number format or storage format.
        """
        check_name(name)
        if name in self._open:
            raise InputError(f"session {name!r} is open already: close it first, or fork it")
        history = self._history(name)
        if history is None:
            if not prompts_are_whole:
                self._check_number_format(name)
            history = History(name, self.context.runner.model.name)
        return self.open_history(history)

    def _check_number_format(self, name: str) -> None:
        # If only a default or an option has changed, users would not expect a new session with an empty history.
        folder, file, others = self._folder, document_name(name) + DOCUMENTS, self._namespace.other_formats()
        if (found := next((one for one in others if (folder / one.folder_name / file).exists()), None)) is not None:
            own, other = self._namespace.options, found.options
            raise StoreError(
                f"session {name!r} is stored with {other}, and this runtime has {own}: KV of one number format cannot "
                f"be continued in another. Load the model with {other}, delete the session, or use another name"
            )

    def _history(self, name: str) -> History | None:
        advice = "put a copy of the file back, or delete the session"
        try:
            document = self.context.storage.documents.get(document_name(name))
        except StoreError as error:
            raise StoreError(
                f"session {name!r} cannot be opened, and nothing was changed: {error}; {advice}"
            ) from error
        if document is None:
            return None
        history, vocab = History.from_bytes(document.data), self.context.runner.adapter.geometry.vocab
        file = f"the file {document_name(name) + DOCUMENTS!r} of its store"
        if history is None:
            raise StoreError(
                f"session {name!r} cannot be opened: {file} is of another format, perhaps a newer version's; use the "
                "version that wrote it, or another name"
            )
        if history.name != name or max(history.tokens, default=0) >= vocab:
            raise StoreError(
                f"session {name!r} cannot be opened: {file} contains the history of another session ({history.name!r} "
                f"with {history.model}); {advice}"
            )
        if document.damage:
            warnings.warn(
                f"session {name!r} was opened in its previous version, with {len(history.turns) // 2:,} "
                f"turns, because {document.damage}; the last turn may be lost",
                stacklevel=4,
            )
        return history

    def open_history(self, history: History) -> Session:
        session = Session(SessionKV(self.context, history), self.host, self)
        self._open[history.name] = session
        return session

    def session(self, name: str, *, prompts_are_whole: bool = False) -> Session:
        """Return the session `name`. If it is not open yet, open or create it (see `open`)."""
        check_name(name)
        return self._open.get(name) or self.open(name, prompts_are_whole=prompts_are_whole)

    def exists(self, name: str) -> bool:
        try:
            return name in self._open or self.context.storage.documents.get(document_name(name)) is not None
        except StoreError:
            return True

    def delete(self, name: str) -> Removed:
        """Delete a session, even if its history is damaged. It is not an error if the session does not exist.

        Raises:
            InputError: The name is invalid, or a queue is computing a turn of the session.
            StoreError: A file cannot be deleted.
        """
        check_name(name)
        if (session := self._open.get(name)) is not None:
            return session.discard()
        with self.context.runner.pool.lock:
            return self.delete_stored(name)

    def delete_stored(self, name: str) -> Removed:
        """Delete a session that is not open, and all blocks that are no longer used. For StoreError, see `delete`.

        Warns if files of other sessions cannot be read.
        """
        self.context.saver.flush()  # write the marks of prompts that are still queued
        storage, others = self.context.storage, [one for one in self._open.values() if one.name != name]
        needed = {key for session in others for key in session.kv.keys_in_use(answering=session.busy)}
        removed = remove_session(storage, storage.root.hex(), document_name(name), needed)
        if removed.note:
            warnings.warn(f"session {name!r} was deleted; {removed.note}", stacklevel=4)
        return removed

    def session_closed(self, session: Session) -> None:
        self._open.pop(session.name, None)
        self.close_if_idle()

    def add_user(self, user: StoreUser) -> None:
        """Keep the store open until `user` is removed, even if no session is open."""
        self._users.add(user)

    def remove_user(self, user: StoreUser) -> None:
        self._users.discard(user)
        self.close_if_idle()

    def reclaim(self) -> bool:
        """Evict one idle session from host memory. Return False if there is none (see `Reclaimable.reclaim`)."""
        return self.host.reclaim()

    def memory_in_use(self) -> list[MemoryUse]:
        """Return how much host memory each open session uses, and why it cannot be evicted."""
        pool, parked, found = self.context.runner.pool, set(self.host.parked), []
        for session in self._open.values():
            if (sequence := session.kv.sequence) is not None:
                refused = self.context.storage.last_error or "the store has reached its limit"
                reason = f"its KV cannot be stored: {refused}" if session.kv in parked else "answering"
                found.append(MemoryUse(session.name, pool.bytes_of(sequence.blocks), reason))
        return found

    def close_if_idle(self) -> None:
        if not (self._open or self._users):
            self.close()

    def close(self) -> None:
        """Close all queues, sessions and files. A second call has no effect.

        If a session cannot be saved, the store is closed before StoreError is raised.
        """
        with ExitStack() as ends:
            ends.callback(self._close)
            for user in list(self._users):
                ends.callback(user.close)

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


class OpenStores:
    """The open session stores of one runner. Each folder is opened only once."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._stores: dict[Path, SessionStore] = {}

    def __iter__(self) -> Iterator[SessionStore]:
        return iter(self._stores.values())

    def open(
        self, store: str | Path, options: StoreOptions | None, fields: Mapping[str, Any], *, read_only: bool = False
    ) -> SessionStore:
        folder = check_store_path(store).resolve()
        known = self._stores.get(folder)
        if known is None or known.closed:
            chosen = configured(StoreOptions, options, fields)
            known = self._stores[folder] = SessionStore(self._runner, folder, chosen, read_only=read_only)
        elif known.read_only is not read_only:
            kind = "for reading only" if known.read_only else "for writing"
            raise InputError(f"the store {str(folder)!r} is already open {kind}: close its sessions and engines first")
        return known

    def open_session(
        self, name: str, store: str | Path, options: StoreOptions | None, fields: Mapping[str, Any], system: str | None
    ) -> Session:
        """Open or create a session for `LLM.session`. After an error, close the store unless it has another user."""
        with self._runner.pool.lock:
            known = self.open(store, options, fields)
            try:
                check_name(name)
                new = not known.exists(name)
                session = known.open(name)
            except OffloadError:
                known.close_if_idle()
                raise
        if system is not None:
            try:
                session.instruct(system)
            except OffloadError:
                if new:
                    session.discard()
                else:
                    session.close()
                raise
        return session

    def close(self) -> None:
        with ExitStack() as ends:
            for store in self:
                ends.callback(store.close)


def _check_restorable(runner: Runner) -> None:
    if runner.policy.wants_queries:
        raise ConfigError(
            f"policy {runner.policy.name!r} (with these options) learns from every query of a text, and a stored "
            "session contains no queries: use 'full' or 'infinigen' with columns by calibration"
        )
    if runner.config.eviction is not None:
        raise ConfigError(
            "eviction overwrites tokens in place, so stored blocks would not match their keys: disable eviction, and "
            "truncate sessions that grow too long"
        )
