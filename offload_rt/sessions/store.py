"""The sessions of one model in one folder: names, the disk tier they share, and the thread that saves to it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from ..config import StoreOptions
from ..engine.reclaim import Holding
from ..engine.runner import Runner
from ..errors import ConfigError, InputError
from ..storage.chunk_file import LAYOUT_VERSION
from ..storage.disk_store import DiskStore
from ..storage.loader import read_buffer_layers
from ..storage.saver import Saver
from .history import History, remove_orphans
from .host_tier import Tiers
from .session import Session


class SessionStore:
    """The sessions of one model in one folder: names, and what they share, a disk tier and the thread that saves to it.
    Host memory is the tier above (`tiers.py`): open sessions stay there while there is room, and so do, in the prefix
    tree, chunks of closed ones.

    Raises ConfigError where sessions cannot be restored exactly under the runner's policy, StoreError.
    """

    def __init__(
        self,
        runner: Runner,
        folder: Path,
        options: StoreOptions | None = None,
    ) -> None:
        _check_restorable(runner)
        self.runner = runner
        self.private = not runner.pool.format.exact
        namespace = f"{runner.model.fingerprint} {runner.adapter.dtype} {runner.pool.format.name} v{LAYOUT_VERSION}"
        self.disk = DiskStore(folder, namespace, runner.adapter.geometry.layers, options)
        self.saver = Saver(self.disk, runner.pool, runner.link)
        self.tiers = Tiers(runner, self.disk, self.disk.options)
        self.load_rate = 0.0
        self.compute_rate = 0.0
        self.closed = False
        self._open: dict[str, Session] = {}
        self._holders: set[object] = set()
        runner.reclaimables.append(self)

    def open(self, name: str) -> Session:
        """The session `name`: as it was left, or new. Raises InputError where it is open already."""
        if not name or len(quote(name, safe="")) > 200:
            raise InputError(f"session name {name!r} must have 1 to 200 characters (as a file name)")
        if name in self._open:
            raise InputError(f"session {name!r} is open already: close it first, or fork it")
        data = self.disk.get(quote(name, safe=""))
        history = History.from_bytes(data) if data is not None else None
        return self.enter(history or History(name, self.runner.model.name))

    def enter(self, history: History) -> Session:
        """A session with this history."""
        session = Session(self, history)
        self._open[history.name] = session
        return session

    def session(self, name: str) -> Session:
        """The session `name`, opened if it is not open yet. Raises InputError."""
        return self._open.get(name) or self.open(name)

    def exists(self, name: str) -> bool:
        """Whether there is such a session, open or stored."""
        return name in self._open or self.disk.get(quote(name, safe="")) is not None

    def put(self, history: History) -> None:
        """Writes a history. Raises StoreError."""
        self.disk.put(quote(history.name, safe=""), history.to_bytes())

    def forget(self, history: History) -> None:
        """Deletes a history and its tail, and the originals of its sinks where no fork has them too."""
        self.disk.delete(quote(history.name, safe=""))
        if history.tail and not history.tail_shared:
            self.disk.remove([bytes.fromhex(history.tail)])
        remove_orphans(self.disk)

    def left(self, session: Session) -> None:
        """A session has closed; with the last one the store closes."""
        self._open.pop(session.name, None)
        self.close_if_idle()

    def hold(self, holder: object) -> None:
        """The store stays open without sessions until `release`."""
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Takes a hold back."""
        self._holders.discard(holder)
        self.close_if_idle()

    def reclaim(self) -> bool:
        """Takes one parked session out of host memory; False where none can leave (`engine.reclaim.Reclaimable`)."""
        return self.tiers.reclaim()

    def holdings(self) -> list[Holding]:
        """What the open sessions hold of host memory, and why it stays."""
        pool, parked, found = self.runner.pool, set(self.tiers.parked), []
        for session in self._open.values():
            if (sequence := session.rows.sequence) is not None:
                full = f"its store cannot take it: {self.disk.last_error or 'the limit of its files is reached'}"
                reason = full if session.rows in parked else "answering"
                found.append(Holding(session.name, len(sequence.blocks.chunks) * pool.chunk_bytes, reason))
        return found

    def close_if_idle(self) -> None:
        """Closes the store where no session is open and nobody holds it."""
        if not (self._open or self._holders):
            self.close()

    def close(self) -> None:
        """Closes all sessions, the saver and the store: another process may write then. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        for session in list(self._open.values()):
            session.close()
        self.runner.reclaimables.remove(self)
        self.saver.close()
        self.disk.close()

    def read_buffer(self, loaded_bytes: int, new_tokens: int) -> int:
        """k, from the load and compute times measured last; all layers before there are any."""
        layers = self.disk.layers
        if not (self.load_rate and self.compute_rate):
            return layers
        return read_buffer_layers(loaded_bytes * self.load_rate, new_tokens * self.compute_rate, layers)


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
