"""KV cache of one session."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ..core import BLOCK_SIZE, BlockTable
from ..errors import DiskError, StoreError
from ..model_runner.sequence import Sequence
from ..outputs import Stats
from ..storage.loader import BlockLoader, DamagedBlockError
from ..storage.naming import STATE, NamedBlock
from ..storage.saver import layer_bytes
from .context import SessionContext
from .history import History
from .session_blocks import SessionBlocks


class SessionKV:
    """KV cache of one session: its sequence in host memory, its blocks on disk, and the transfers between the two.

    New KV is written to disk in the background, so an eviction from host memory rarely has to wait.

    Attributes:
        blocks: Names and locations of the session's blocks on disk.
        sequence: The session's sequence in host memory, or None.
        loader: Loads blocks from disk into `sequence`. None if no load is in progress.
        loaded_tokens: Number of tokens that the last load read from disk.
        for_prompt: Whether the KV belongs to a request without a session name. The store then marks its blocks
            (`DiskStore.mark_for_prompts`).
        keeps_decoded: Whether later turns reuse the approximate KV of decoded tokens.
    """

    for_prompt = False
    keeps_decoded = True

    def __init__(self, context: SessionContext, history: History) -> None:
        self.context, self.runner, self.history = context, context.runner, history
        self.blocks = SessionBlocks(context, history)
        self._recurrent = context.runner.states is not None
        self.sequence: Sequence | None = None
        self.loader: BlockLoader | None = None
        self.loaded_tokens = 0
        self.last_stats: Stats | None = None
        self._host_tokens = 0
        self._enqueued: set[bytes] = set()
        self._unwritten: bytes | None = None

    @property
    def pool_bytes(self) -> int:
        return self.runner.pool.bytes_for(len(self.history.tokens))

    # -------------------------------------------------------------------------------------------------------- loading

    def ready(self, capacity: int) -> Sequence:
        """Return the session's sequence with KV slots for `capacity` tokens. Its KV may still be loading.

        Raises PoolFullError if the sequence does not fit in the pool.
        """
        if self.sequence is not None and not self.runner.continues(self.sequence):
            self.drop()
        if self.sequence is None:
            self.sequence = self._restore(capacity)
            return self.sequence
        sequence = self.sequence
        self.runner.pool.reserve(sequence.blocks, capacity)
        self.cancel_replaced()
        sequence.tokens = list(self.history.tokens)
        sequence.trace = sequence.trace.restart(reused=sequence.position)
        sequence.trace.prompt_tokens = 0
        return sequence

    def fetch(self, *, all_layers: bool) -> None:
        """If the session's KV is not in host memory, start loading it from disk.

        Unless `all_layers` is True, only the layers that a turn needs at its start are loaded (see `read_buffer`).
        Raises PoolFullError.
        """
        if self.sequence is None and self.history.computed:
            self.sequence = self._restore(len(self.history.tokens) + 1, all_layers=all_layers)

    def wait(self, layer: int) -> None:
        """Wait until the KV of `layer` is in host memory.

        Raises DamagedBlockError if a block on disk is damaged. The next load skips this block, and its KV is computed
        again.
        """
        if self.loader is None:
            return
        try:
            self.loader.wait(layer)
        except DamagedBlockError as damage:
            self.blocks.damaged.add(damage.key)
            raise

    def load_all(self) -> None:
        if self.loader is not None and self.sequence is not None:
            for layer in range(self.runner.adapter.geometry.layers):
                self.wait(layer)
            self.end_loading()
            self.runner.reload(self.sequence)

    def materialise(self) -> Sequence:
        """Load the whole sequence into the pool and wait for pending writes. Raises PoolFullError."""
        while True:
            if self.sequence is None:
                self.sequence = self._restore(len(self.history.tokens) + 1, all_layers=True)
            try:
                self.load_all()
            except DamagedBlockError:
                self.drop()
                continue
            self.context.saver.flush()
            return self.sequence

    def end_loading(self) -> float:
        """Close the loader and record its speed. Return how long, in seconds, computation waited for it."""
        if self.loader is None:
            return 0.0
        self.loader.close()
        loaded = layer_bytes(self.runner.pool, self.loaded_tokens) * self.context.storage.layers
        self.context.load_rate = self.loader.load_seconds / max(1, loaded)
        stalled = self.loader.stall_seconds
        self.loader = None
        return stalled

    def drop(self) -> None:
        """Free the sequence. Blocks that have been loaded stay in the prefix tree."""
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

    def reset_policy_state(self) -> None:
        """Rebuild resident KV and policy state from KV in host memory. If this is impossible, drop the sequence."""
        assert self.sequence is not None
        if self._recurrent:
            self.drop()
            return
        try:
            self.runner.reset_policy_state(self.sequence)
        except DiskError:
            self.drop()

    def end_turn(self) -> None:
        """Free recurrent state or rebuild an interrupted policy state, after a turn was added to the history."""
        assert self.sequence is not None
        if self._recurrent:  # the next turn begins from the snapshot after the last full block
            self.history.forget_from(self.sequence.position // BLOCK_SIZE * BLOCK_SIZE)
            self.runner.suspend(self.sequence)
            self.cancel_replaced()
        elif self.sequence.interrupted:
            self.reset_policy_state()

    def _match(self) -> BlockTable:
        return self.runner.match(self.history.tokens, self.history.provenance, self.history.floor)

    def _restore(self, capacity: int, *, all_layers: bool = False) -> Sequence:
        history, runner, storage = self.history, self.runner, self.context.storage
        blocks = self._match()
        with runner.cache_manager.released_on_error(blocks):
            found, known, snapshot = self.blocks.find(blocks)
            self._host_tokens = blocks.length  # `find` may have shortened the blocks
            if known < history.computed:
                self._forget_from(known)
        sequence = self.adopt(blocks, capacity, known, snapshot)
        self.loaded_tokens = known - self._host_tokens
        if found:
            size = sum(placed.block.layer_bytes for placed in found) * storage.layers
            layers = runner.adapter.geometry.layers
            ahead = layers if all_layers else self.context.read_buffer(size, len(history.tokens) - known)
            try:
                self.loader = BlockLoader(runner.pool, blocks, found, ahead)
            except BaseException:
                # The KV of these blocks is not loaded yet, so `free` must not add them to the prefix tree.
                runner.pool.truncate(blocks, self._host_tokens)
                runner.free(sequence)
                raise
        return sequence

    def adopt(self, blocks: BlockTable, capacity: int, known: int, snapshot: int | None = None) -> Sequence:
        """Create the sequence of this session, which then owns `blocks`.

        The KV of the first `known` tokens is in host memory or is being loaded. For `snapshot`, see `Runner.adopt`.
        """
        history, runner = self.history, self.runner
        try:
            sequence = runner.adopt(
                history.tokens, blocks, capacity=capacity, known=known, exact=min(history.exact, known),
                shift=history.shift, provenance=history.provenance, snapshot=snapshot,
            )  # fmt: skip
        except BaseException:
            if runner.snapshots is not None and snapshot is not None:
                runner.snapshots.give_back(snapshot)
            raise
        if snapshot is not None:
            sequence.snapshots[known] = snapshot  # it is published with the blocks
        sequence.keeps_decoded = self._recurrent and self.keeps_decoded
        return sequence

    def _forget_from(self, known: int) -> None:
        history, stop = self.history, len(self.history.tokens) // BLOCK_SIZE * BLOCK_SIZE
        history.forget_from(known)
        if history.truncation_id and not known:
            history.restart(history.tokens)
        # If one block is damaged, later ones may be damaged too. Check them, so that damaged blocks are stored again.
        for name in self.blocks.full_names(stop)[known // BLOCK_SIZE :]:
            self.context.storage.verify(name)

    # --------------------------------------------------------------------------------------------------------- saving

    def all_names(self) -> list[NamedBlock]:
        computed = self.history.computed
        names, states = self.blocks.full_names(computed), list[NamedBlock]()
        if self.context.states is not None:
            states = self.context.states.needed(names, self.sequence, start=max(self.history.starts, default=0))
        return [*names, *self.blocks.window_names(computed), *states]

    def unsaved(self, names: Iterable[NamedBlock]) -> list[NamedBlock]:
        """Return the `names` of blocks that are neither on disk nor queued for writing."""
        return [name for name in names if name.key not in self.context.storage and name.key not in self._enqueued]

    def mark_enqueued(self, names: Iterable[NamedBlock]) -> None:
        self._enqueued.update(name.key for name in names)

    def enqueue(self, names: Iterable[NamedBlock]) -> bool:
        """Queue the unsaved blocks in `names` for writing. Return True if the write buffer was too small."""
        fresh = self.unsaved(names)
        if not fresh or self.sequence is None or self.loader is not None:
            return False
        rows = [name for name in fresh if name.group != STATE]
        accepted = rows[: self.context.saver.save(self.sequence.blocks, rows, for_prompt=self.for_prompt)]
        if self.context.states is not None:
            states = [name for name in fresh if name.group == STATE]
            accepted += self.context.states.save(self.sequence, states, for_prompt=self.for_prompt)
        self.mark_enqueued(accepted)
        return len(accepted) < len(fresh)

    def enqueue_decoded(self, tokens: Seq[int], start: int, stop: int) -> None:
        """Queue the blocks of `tokens[:stop]` for writing. The running turn has decoded the tokens [start, stop)."""
        if self.runner.pool.groups.full:
            self.enqueue(self.blocks.decoded_names(tokens, start, stop))

    def cancel_replaced(self) -> None:
        """Cancel the writes of blocks that are no longer in the sequence. Call this after any change of its blocks."""
        self._enqueued -= self.context.saver.cancel_replaced()

    def write_out(self) -> list[NamedBlock]:
        """Write all blocks in host memory to disk and wait. Return the names of blocks that could not be written."""
        names = self.all_names()
        self._flush()  # another session may have removed a shared block after it was queued
        while fresh := self.unsaved(names):
            waiting = self.enqueue(names)
            self._flush()
            missing = self.unsaved(names)
            if not missing or not waiting or len(missing) == len(fresh):  # all blocks were tried, or no progress
                return missing
        return []

    def _flush(self) -> None:
        try:
            self.context.saver.flush()
        finally:
            self._enqueued.clear()

    def _record_names(self, names: Seq[NamedBlock]) -> None:
        """Record `names` in the history, and remove the partly filled blocks that they replace."""
        history = self.history
        tail = [name.key.hex() for name in names if name.count < BLOCK_SIZE]
        before, shared = [key for key in (history.tail, *history.tail_windows) if key], history.tail_shared
        if before and before != tail and not history.tail_shared:
            self._remove([bytes.fromhex(key) for key in before])
        history.tail_shared = history.tail_shared and before == tail
        full = self.runner.pool.groups.full and bool(tail)
        history.tail, history.tail_windows = tail[0] if full else "", tail[full:]
        history.keys = [name.key.hex() for name in names]
        states = [name.key.hex() for name in names if name.group == STATE]
        self._drop_states(states, shared=shared)
        history.states = states
        self.blocks.pin(name.key for name in names)

    def _drop_states(self, needed: Seq[str], *, shared: bool) -> None:
        """Allow the eviction of all snapshots of recurrent state except those in `needed`.

        Snapshots of removed text are deleted unless a fork may need them (`shared`).
        """
        dropped = {bytes.fromhex(key) for key in self.history.states} - {bytes.fromhex(key) for key in needed}
        if not dropped:
            return
        # Snapshots of the remaining text are only unpinned, because other sessions and prompts may need them.
        names = self.blocks.full_names(self.history.computed)
        remaining = {name.state().key for name in names if name.count == BLOCK_SIZE}
        self.blocks.unpin(dropped & remaining)
        if not shared:
            self._remove(list(dropped - remaining))

    def _remove(self, keys: Seq[bytes]) -> None:
        # A write that is still pending would store the block again after the removal.
        if any(key in self._enqueued and key not in self.context.storage for key in keys):
            self.context.saver.flush()
        self.context.storage.remove(keys)

    def save(self) -> None:
        self.enqueue_all()
        self.persist()

    def enqueue_all(self) -> None:
        """Queue all unsaved blocks for writing, and copy the history so that `persist` can write it."""
        names = self.all_names()
        self.enqueue(names)
        self._record_names(names)
        self._unwritten = self.history.to_bytes()

    def persist(self) -> None:
        """Write the history that `enqueue_all` copied, unless it has been written already. Raises StoreError."""
        # No lock is needed. Only the session's owner calls this method, before the next turn starts. During the call,
        # other sessions can only remove blocks, and missing blocks are computed again. The store writes documents one
        # at a time, so an older history never overwrites a newer one.
        if (data := self._unwritten) is None:
            return
        try:
            self.context.storage.documents.put(self.history.document, data)
        except StoreError:
            self._unwritten = None
            raise
        self._unwritten = None
        self.context.storage.touch(self.history.block_keys)

    def set_sequence(self, sequence: Sequence | None) -> None:
        """Set the sequence, and treat its blocks as unsaved."""
        self.sequence = sequence
        self._enqueued.clear()

    def keys_in_use(self, *, answering: bool) -> set[bytes]:
        """Return the keys of the blocks on disk that the session needs.

        `answering` adds the blocks of the running turn, which are not in the history yet.
        """
        if answering:
            return {*self.history.block_keys, *self.blocks.pinned, *self._enqueued}
        self._flush()
        return set(self.history.block_keys)

    def discard(self) -> None:
        """Drop the sequence and wait for pending writes. Called before the files of the session are deleted."""
        self._unwritten = None
        self.drop()
        self._flush()

    def evict(self) -> None:
        """Write unsaved blocks to disk and free the session's host memory.

        The store may then evict its blocks from disk.
        """
        if self.sequence is not None:
            self.write_out()
            self.drop()
        self.blocks.unpin_all()

    def check_integrity(self) -> None:
        if self.sequence is not None:
            assert self.sequence.position == self.history.computed or self.loader is not None
            assert self.sequence.tokens == self.history.tokens
