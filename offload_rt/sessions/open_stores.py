"""Session stores that one runtime has open, by folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..engine.checks import folder_path
from ..engine.runner import Runner
from ..errors import InputError, OffloadError
from ..storage.options import StoreOptions
from ..utils.config_fields import configured
from .session import Session
from .store import SessionStore


class OpenStores:
    """Opens session stores for a runner. A folder that is already open keeps its store."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._stores: dict[Path, SessionStore] = {}

    def __iter__(self) -> Iterator[SessionStore]:
        return iter(self._stores.values())

    def open(
        self, store: str | Path, options: StoreOptions | None, fields: Mapping[str, Any], *, read_only: bool = False
    ) -> SessionStore:
        """Return the store in the folder `store`. For the arguments and errors, see `LLM.session_store`."""
        folder = folder_path("store", store).resolve()
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
        """Open or create a session. If that fails, close its store, unless it is in use. See `LLM.session`."""
        with self._runner.pool.lock:
            known = self.open(store, options, fields)
            try:
                session = known.open(name)
            except OffloadError:
                known.close_if_idle()
                raise
        if system is not None:
            try:
                session.instruct(system)
            except OffloadError:
                session.close()
                raise
        return session

    def close(self) -> None:
        """Close all stores. Raise StoreError if a session could not be saved, after all other sessions were saved."""
        with ExitStack() as ends:
            for store in self:
                ends.callback(store.close)
