"""Find the blocks of a session on disk.

The name of a block is a hash of its tokens and of all earlier tokens (`NamedBlock`). Equal texts therefore have equal
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import cache

from ..core import BLOCK_SIZE, BlockTable
from ..storage.block_file import StoredBlock
from ..storage.loader import PlacedBlock
from ..storage.naming import NamedBlock, SessionProvenance, name_blocks, window_blocks
from ..storage.saver import layer_bytes
from .context import SessionContext
from .history import History


class SessionBlocks:
    """Names the blocks of one session, finds them on disk, and protects them from eviction.

    Attributes:
        pinned: Keys of blocks that are protected from eviction.
        damaged: Keys of damaged blocks. These blocks are ignored.
    """

    def __init__(self, context: SessionContext, history: History) -> None:
        self._context, self._runner, self._history = context, context.runner, history
        self.pinned: set[bytes] = set()
        self.damaged: set[bytes] = set()

    def names(self, stop: int) -> list[NamedBlock]:
        return name_blocks(self._provenance, self._history.tokens, stop, self._history.decoded)

    def full_names(self, stop: int) -> list[NamedBlock]:
        """Return the names of the full-attention blocks for the first `stop` tokens."""
        return self.names(stop) if self._runner.pool.groups.full else []

    def window_names(self, stop: int) -> list[NamedBlock]:
        """Return the names of the sliding-window blocks that the token at index `stop` attends to."""
        return window_blocks(self._runner.pool.groups, self.names(stop), stop, self._history.floor)

    def decoded_names(self, tokens: Seq[int], start: int, stop: int) -> list[NamedBlock]:
        """Return the names of the blocks of `tokens[:stop]`. The running turn has decoded the tokens [start, stop)."""
        return name_blocks(self._provenance, tokens, stop, self._history.decoded_with(start, stop))

    @property
    def _provenance(self) -> SessionProvenance:
        context, history = self._context, self._history
        owner = history.id if context.private else ""
        return SessionProvenance(context.storage.root, self._runner.provenance_key, history.provenance, owner)

    # --------------------------------------------------------------------------------------------------------- finding

    def find(self, blocks: BlockTable) -> tuple[list[PlacedBlock], int, int | None]:
        """Find the blocks on disk that continue `blocks`, which are already in host memory.

        In hybrid models, the recurrent state after the found blocks is read into host memory. If this fails, `blocks`
        may be shortened.

        Returns:
            found: Blocks on disk, in order.
            known: Total number of tokens in `blocks` and in the found blocks.
            snapshot: Slot of the recurrent state after `known` tokens, or None if no state was read.
        """
        states, snapshots = self._context.states, self._runner.snapshots
        while True:
            found, known = self._find_blocks(blocks)
            if states is None or snapshots is None or known == blocks.length:
                return found, known, None
            name = self.names(known)[-1].state()
            if (slot := snapshots.take()) is None:  # The file is intact, so a later turn can read it.
                return [], blocks.length, None
            if states.load(name, slot):
                self.pin([name.key])
                return found, known, slot
            snapshots.give_back(slot)
            self.damaged.add(name.key)
            self._shorten(blocks)

    def _shorten(self, blocks: BlockTable) -> None:
        pool = self._runner.pool
        assert pool.cached.snapshots is not None
        count = pool.cached.snapshots.usable(blocks.ids)
        if count < len(blocks.ids):  # a shorter prefix would need other window blocks
            pool.truncate(blocks, 0 if blocks.windows else count * BLOCK_SIZE)

    def _find_blocks(self, blocks: BlockTable) -> tuple[list[PlacedBlock], int]:
        """Find the longest continuation of `blocks` on disk that allows the next token to be computed.

        The next token needs its sliding-window blocks and the recurrent state. Return the found blocks, and the number
        of tokens in them and in `blocks` together.
        """
        found, known = self._find_full(blocks.length)
        names, find_one = self.names(known), cache(self._find_one)
        known = self._with_state(names, blocks.length, known)
        while known > blocks.length:
            names = names[: -(-known // BLOCK_SIZE)]
            shown = window_blocks(self._runner.pool.groups, names, known, self._history.floor)
            stored = [(name, find_one(name)) for name in shown if name.index not in blocks.windows]
            missing = [name.index for name, block in stored if block is None]
            if not missing:
                found = [placed for placed in found if placed.block_index * BLOCK_SIZE < known]
                found += [PlacedBlock(name.index, block, name.group) for name, block in stored if block is not None]
                self.pin(placed.block.key for placed in found)
                return found, known
            known = self._with_state(names, blocks.length, max(missing) * BLOCK_SIZE)
        return [], blocks.length

    def _with_state(self, names: Seq[NamedBlock], start: int, known: int) -> int:
        """Return the largest position in [start, known] whose recurrent state is available, as a number of tokens."""
        if self._context.states is not None:
            return self._context.states.last(names, start, known, self.damaged)
        return known if self._runner.states is None else start

    def _find_one(self, name: NamedBlock) -> StoredBlock | None:
        block = self._context.storage.find(name)
        right = block is not None and block.layer_bytes == layer_bytes(self._runner.pool, name.count)
        return block if right and name.key not in self.damaged else None

    def _find_full(self, known: int) -> tuple[list[PlacedBlock], int]:
        """Find the full-attention blocks on disk that follow the first `known` tokens without a gap.

        Return these blocks and the number of tokens up to their end. At least one token is left for the prefill.
        """
        history = self._history
        # A prefill attends to new KV before it is quantised. If an unfinished turn is repeated, its stored quantised KV
        # differs from the KV that the prefill attends to, so its blocks are not used.
        stop = min(len(history.tokens) - 1, history.computed) if self._context.private else len(history.tokens) - 1
        if not self._runner.pool.groups.full:
            # The model has only sliding layers. `known` may exceed `computed`, because the prefix tree may contain KV
            # that other sessions computed.
            return [], max(known, min(stop, history.computed))
        names = self.names(stop // BLOCK_SIZE * BLOCK_SIZE)
        tail = self.names(history.computed)[history.computed // BLOCK_SIZE :]
        found: list[PlacedBlock] = []
        for name in [*names[known // BLOCK_SIZE :], *tail]:
            if name.index != known // BLOCK_SIZE or name.index * BLOCK_SIZE + name.count == known:
                continue
            block = self._find_one(name)
            if block is None:
                continue
            found.append(PlacedBlock(name.index, block))
            known = name.index * BLOCK_SIZE + name.count
            if name.count < BLOCK_SIZE:
                break
        return found, known

    # --------------------------------------------------------------------------------------------------------- pinning

    def pin(self, keys: Iterable[bytes]) -> None:
        fresh = set(keys) - self.pinned
        self._context.storage.pin(fresh)
        self.pinned |= fresh

    def unpin(self, keys: Iterable[bytes]) -> None:
        unneeded = set(keys) & self.pinned
        self._context.storage.unpin(unneeded)
        self.pinned -= unneeded

    def unpin_all(self) -> None:
        self.unpin(self.pinned)
