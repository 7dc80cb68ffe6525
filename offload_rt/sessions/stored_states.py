"""Snapshots of recurrent state (hybrid models) in a session store."""

from __future__ import annotations

import threading
from collections.abc import Container
from collections.abc import Sequence as Seq

from ..core import BLOCK_SIZE
from ..engine.snapshot_keeper import SnapshotKeeper
from ..kv_cache.snapshot_table import needed_positions
from ..kv_cache.state_pool import StatePool
from ..model_runner.sequence import Sequence
from ..storage.block_file import ALIGNMENT
from ..storage.disk_store import DiskStore
from ..storage.naming import NamedBlock
from ..storage.policies import recomputation_cost
from ..storage.saver import WRITE_BUFFER, Saver

DISK_SLACK = 1024
"""After a restart, up to this many tokens, plus twice the length of an edit, may have to be computed again.

A smaller number would need more snapshots, and each snapshot takes as much space as the KV of hundreds of tokens.
"""


class StoredStates:
    """Chooses snapshots of recurrent state, writes them to disk in the background, and reads them.

    A snapshot is the state after a KV block. It is stored as a block whose name is derived from that KV block
    (`NamedBlock.state`).
    """

    def __init__(self, store: DiskStore, saver: Saver, pool: StatePool, snapshots: SnapshotKeeper) -> None:
        self._store, self._saver, self._pool, self._snapshots = store, saver, pool, snapshots
        self._part = -(-pool.slot_bytes // (store.layers * ALIGNMENT)) * ALIGNMENT
        self._most = max(WRITE_BUFFER, 2 * pool.slot_bytes)
        self._waiting = 0
        self._mutex = threading.Lock()

    def needed(self, names: Seq[NamedBlock], sequence: Sequence | None, start: int) -> list[NamedBlock]:
        """Return the names of the snapshots that must be on disk so that a session can continue after a restart.

        `names` lists the blocks of all computed tokens. The last turn begins at `start`, and repeating it needs the
        last snapshot before `start`. Snapshots that no longer exist are left out.
        """
        states = {(name.index + 1) * BLOCK_SIZE: name.state() for name in names if name.count == BLOCK_SIZE}
        known = [
            position
            for position, name in states.items()
            if self._snapshots.find(sequence, position) is not None or name.key in self._store
        ]
        needed = needed_positions(sum(name.count for name in names), known, DISK_SLACK)
        again = max((position for position in known if position <= start), default=None)
        if again is not None and again not in needed:
            needed.insert(1, again)
        return [states[position] for position in needed]

    def last(self, names: Seq[NamedBlock], start: int, stop: int, damaged: Container[bytes]) -> int:
        """Return the position of the last snapshot on disk in [start, stop], as a number of tokens.

        Return `start` if there is none. `names` lists all blocks of the text. `damaged` contains the keys of blocks to
        ignore.
        """
        for name in reversed(names[start // BLOCK_SIZE : stop // BLOCK_SIZE]):
            key = name.state().key
            if key in self._store and key not in damaged:
                return (name.index + 1) * BLOCK_SIZE
        return start

    def save(self, sequence: Sequence, names: Seq[NamedBlock], *, for_prompt: bool) -> list[NamedBlock]:
        """Queue those snapshots in `names` for writing that are in host memory. Return the names of the queued ones.

        `for_prompt` marks them as used by a request without a session name.
        """
        slots = [self._snapshots.find(sequence, (name.index + 1) * BLOCK_SIZE) for name in names]
        each = zip(names, slots, strict=True)
        tokens = sequence.position
        return [
            name
            for name, slot in each
            if slot is not None and self.save_slot(name, slot, tokens, for_prompt=for_prompt)
        ]

    def save_slot(self, name: NamedBlock, slot: int, tokens: int, *, for_prompt: bool = False) -> bool:
        """Copy the snapshot in `slot` and queue the copy for writing. Return False if the write buffer is full.

        The order of eviction depends on `tokens`, the number of tokens in the text. For `for_prompt`, see `save`.
        """
        with self._mutex:
            if self._waiting + self._pool.slot_bytes > self._most:
                return False
            self._waiting += self._pool.slot_bytes
        data, cost = self._pool.read(slot), recomputation_cost(tokens, name.index * BLOCK_SIZE)
        self._saver.notify(lambda: self._write(name, data, cost, for_prompt=for_prompt))
        return True

    def _write(self, name: NamedBlock, data: bytes, cost: int, *, for_prompt: bool) -> None:
        writer = None
        try:
            writer = self._store.begin(name, self._part, cost, for_prompt=for_prompt)
            if writer is not None:
                for layer in range(self._store.layers):
                    part = memoryview(data)[layer * self._part : (layer + 1) * self._part]
                    complete = len(part) == self._part
                    writer.write(layer, part if complete else memoryview(bytes(part).ljust(self._part, b"\0")))
                writer.commit()
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        finally:
            with self._mutex:
                self._waiting -= self._pool.slot_bytes

    def load(self, name: NamedBlock, slot: int) -> bool:
        block = self._store.find(name)
        if block is None or block.layer_bytes != self._part:
            return False
        data = bytearray(self._part * self._store.layers)
        for layer in range(self._store.layers):
            if not block.read_layer(layer, memoryview(data)[layer * self._part : (layer + 1) * self._part]):
                return False
        self._pool.write(slot, memoryview(data)[: self._pool.slot_bytes])
        return True
