"""Where the rows of one session are: in host memory, on disk, or on their way between the two."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ..core import CHUNK, BlockTable
from ..errors import DiskError, StoreError
from ..model_runner.sequence import Sequence
from ..outputs import Stats
from ..storage.chunk_store import NamedChunk, PlacedChunk, StoredChunk, read_through
from ..storage.loader import ChunkLoader, DamagedChunkError, fits
from ..storage.saver import layer_bytes
from .context import SessionContext
from .history import History
from .naming import Lineage, name_chunks


class SessionKV:
    """The KV rows of a session: its sequence while it is in host memory, its chunks on disk by name, and what brings
    the one from the other. Everything that is computed is saved behind the computation, so that leaving host memory
    costs no more than what has not been written yet.

    sequence: None where host memory has nothing of it but what the prefix tree kept. loader: brings rows that are on
    their way into `sequence`; None where nothing is on its way. loaded_tokens: how many came from disk the last time.
    last_stats: what the last turn cost.
    """

    def __init__(self, context: SessionContext, history: History) -> None:
        self.context, self.runner, self.history = context, context.runner, history
        self.sequence: Sequence | None = None
        self.loader: ChunkLoader | None = None
        self.loaded_tokens = 0
        self.last_stats: Stats | None = None
        self._host_tokens = 0
        self._pinned: set[bytes] = set()
        self._enqueued: set[bytes] = set()
        self._broken: set[bytes] = set()
        self._unwritten: bytes | None = None

    @property
    def pool_bytes(self) -> int:
        """Bytes of host memory that the whole session takes when it is there."""
        return self.runner.pool.bytes_for(len(self.history.tokens))

    # ---------------------------------------------------------------------------------------------------- coming back

    def ready(self, capacity: int) -> Sequence:
        """Returns the session's sequence with all tokens of its history and room for `capacity`; what is on disk is on
        its way. Raises PoolFullError."""
        if self.sequence is not None and not self.runner.pool.readable(self.sequence.blocks):
            self.drop()
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
        if self.loader is None:
            return
        try:
            self.loader.wait(layer)
        except DamagedChunkError as damage:
            self._broken.add(damage.key)
            raise

    def load_all(self) -> None:
        """Waits for all layers of what is being loaded. Raises DamagedChunkError."""
        if self.loader is not None and self.sequence is not None:
            for layer in range(self.runner.adapter.geometry.layers):
                self.wait(layer)
            self.end_loading()
            self.runner.reload(self.sequence)

    def materialise(self) -> Sequence:
        """Returns the sequence with all its rows in the pool, and nothing of it waiting to be written. Raises
        PoolFullError."""
        while True:
            if self.sequence is None:
                self.sequence = self._restore(len(self.history.tokens) + 1, whole=True)
            try:
                self.load_all()
            except DamagedChunkError:
                self.drop()
                continue
            self.context.saver.flush()
            return self.sequence

    def end_loading(self) -> float:
        """Ends the loading, and takes note of how fast it was. Returns the seconds that were waited for it."""
        if self.loader is None:
            return 0.0
        self.loader.close()
        loaded = layer_bytes(self.runner.pool, self.loaded_tokens) * self.context.storage.layers
        self.context.load_rate = self.loader.load_seconds / max(1, loaded)
        stalled = self.loader.stall_seconds
        self.loader = None
        return stalled

    def drop(self) -> None:
        """Gives the sequence back; rows that were still to come are forgotten, not published."""
        if self.sequence is None:
            return
        self.context.saver.flush()
        if self.loader is not None:
            arrived = self.loader.finished
            self.end_loading()
            if not arrived:
                self.runner.pool.truncate(self.sequence.blocks, min(self._host_tokens, self.sequence.blocks.length))
        self.runner.free(self.sequence)
        self.sequence = None

    def relearn(self) -> None:
        """`Runner.relearn`; where a disk does not give the rows for it, they are nowhere any more."""
        assert self.sequence is not None
        try:
            self.runner.relearn(self.sequence)
        except DiskError:
            self.drop()

    def _restore(self, capacity: int, *, whole: bool = False) -> Sequence:
        """Returns a sequence with what host memory and disk have of the tokens; reading the latter begins."""
        history, runner, storage = self.history, self.runner, self.context.storage
        blocks = runner.match(history.tokens, history.provenance, history.floor)
        self._host_tokens = blocks.length
        with runner.room.released_on_error(blocks):
            found, known = self._find(blocks)
            if known < history.computed:
                self._lose_from(known)
        sequence = runner.adopt(
            history.tokens, blocks, capacity=capacity, known=known, exact=min(history.exact, known),
            shift=history.shift, provenance=history.provenance,
        )  # fmt: skip
        self.loaded_tokens = known - self._host_tokens
        if found:
            size = sum(placed.chunk.layer_bytes for placed in found) * storage.layers
            layers = runner.adapter.geometry.layers
            ahead = layers if whole else self.context.read_buffer(size, len(history.tokens) - known)
            try:
                self.loader = ChunkLoader(runner.pool, blocks, found, ahead)
            except BaseException:
                runner.pool.truncate(blocks, self._host_tokens)  # nothing is loaded: `free` must not publish it
                runner.free(sequence)
                raise
        return sequence

    def _lose_from(self, known: int) -> None:
        """Rows from token `known` on are gone and will be computed anew. Where one chunk is damaged others may be: what
        lies on disk behind it is read through, so that it can be stored anew too."""
        history, stop = self.history, len(self.history.tokens) // CHUNK * CHUNK
        history.forget_from(known)
        if history.truncation_id and not known:
            history.restart(history.tokens)
        for name in self.stored(stop)[known // CHUNK :]:
            read_through(self.context.storage, name)

    def _find(self, blocks: BlockTable) -> tuple[list[PlacedChunk], int]:
        """Stored chunks behind what `blocks` has, and how many tokens there are with them: with what sliding layers
        show to the next token, or none."""
        found, known = self._find_full(blocks.length)
        shown = [name for name in self._shown(known) if name.index not in blocks.windows]
        chunks = [self._find_one(name) for name in shown] if known > blocks.length else []
        windows = [PlacedChunk(n.index, c, n.group) for n, c in zip(shown, chunks, strict=False) if c is not None]
        if len(windows) < len(chunks) or known == blocks.length:
            return [], blocks.length
        self._pin(placed.chunk.key for placed in (*found, *windows))
        return [*found, *windows], known

    def _find_one(self, name: NamedChunk) -> StoredChunk | None:
        """The chunk on disk, if it is whole as far as is known, and of this layout."""
        chunk = self.context.storage.find(name.parent, name.lineage, name.tokens)
        right = chunk is not None and fits(self.runner.pool, chunk, name.count)
        return chunk if right and name.key not in self._broken else None

    def _find_full(self, known: int) -> tuple[list[PlacedChunk], int]:
        """Stored chunks of layers that see everything, from token `known` on without a gap: full ones, and the tail
        where they end. One token at least is left to compute. Where rows are rounded, what a turn that did not end had
        computed is no part of it: a prefill attends to its own rows as they were before rounding."""
        history = self.history
        stop = min(len(history.tokens) - 1, history.computed) if self.context.private else len(history.tokens) - 1
        if not self.runner.pool.groups.full:
            # No layer has full blocks on disk, but the prefix tree may know more tokens than this session has computed.
            return [], max(known, min(stop, history.computed))
        names = self.names(stop // CHUNK * CHUNK)
        tail = self.names(history.computed)[history.computed // CHUNK :]
        found: list[PlacedChunk] = []
        for name in [*names[known // CHUNK :], *tail]:
            if name.index != known // CHUNK or name.index * CHUNK + name.count == known:
                continue
            chunk = self._find_one(name)
            if chunk is None:
                continue
            found.append(PlacedChunk(name.index, chunk))
            known = name.index * CHUNK + name.count
            if name.count < CHUNK:
                break
        return found, known

    # --------------------------------------------------------------------------------------------------------- saving

    def names(self, stop: int) -> list[NamedChunk]:
        """Returns the chunks of the history's tokens [0, stop) by their names on disk."""
        return name_chunks(self._lineage, self.history.tokens, stop, self.history.decoded)

    def _shown(self, stop: int) -> list[NamedChunk]:
        """The chunks of sliding layers that hold what the windows of the token after the first `stop` show."""
        groups = self.runner.pool.groups
        if not groups.sliding:
            return []
        names = self.names(stop)[groups.first_seen(stop, self.history.floor) // CHUNK :]
        return [name.window(group) for name in names for group in groups.groups if group]

    def stored(self, stop: int) -> list[NamedChunk]:
        """The chunks of the history's tokens [0, stop) that hold rows of layers that see everything."""
        return self.names(stop) if self.runner.pool.groups.full else []

    def all_names(self) -> list[NamedChunk]:
        """The chunks on disk that hold the rows of all computed tokens."""
        computed = self.history.computed
        return [*self.stored(computed), *self._shown(computed)]

    @property
    def _lineage(self) -> Lineage:
        context, history = self.context, self.history
        owner = history.id if context.private else ""
        return Lineage(context.storage.root, self.runner.lineage, history.provenance, owner)

    def fresh(self, names: Iterable[NamedChunk]) -> list[NamedChunk]:
        """Returns those that are neither on disk nor on their way to it."""
        return [name for name in names if name.key not in self.context.storage and name.key not in self._enqueued]

    def mark_enqueued(self, names: Iterable[NamedChunk]) -> None:
        """Takes note that these are on their way to disk."""
        self._enqueued.update(name.key for name in names)

    def enqueue(self, names: Iterable[NamedChunk]) -> bool:
        """Hands chunks that are not on disk to the saver. Returns whether it had no room for some of them, so that they
        have to be handed to it again."""
        fresh = self.fresh(names)
        if not fresh or self.sequence is None or self.loader is not None:
            return False
        taken = self.context.saver.save(self.sequence.blocks, fresh)
        self.mark_enqueued(fresh[:taken])
        return taken < len(fresh)

    def enqueue_decoded(self, tokens: Seq[int], start: int, stop: int) -> None:
        """Hands over chunks of `tokens` [0, stop), of which decode steps computed those from `start` on; the history
        need not know of them yet."""
        if self.runner.pool.groups.full:
            self.enqueue(name_chunks(self._lineage, tokens, stop, self.history.decoded_with(start, stop)))

    def recheck(self) -> None:
        """To be called directly after whatever may have exchanged a chunk of the sequence (see `Saver.recheck`)."""
        self._enqueued -= self.context.saver.recheck()

    def write_out(self) -> list[NamedChunk]:
        """Waits until all rows that are in host memory are on disk, or cannot be. Returns the names of those that are
        not."""
        names = self.all_names()
        self._arrived()  # another session with the same chunk may have removed it since it was handed over
        while fresh := self.fresh(names):
            waiting = self.enqueue(names)
            self._arrived()
            missing = self.fresh(names)
            if not missing or not waiting or len(missing) == len(fresh):  # all tried, or nothing gets any further
                return missing
        return []

    def _arrived(self) -> None:
        """Waits until nothing is on its way to disk."""
        try:
            self.context.saver.flush()
        finally:
            self._enqueued.clear()

    def enter_names(self) -> None:
        """Lets the history say which chunks on disk it is made of; its last, partly filled one replaces the one
        before."""
        history, names = self.history, self.all_names()
        tail = [name.key.hex() for name in names if name.count < CHUNK]
        before = [key for key in (history.tail, *history.tail_windows) if key]
        if before and before != tail and not history.tail_shared:
            self._remove([bytes.fromhex(key) for key in before])
        history.tail_shared = history.tail_shared and before == tail
        full = self.runner.pool.groups.full and bool(tail)
        history.tail, history.tail_windows = tail[0] if full else "", tail[full:]
        history.keys = [name.key.hex() for name in names]
        self._pin(name.key for name in names)

    def _remove(self, keys: Seq[bytes]) -> None:
        """Removes chunks from disk; those that are on their way there must have arrived, or they would stay."""
        if any(key in self._enqueued and key not in self.context.storage for key in keys):
            self.context.saver.flush()
        self.context.storage.remove(keys)

    def save(self) -> None:
        """Hands everything that is not on disk yet to the saver, and writes the history. Raises StoreError."""
        self.hand_over()
        self.write_history()

    def hand_over(self) -> None:
        """Hands everything that is not on disk yet to the saver, and says what the history is: `write_history` writes
        that, whatever has come since."""
        if self.loader is None:
            self.enqueue(self.all_names())
        self.enter_names()
        self._unwritten = self.history.to_bytes()

    def write_history(self) -> None:
        """Makes durable what was handed over; nothing happens where nothing was. Raises StoreError, and then it is the
        next turn, or closing, that writes.

        Needs no lock: the session's owner alone calls it, and takes no other turn before. What others do to the store
        meanwhile takes chunks at most, and a history whose chunks are gone is computed again, as one whose chunks have
        not arrived. An older history never comes behind a newer one: documents are written one after the other."""
        if (data := self._unwritten) is None:
            return
        try:
            self.context.storage.put(self.history.document, data)
        except StoreError:
            self._unwritten = None
            raise
        self._unwritten = None
        self.context.storage.touch(self.history.chunk_keys)

    def replace(self, sequence: Sequence | None) -> None:
        """Puts another sequence (or none) in the place of the one that was: nothing of it is on disk yet."""
        self.sequence = sequence
        self._enqueued.clear()

    def unpin(self) -> None:
        """Lets the store evict the session's chunks again."""
        self.context.storage.unpin(self._pinned)
        self._pinned.clear()

    def _pin(self, keys: Iterable[bytes]) -> None:
        fresh = set(keys) - self._pinned
        self.context.storage.pin(fresh)
        self._pinned |= fresh

    def needed(self, *, answering: bool) -> set[bytes]:
        """Return the keys of the chunks that the session needs on disk. answering: whether a turn is being computed,
        whose chunks the history does not know yet."""
        if answering:
            return {*self.history.chunk_keys, *self._pinned, *self._enqueued}
        self._arrived()
        return set(self.history.chunk_keys)

    def give_up(self) -> None:
        """Drop the sequence before the session is deleted, and wait until none of its chunks is on its way to disk."""
        self._unwritten = None
        self.drop()
        self._arrived()

    def leave_host(self) -> None:
        """Gives the session's host memory to others; its chunks stay on disk as long as the store keeps them."""
        if self.sequence is not None:
            self.write_out()
            self.drop()
        self.unpin()

    def check_integrity(self) -> None:
        """Asserts that history and sequence agree."""
        if self.sequence is not None:
            assert self.sequence.position == self.history.computed or self.loader is not None
            assert self.sequence.tokens == self.history.tokens
