"""Store snapshots of recurrent state. Each snapshot is one block, which is written and checked like a KV block."""

from __future__ import annotations

import threading

from ..core import BLOCK_SIZE
from ..kv_cache.state_pool import StatePool
from .block_file import ALIGNMENT
from .block_store import NamedBlock, StorageTier
from .policies import recomputation_cost
from .saver import WRITE_BUFFER, Saver


class StateBlocks:
    """Write snapshots to a store in the background, and read them back.

    The bytes of a snapshot are split into as many equal parts as a block has layers. The name of the snapshot is
    derived from the name of the KV block before it (`NamedBlock.state`). Therefore it can be found, shared, deleted and
    evicted like a KV block.

    Args:
        store: Store of the KV blocks.
        saver: Saver whose worker thread writes the snapshots, in the order of the calls.
        states: Memory of the snapshots in host memory.
    """

    def __init__(self, store: StorageTier, saver: Saver, states: StatePool) -> None:
        self._store, self._saver, self._states = store, saver, states
        self._part = -(-states.slot_bytes // (store.layers * ALIGNMENT)) * ALIGNMENT
        self._most = max(WRITE_BUFFER, 2 * states.slot_bytes)
        self._waiting = 0
        self._mutex = threading.Lock()

    def save(self, name: NamedBlock, slot: int, tokens: int, *, claim: bool = False) -> bool:
        """Copy a snapshot, and queue the copy for writing. Return False if too many bytes wait to be written.

        Args:
            name: Name of the snapshot.
            slot: Slot of the snapshot in host memory.
            tokens: Number of tokens in the text, which determines the order of eviction.
            claim: Whether a prompt without a session name uses the snapshot (`StorageTier.claim`).
        """
        with self._mutex:
            if self._waiting + self._states.slot_bytes > self._most:
                return False
            self._waiting += self._states.slot_bytes
        data, cost = self._states.read(slot), recomputation_cost(tokens, name.index * BLOCK_SIZE)
        self._saver.notify(lambda: self._write(name, data, cost, claim=claim))
        return True

    def _write(self, name: NamedBlock, data: bytes, cost: int, *, claim: bool) -> None:
        """Write a snapshot, on the saver's thread. If this fails, the state is computed again later."""
        writer = None
        try:
            writer = self._store.begin(name.parent, name.provenance_key, name.tokens, self._part, cost, claim=claim)
            if writer is not None:
                for layer in range(self._store.layers):
                    part = memoryview(data)[layer * self._part : (layer + 1) * self._part]
                    whole = len(part) == self._part
                    writer.write(layer, part if whole else memoryview(bytes(part).ljust(self._part, b"\0")))
                writer.commit()
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        finally:
            with self._mutex:
                self._waiting -= self._states.slot_bytes

    def load(self, name: NamedBlock, slot: int) -> bool:
        """Read a snapshot into a slot. Return False if it is not in the store or is damaged."""
        block = self._store.find(name.parent, name.provenance_key, name.tokens)
        if block is None or block.layer_bytes != self._part:
            return False
        data = bytearray(self._part * self._store.layers)
        for layer in range(self._store.layers):
            if not block.read_layer(layer, memoryview(data)[layer * self._part : (layer + 1) * self._part]):
                return False
        self._states.write(slot, memoryview(data)[: self._states.slot_bytes])
        return True
