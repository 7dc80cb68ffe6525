"""KV cache of one session in host memory and on disk."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ..core import BLOCK_SIZE, BlockTable
from ..errors import DiskError, StoreError
from ..model_runner.sequence import Sequence
from ..outputs import Stats
from ..storage.block_store import STATE, NamedBlock, read_through
from ..storage.loader import BlockLoader, DamagedBlockError
from ..storage.naming import name_blocks
from ..storage.saver import layer_bytes
from .context import SessionContext
from .history import History
from .session_blocks import SessionBlocks


class SessionKV(SessionBlocks):
    """KV cache of one session: its sequence in host memory, its blocks on disk, and the transfers between them.

    Computed KV is written to disk in the background. Evicting the session from host memory therefore waits only for
    blocks that are not written yet.

    Attributes:
        sequence: The sequence in host memory. If None, host memory holds only blocks cached by the prefix tree.
        loader: Loads blocks from disk into `sequence`; None if no load is in progress.
        loaded_tokens: Number of tokens that the last load read from disk.
        last_stats: Statistics of the last turn, or None before the first.
        claims: Whether the store records that the blocks are in use (`StorageTier.claim`), because no history does.
    """

    claims = False

    def __init__(self, context: SessionContext, history: History) -> None:
        super().__init__(context, history)
        self.sequence: Sequence | None = None
        self.loader: BlockLoader | None = None
        self.loaded_tokens = 0
        self.last_stats: Stats | None = None
        self._host_tokens = 0
        self._enqueued: set[bytes] = set()
        self._unwritten: bytes | None = None

    @property
    def pool_bytes(self) -> int:
        """Host memory in bytes that the whole session needs."""
        return self.runner.pool.bytes_for(len(self.history.tokens))

    # -------------------------------------------------------------------------------------------------------- loading

    def ready(self, capacity: int) -> Sequence:
        """Return the session's sequence with capacity for `capacity` tokens, and start loading its KV from disk.

        Raises:
            PoolFullError: The sequence does not fit in the pool.
        """
        if self.sequence is not None and not self.runner.continues(self.sequence):
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
        """Start loading the KV into host memory: all layers if `whole`, else as many as the read buffer holds.

        Raises:
            PoolFullError: The sequence does not fit in the pool.
        """
        if self.sequence is None and self.history.computed:
            self.sequence = self._restore(len(self.history.tokens) + 1, whole=whole)

    def wait(self, layer: int) -> None:
        """Wait until the KV of `layer` is in host memory.

        Raises:
            DamagedBlockError: A block on disk is damaged. The next load skips it, and its tokens are recomputed.
        """
        if self.loader is None:
            return
        try:
            self.loader.wait(layer)
        except DamagedBlockError as damage:
            self._broken.add(damage.key)
            raise

    def load_all(self) -> None:
        """Wait until all layers are loaded. Raise DamagedBlockError if a block is damaged."""
        if self.loader is not None and self.sequence is not None:
            for layer in range(self.runner.adapter.geometry.layers):
                self.wait(layer)
            self.end_loading()
            self.runner.reload(self.sequence)

    def materialise(self) -> Sequence:
        """Load the whole sequence into the pool, finish pending writes, and return it. Raise PoolFullError."""
        while True:
            if self.sequence is None:
                self.sequence = self._restore(len(self.history.tokens) + 1, whole=True)
            try:
                self.load_all()
            except DamagedBlockError:
                self.drop()
                continue
            self.context.saver.flush()
            return self.sequence

    def end_loading(self) -> float:
        """Close the loader and record its load rate. Return the seconds spent waiting for it."""
        if self.loader is None:
            return 0.0
        self.loader.close()
        loaded = layer_bytes(self.runner.pool, self.loaded_tokens) * self.context.storage.layers
        self.context.load_rate = self.loader.load_seconds / max(1, loaded)
        stalled = self.loader.stall_seconds
        self.loader = None
        return stalled

    def drop(self) -> None:
        """Release the sequence. KV that is not loaded yet is discarded and not added to the prefix tree."""
        if self.sequence is None:
            return
        self.context.saver.wait_for(self.sequence.blocks)
        if self.loader is not None:
            arrived = self.loader.finished
            self.end_loading()
            if not arrived:
                self.runner.pool.truncate(self.sequence.blocks, min(self._host_tokens, self.sequence.blocks.length))
        self.runner.free(self.sequence)
        self.sequence = None

    def relearn(self) -> None:
        """Rebuild resident KV and policy state (`Runner.relearn`) after an interruption.

        Drop the sequence if KV cannot be read back, or if its recurrent state is incomplete.
        """
        assert self.sequence is not None
        if self._recurrent:
            self.drop()
            return
        try:
            self.runner.relearn(self.sequence)
        except DiskError:
            self.drop()

    def end_turn(self) -> None:
        """Prepare the sequence for the time between turns. The history holds the turn already."""
        assert self.sequence is not None
        if self._recurrent:  # the next turn begins from the snapshot behind the last full block
            self.history.forget_from(self.sequence.position // BLOCK_SIZE * BLOCK_SIZE)
            self.runner.suspend(self.sequence)
            self.recheck()
        elif self.sequence.interrupted:
            self.relearn()

    def _restore(self, capacity: int, *, whole: bool = False) -> Sequence:
        """Build a sequence from cached blocks, and start loading further blocks from disk."""
        history, runner, storage = self.history, self.runner, self.context.storage
        blocks = self._match()
        self._host_tokens = blocks.length
        with runner.cache_manager.released_on_error(blocks):
            found, known, snapshot = self._find(blocks)
            if known < history.computed:
                self._lose_from(known)
        sequence = self.adopt(blocks, capacity, known, snapshot)
        self.loaded_tokens = known - self._host_tokens
        if found:
            size = sum(placed.block.layer_bytes for placed in found) * storage.layers
            layers = runner.adapter.geometry.layers
            ahead = layers if whole else self.context.read_buffer(size, len(history.tokens) - known)
            try:
                self.loader = BlockLoader(runner.pool, blocks, found, ahead)
            except BaseException:
                # These blocks have no KV yet, so `free` must not add them to the prefix tree.
                runner.pool.truncate(blocks, self._host_tokens)
                runner.free(sequence)
                raise
        return sequence

    def adopt(self, blocks: BlockTable, capacity: int, known: int, snapshot: int | None = None) -> Sequence:
        """Return a sequence of the history that owns `blocks`.

        The KV of its first `known` tokens is available, or is being loaded. `snapshot`: see `Runner.adopt`.
        """
        history = self.history
        try:
            sequence = self.runner.adopt(
                history.tokens, blocks, capacity=capacity, known=known, exact=min(history.exact, known),
                shift=history.shift, provenance=history.provenance, snapshot=snapshot,
            )  # fmt: skip
        except BaseException:
            if self._states is not None and snapshot is not None:
                self._states.release(snapshot)
            raise
        if snapshot is not None:
            sequence.snapshots[known] = snapshot  # published with the blocks
        sequence.keeps_decoded = self._recurrent and self._keeps_decoded
        return sequence

    @property
    def _keeps_decoded(self) -> bool:
        """Whether a later turn reuses the KV of decoded tokens, also if it is approximate."""
        return True

    def _lose_from(self, known: int) -> None:
        """Mark KV from token `known` on as lost, so that it is recomputed."""
        history, stop = self.history, len(self.history.tokens) // BLOCK_SIZE * BLOCK_SIZE
        history.forget_from(known)
        if history.truncation_id and not known:
            history.restart(history.tokens)
        # After one damaged block, later ones may be damaged too. Read them to find out, so that they are stored again.
        for name in self.stored(stop)[known // BLOCK_SIZE :]:
            read_through(self.context.storage, name)

    # --------------------------------------------------------------------------------------------------------- saving

    def all_names(self) -> list[NamedBlock]:
        """Return the names of all blocks that hold KV of computed tokens."""
        computed = self.history.computed
        names, states = self.stored(computed), list[NamedBlock]()
        if self._states is not None:
            states = self._states.needed(names, self.sequence, start=max(self.history.starts, default=0))
        return [*names, *self._shown(computed), *states]

    def fresh(self, names: Iterable[NamedBlock]) -> list[NamedBlock]:
        """Return the blocks that are neither on disk nor enqueued for writing."""
        return [name for name in names if name.key not in self.context.storage and name.key not in self._enqueued]

    def mark_enqueued(self, names: Iterable[NamedBlock]) -> None:
        """Record that these blocks are enqueued for writing."""
        self._enqueued.update(name.key for name in names)

    def enqueue(self, names: Iterable[NamedBlock]) -> bool:
        """Enqueue blocks that are not on disk. Return True if the write buffer was full and some were left out."""
        fresh = self.fresh(names)
        if not fresh or self.sequence is None or self.loader is not None:
            return False
        rows = [name for name in fresh if name.group != STATE]
        accepted = rows[: self.context.saver.save(self.sequence.blocks, rows, claim=self.claims)]
        if self._states is not None:
            states = [name for name in fresh if name.group == STATE]
            accepted += self._states.save(self.sequence, states, claim=self.claims)
        self.mark_enqueued(accepted)
        return len(accepted) < len(fresh)

    def enqueue_decoded(self, tokens: Seq[int], start: int, stop: int) -> None:
        """Enqueue the blocks of `tokens[:stop]`. Tokens from `start` on were decoded; the history may lack them."""
        if self.runner.pool.groups.full:
            self.enqueue(name_blocks(self._provenance, tokens, stop, self.history.decoded_with(start, stop)))

    def recheck(self) -> None:
        """Cancel writes of replaced blocks. Call after any operation that may replace a block of the sequence."""
        self._enqueued -= self.context.saver.recheck()

    def write_out(self) -> list[NamedBlock]:
        """Write all blocks in host memory to disk and wait. Return the names of blocks that could not be written."""
        names = self.all_names()
        self._arrived()  # another session may have removed a shared block after it was enqueued
        while fresh := self.fresh(names):
            waiting = self.enqueue(names)
            self._arrived()
            missing = self.fresh(names)
            if not missing or not waiting or len(missing) == len(fresh):  # all blocks tried, or no progress
                return missing
        return []

    def _arrived(self) -> None:
        try:
            self.context.saver.flush()
        finally:
            self._enqueued.clear()

    def enter_names(self) -> None:
        """Record the block names in the history, and remove the previous partly filled block from disk."""
        history, names = self.history, self.all_names()
        tail = [name.key.hex() for name in names if name.count < BLOCK_SIZE]
        before = [key for key in (history.tail, *history.tail_windows) if key]
        if before and before != tail and not history.tail_shared:
            self._remove([bytes.fromhex(key) for key in before])
        history.tail_shared = history.tail_shared and before == tail
        full = self.runner.pool.groups.full and bool(tail)
        history.tail, history.tail_windows = tail[0] if full else "", tail[full:]
        history.keys = [name.key.hex() for name in names]
        states = [name.key.hex() for name in names if name.group == STATE]
        if not history.tail_shared:  # snapshots that only this session needed
            self._remove([bytes.fromhex(key) for key in history.states if key not in states])
        history.states = states
        self._pin(name.key for name in names)

    def _remove(self, keys: Seq[bytes]) -> None:
        # A pending write that ends after the removal would store the block again.
        if any(key in self._enqueued and key not in self.context.storage for key in keys):
            self.context.saver.flush()
        self.context.storage.remove(keys)

    def save(self) -> None:
        """Enqueue all unsaved blocks and write the history. Raise StoreError if it cannot be written."""
        self.hand_over()
        self.persist()

    def hand_over(self) -> None:
        """Enqueue all unsaved blocks and take a snapshot of the history for `persist`."""
        if self.loader is None:
            self.enqueue(self.all_names())
        self.enter_names()
        self._unwritten = self.history.to_bytes()

    def persist(self) -> None:
        """Write the snapshot taken by `hand_over`, if there is one.

        Raises:
            StoreError: The history cannot be written. The next turn or `close` writes it.
        """
        # No lock is needed. Only the session's owner calls this method, before it starts another turn. Other sessions
        # can only remove blocks meanwhile, and missing blocks are recomputed. The store writes documents one at a time,
        # so an older history never overwrites a newer one.
        if (data := self._unwritten) is None:
            return
        try:
            self.context.storage.put(self.history.document, data)
        except StoreError:
            self._unwritten = None
            raise
        self._unwritten = None
        self.context.storage.touch(self.history.block_keys)

    def replace(self, sequence: Sequence | None) -> None:
        """Replace the sequence with a new one. Its blocks are not enqueued for writing yet."""
        self.sequence = sequence
        self._enqueued.clear()

    def needed(self, *, answering: bool) -> set[bytes]:
        """Return the keys of the blocks that the session needs on disk.

        If `answering`, include blocks of the current turn, which are not in the history yet.
        """
        if answering:
            return {*self.history.block_keys, *self._pinned, *self._enqueued}
        self._arrived()
        return set(self.history.block_keys)

    def give_up(self) -> None:
        """Drop the sequence without saving it, and wait for pending writes. Call before the session is deleted."""
        self._unwritten = None
        self.drop()
        self._arrived()

    def leave_host(self) -> None:
        """Write unsaved blocks to disk, and release the session's host memory and pins."""
        if self.sequence is not None:
            self.write_out()
            self.drop()
        self.unpin()

    def check_integrity(self) -> None:
        if self.sequence is not None:
            assert self.sequence.position == self.history.computed or self.loader is not None
            assert self.sequence.tokens == self.history.tokens
