"""Where the rows of one session are: in host memory, on disk, or on their way between the two."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from ..core import CHUNK
from ..engine.stats import Stats
from ..forward.sequence import Sequence
from ..storage.disk_store import StoredChunk
from ..storage.loader import DamagedChunkError, Preload
from ..storage.saver import NamedChunk, layer_bytes
from .history import History

if TYPE_CHECKING:
    from .store import SessionStore


class SessionRows:
    """The rows of a session: its sequence while it is in host memory, its chunks on disk by name, and what brings the
    one from the other. Everything that is computed is saved behind the computation, so that leaving host memory costs
    no more than what has not been written yet.

    sequence: None where host memory has nothing of it but what the prefix tree kept. preload: rows that are on their
    way into `sequence`. loaded_tokens: how many came from disk the last time. last_stats: what the last turn cost.
    """

    def __init__(self, store: SessionStore, history: History) -> None:
        self.store, self.runner, self.history = store, store.runner, history
        self.sequence: Sequence | None = None
        self.preload: Preload | None = None
        self.loaded_tokens = 0
        self.last_stats: Stats | None = None
        self._host_tokens = 0
        self._pinned: set[bytes] = set()
        self._offered: set[bytes] = set()
        self._broken: set[bytes] = set()

    @property
    def pool_bytes(self) -> int:
        """Bytes of host memory that the whole session takes."""
        return -(-len(self.history.tokens) // CHUNK) * self.runner.pool.chunk_bytes

    # ---------------------------------------------------------------------------------------------------- coming back

    def ready(self, capacity: int) -> Sequence:
        """The session's sequence with all tokens of its history and room for `capacity`; what is on disk is on its way.
        Raises PoolFullError."""
        if self.sequence is None:
            self.sequence = self._restore(capacity)
            return self.sequence
        sequence = self.sequence
        self.runner.pool.reserve(sequence.blocks, capacity)
        self.recheck()
        sequence.tokens = list(self.history.tokens)
        sequence.trace = sequence.trace.restart(reused=sequence.position)
        sequence.trace.prompt_tokens = 0
        return sequence

    def fetch(self, *, whole: bool) -> None:
        """Begins to bring the rows into host memory, `whole` or as many layers as the read buffer has. Raises
        PoolFullError."""
        if self.sequence is None and self.history.computed:
            self.sequence = self._restore(len(self.history.tokens) + 1, whole=whole)

    def wait(self, layer: int) -> None:
        """Returns when the rows of `layer` are in host memory. Raises DamagedChunkError, after which nothing of the
        session is there: what was damaged is computed anew the next time."""
        if self.preload is None:
            return
        try:
            self.preload.wait(layer)
        except DamagedChunkError as damage:
            self._broken.add(damage.key)
            raise

    def load_all(self) -> None:
        """Waits for all layers of what is being loaded. Raises DamagedChunkError."""
        if self.preload is not None and self.sequence is not None:
            for layer in range(self.store.disk.layers):
                self.wait(layer)
            self.end_preload()
            self.runner.reload(self.sequence)

    def materialise(self) -> Sequence:
        """The sequence with all its rows in the pool, and nothing of it waiting to be written. Raises PoolFullError."""
        while True:
            if self.sequence is None:
                self.sequence = self._restore(len(self.history.tokens) + 1, whole=True)
            try:
                self.load_all()
            except DamagedChunkError:
                self.drop()
                continue
            self.store.saver.flush()
            return self.sequence

    def end_preload(self) -> float:
        """Nothing more is loaded; what loading took tells the store's rate. Returns the seconds that were waited."""
        if self.preload is None:
            return 0.0
        self.preload.close()
        loaded = layer_bytes(self.runner.pool, self.loaded_tokens) * self.store.disk.layers
        self.store.load_rate = self.preload.load_seconds / max(1, loaded)
        stalled = self.preload.stall_seconds
        self.preload = None
        return stalled

    def drop(self) -> None:
        """Gives the sequence back; rows that were still to come are forgotten, not published."""
        if self.sequence is None:
            return
        self.store.saver.flush()
        if self.preload is not None:
            arrived = self.preload.finished
            self.end_preload()
            if not arrived:
                self.runner.pool.truncate(self.sequence.blocks, min(self._host_tokens, self.sequence.blocks.length))
        self.runner.free(self.sequence)
        self.sequence = None

    def _restore(self, capacity: int, *, whole: bool = False) -> Sequence:
        """What host memory and disk have of the tokens; reading the latter begins."""
        history, runner, disk = self.history, self.runner, self.store.disk
        blocks = runner.match(history.tokens, history.cut)
        self._host_tokens = known = blocks.length
        found = self._find(known)
        if found:
            index, chunk = found[-1]
            known = index * CHUNK + chunk.header.name.count
        if known < history.computed:
            self._lose_from(known)
        sequence = runner.adopt(
            history.tokens, blocks, capacity=capacity, known=known, exact=min(history.exact, known),
            shift=history.shift, truncation_id=history.cut,
        )  # fmt: skip
        self.loaded_tokens = known - self._host_tokens
        if found:
            size = sum(chunk.header.layer_bytes for _, chunk in found) * disk.layers
            ahead = disk.layers if whole else self.store.read_buffer(size, len(history.tokens) - known)
            self.preload = Preload(runner.pool, disk, blocks, found, ahead)
        return sequence

    def _lose_from(self, known: int) -> None:
        """Rows from token `known` on are gone and will be computed anew. Where one chunk is damaged others may be: what
        lies on disk behind it is read through, so that it can be stored anew too."""
        history, stop = self.history, len(self.history.tokens) // CHUNK * CHUNK
        history.forget_from(known)
        if history.cut and not known:
            history.uncut()
        for name in self.names(stop)[known // CHUNK :]:
            self.store.disk.verify(name.parent, name.lineage, name.tokens)

    def _find(self, known: int) -> list[tuple[int, StoredChunk]]:
        """Stored chunks from token `known` on without a gap: full ones, and the tail where they end. One token at least
        is left to compute. Where rows are rounded, what a turn that did not end had computed is no part of it: a
        prefill attends to its own rows as they were before rounding."""
        history, disk = self.history, self.store.disk
        stop = min(len(history.tokens) - 1, history.computed) if self.store.private else len(history.tokens) - 1
        names = self.names(stop // CHUNK * CHUNK)
        tail = self.names(history.computed)[history.computed // CHUNK :]
        found: list[tuple[int, StoredChunk]] = []
        for name in [*names[known // CHUNK :], *tail]:
            if name.index != known // CHUNK or name.key in self._broken or name.index * CHUNK + name.count == known:
                continue
            chunk = disk.find(name.parent, name.lineage, name.tokens)
            if chunk is None or chunk.header.layer_bytes != layer_bytes(self.runner.pool, name.count):
                continue
            found.append((name.index, chunk))
            known = name.index * CHUNK + name.count
            if name.count < CHUNK:
                break
        self._pin(chunk.key for _, chunk in found)
        return found

    # --------------------------------------------------------------------------------------------------------- saving

    def names(self, stop: int) -> list[NamedChunk]:
        """Chunks of tokens [0, stop) by their names on disk."""
        policy, store = self.runner.policy, self.store
        return self.history.names(store.disk.root, policy.lineage, stop, private=store.private)

    def fresh(self, names: Iterable[NamedChunk]) -> list[NamedChunk]:
        """Those that are neither on disk nor on their way to it."""
        return [name for name in names if name.key not in self.store.disk and name.key not in self._offered]

    def offered(self, names: Iterable[NamedChunk]) -> None:
        """These are on their way to disk."""
        self._offered.update(name.key for name in names)

    def offer(self, names: Iterable[NamedChunk]) -> bool:
        """Hands chunks that are not on disk to the saver; whether some had to wait and there is room to try again."""
        fresh = self.fresh(names)
        if not fresh or self.sequence is None or self.preload is not None:
            return False
        taken = self.store.saver.save(self.sequence.blocks, fresh)
        self.offered(fresh[:taken])
        return taken < len(fresh)

    def offer_decoded(self, tokens: list[int], start: int, stop: int) -> None:
        """The same for chunks of `tokens` [0, stop), of which decode steps computed those from `start` on, while the
        history does not know of them yet."""
        history = self.history
        before = history.tokens, history.computed
        history.tokens, history.computed = tokens, stop
        history.mark_decoded(start, stop)
        names = self.names(stop)
        if start < stop:
            history.decoded.pop()
        history.tokens, history.computed = before
        self.offer(names)

    def recheck(self) -> None:
        """To be called directly after whatever may have exchanged a chunk of the sequence (see `Saver.recheck`)."""
        self._offered -= self.store.saver.recheck()

    def write_out(self) -> list[NamedChunk]:
        """Returns when all rows that are in host memory are on disk, or cannot be: the names of those that are not."""
        names, missing = self.names(self.history.computed), -1
        waiting = self.offer(names)
        while True:
            try:
                self.store.saver.flush()
            finally:
                self._offered.clear()
            before, missing = missing, len(fresh := self.fresh(names))
            if not fresh or not waiting or missing == before:  # all there, all tried, or nothing gets any further
                return fresh
            waiting = self.offer(names)

    def enter_names(self) -> None:
        """The history says which chunks on disk it is made of; its last, partly filled one replaces the one before."""
        history, disk = self.history, self.store.disk
        names = self.names(history.computed)
        tail = names[-1].key.hex() if history.computed % CHUNK else ""
        if history.tail and history.tail != tail and not history.tail_shared:
            disk.remove([bytes.fromhex(history.tail)])
        history.tail_shared = history.tail_shared and history.tail == tail
        history.tail, history.keys = tail, [name.key.hex() for name in names]
        self._pin(name.key for name in names)

    def save(self) -> None:
        """Offers everything that is not on disk yet, and writes the history. Raises StoreError."""
        if self.preload is None:
            self.offer(self.names(self.history.computed))
        self.enter_names()
        self.store.put(self.history)
        self.store.disk.touch(keys_of(self.history))

    def replaced(self, sequence: Sequence | None) -> None:
        """Another sequence (or none) has taken the place of the one that was: nothing of it is on disk yet."""
        self.sequence = sequence
        self._offered.clear()

    def unpin(self) -> None:
        """The store may evict the session's chunks again."""
        self.store.disk.unpin(self._pinned)
        self._pinned.clear()

    def _pin(self, keys: Iterable[bytes]) -> None:
        fresh = set(keys) - self._pinned
        self.store.disk.pin(fresh)
        self._pinned |= fresh

    def leave_host(self) -> None:
        """Gives the session's host memory to others; its chunks stay on disk as long as the store keeps them."""
        if self.sequence is not None:
            self.write_out()
            self.drop()
        self.unpin()

    def check_integrity(self) -> None:
        """Asserts that history and sequence agree."""
        if self.sequence is not None:
            assert self.sequence.position == self.history.computed or self.preload is not None
            assert self.sequence.tokens == self.history.tokens


def keys_of(history: History) -> Seq[bytes]:
    """Keys of a session's chunks on disk, the first one first."""
    return [bytes.fromhex(key) for key in history.keys]
