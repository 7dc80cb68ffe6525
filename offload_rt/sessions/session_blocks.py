"""Name the stored blocks of one session, and find them in host memory and on disk."""

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
    """Names of the blocks of one session, and their locations in the prefix tree or the store."""

    def __init__(self, context: SessionContext, history: History) -> None:
        self.context, self.runner, self.history = context, context.runner, history
        self._recurrent, self._states = context.runner.states is not None, context.states
        self._pinned: set[bytes] = set()
        self._broken: set[bytes] = set()

    def names(self, stop: int) -> list[NamedBlock]:
        """Return the names of the blocks of tokens [0, stop)."""
        return name_blocks(self._provenance, self.history.tokens, stop, self.history.decoded)

    def _shown(self, stop: int) -> list[NamedBlock]:
        """Return the sliding-window blocks that the token at index `stop` attends to."""
        return window_blocks(self.runner.pool.groups, self.names(stop), stop, self.history.floor)

    def stored(self, stop: int) -> list[NamedBlock]:
        return self.names(stop) if self.runner.pool.groups.full else []

    @property
    def _provenance(self) -> SessionProvenance:
        context, history = self.context, self.history
        owner = history.id if context.private else ""
        return SessionProvenance(context.storage.root, self.runner.provenance_key, history.provenance, owner)

    def _match(self) -> BlockTable:
        """Return the blocks of the session that are in the prefix tree."""
        return self.runner.match(self.history.tokens, self.history.provenance, self.history.floor)

    def _find(self, blocks: BlockTable) -> tuple[list[PlacedBlock], int, int | None]:
        """Find blocks on disk that continue `blocks`.

        If the snapshot at the end of `blocks` is evicted meanwhile, `blocks` is shortened to an earlier snapshot.

        Returns:
            found: Blocks on disk, in order.
            known: Number of tokens whose KV will be available when these blocks are loaded.
            snapshot: Slot with the recurrent state after these tokens. None if no state was read from disk.
        """
        while True:
            found, known = self._find_blocks(blocks)
            if self._states is None or known == blocks.length:
                return found, known, None
            name = self.names(known)[-1].state()
            assert self.runner.snapshots is not None
            snapshot = self.runner.snapshots.take()
            if snapshot is None:  # The file is intact, and a later turn can read it.
                return [], blocks.length, None
            if self._states.load(name, snapshot):
                self._pin([name.key])
                return found, known, snapshot
            self.runner.snapshots.give_back(snapshot)
            self._broken.add(name.key)
            self._shorten(blocks)

    def _shorten(self, blocks: BlockTable) -> None:
        """Shorten `blocks` to the last place that has a snapshot.

        Reserving a slot for a state from disk may have evicted the snapshot that `_match` found. An earlier place needs
        other sliding-window blocks than those in `blocks`, so nothing is kept of a model with sliding-window layers.
        """
        pool = self.runner.pool
        assert pool.cached.snapshots is not None
        count = pool.cached.snapshots.usable(blocks.ids)
        if count < len(blocks.ids):
            pool.truncate(blocks, 0 if blocks.windows else count * BLOCK_SIZE)

    def _find_blocks(self, blocks: BlockTable) -> tuple[list[PlacedBlock], int]:
        """Find blocks on disk that continue `blocks`.

        All sliding-window blocks that the next token attends to are among the found blocks or in `blocks`. For models
        with recurrent state, there is a snapshot of the state after the last token whose KV will then be available.
        """
        found, known = self._find_full(blocks.length)
        names, find_one = self.names(known), cache(self._find_one)
        known = self._with_state(names, blocks.length, known)
        while known > blocks.length:
            names = names[: -(-known // BLOCK_SIZE)]
            shown = window_blocks(self.runner.pool.groups, names, known, self.history.floor)
            stored = [(name, find_one(name)) for name in shown if name.index not in blocks.windows]
            missing = [name.index for name, block in stored if block is None]
            if not missing:
                found = [placed for placed in found if placed.place * BLOCK_SIZE < known]
                found += [PlacedBlock(name.index, block, name.group) for name, block in stored if block is not None]
                self._pin(placed.block.key for placed in found)
                return found, known
            known = self._with_state(names, blocks.length, max(missing) * BLOCK_SIZE)
        return [], blocks.length

    def _with_state(self, names: Seq[NamedBlock], start: int, known: int) -> int:
        """Return how many of the `known` tokens can be used.

        For models with recurrent state, these are the tokens before the last snapshot, and otherwise all.
        """
        if self._states is not None:
            return self._states.last(names, start, known, self._broken)
        return start if self._recurrent else known

    def _find_one(self, name: NamedBlock) -> StoredBlock | None:
        block = self.context.storage.find(name)
        right = block is not None and block.layer_bytes == layer_bytes(self.runner.pool, name.count)
        return block if right and name.key not in self._broken else None

    def _find_full(self, known: int) -> tuple[list[PlacedBlock], int]:
        """Find consecutive blocks of full-attention layers on disk, from token `known` on.

        Return the blocks, and the number of tokens whose KV will then be available. The last block may be partly
        filled. At least one token is left to compute.
        """
        history = self.history
        # A prefill attends to new KV before rounding it. With a rounded (quantised) format, the stored KV of an
        # unfinished turn differs from the KV that the repeated prefill attends to. Therefore these blocks are not used.
        stop = min(len(history.tokens) - 1, history.computed) if self.context.private else len(history.tokens) - 1
        if not self.runner.pool.groups.full:
            # The model has only sliding-window layers. The prefix tree may contain more tokens than this session has
            # computed.
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

    def unpin(self) -> None:
        self.context.storage.unpin(self._pinned)
        self._pinned.clear()

    def _pin(self, keys: Iterable[bytes]) -> None:
        fresh = set(keys) - self._pinned
        self.context.storage.pin(fresh)
        self._pinned |= fresh

    def _unpin(self, keys: Iterable[bytes]) -> None:
        unneeded = set(keys) & self._pinned
        self.context.storage.unpin(unneeded)
        self._pinned -= unneeded
