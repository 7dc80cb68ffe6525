"""Snapshots of recurrent state beside the prefix tree: which block has one, and which ones a text needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core import BLOCK_SIZE


class SnapshotTable:
    """Assigns the slots of a state pool to published blocks. It stores ids, and no states.

    A snapshot is the recurrent state after the last token of a block and all tokens before it. Its slot is *pending*
    while a sequence still computes the block, and *kept* once the block is published. Kept snapshots are evicted in
    least-recently-used order if a slot is needed, and leave with their block.

    Not thread-safe.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(reversed(range(slots)))
        self._pending: set[int] = set()
        self._kept: dict[int, int] = {}  # slot by block, least recently used first

    def __len__(self) -> int:
        """Return the number of slots in use."""
        return self.slots - len(self._free)

    def take(self) -> int | None:
        """Return a pending slot, of an evicted snapshot if necessary. None if all slots are pending."""
        if not self._free:
            if not self._kept:
                return None
            self.forget([next(iter(self._kept))])
        slot = self._free.pop()
        self._pending.add(slot)
        return slot

    def keep(self, block: int, slot: int) -> None:
        """Keep a pending snapshot for a published block. If the block has one, keep that and free `slot`."""
        if block in self._kept:
            self.release(slot)
        else:
            self._pending.remove(slot)
            self._kept[block] = slot

    def release(self, slot: int) -> None:
        """Free a pending slot."""
        self._pending.remove(slot)
        self._free.append(slot)

    def of(self, block: int) -> int | None:
        """Return the slot with the snapshot of a block, or None."""
        return self._kept.get(block)

    def places(self, blocks: Sequence[int]) -> list[int]:
        """Return the numbers of tokens after which the path `blocks` has a snapshot, in ascending order."""
        return [i * BLOCK_SIZE for i, block in enumerate(blocks, start=1) if block in self._kept]

    def usable(self, blocks: Sequence[int]) -> int:
        """Return the length of the longest prefix of `blocks` that ends with a snapshot."""
        return next((n for n in range(len(blocks), 0, -1) if blocks[n - 1] in self._kept), 0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Mark the snapshots of `blocks` as used, the last one most recently."""
        for block in blocks:
            if (slot := self._kept.pop(block, None)) is not None:
                self._kept[block] = slot

    def forget(self, blocks: Iterable[int]) -> None:
        """Free the snapshots of `blocks`, which leave the prefix tree or are evicted."""
        for block in blocks:
            if (slot := self._kept.pop(block, None)) is not None:
                self._free.append(slot)

    def check_integrity(self, published: Iterable[int]) -> None:
        """Assert that each slot has one use and that only `published` blocks have snapshots."""
        uses = [*self._free, *self._pending, *self._kept.values()]
        assert sorted(uses) == list(range(self.slots))
        assert self._kept.keys() <= set(published)


def needed_places(tokens: int, places: Iterable[int]) -> list[int]:
    """Return the snapshots that a text of `tokens` tokens needs, from the last one to the first.

    With them, an edit d tokens before the end recomputes at most 2 d + 64 tokens, where `places` allow it. Their number
    grows with the logarithm of the length. The property persists if the text grows and a snapshot is added after every
    block.

    Args:
        tokens: Length of the text.
        places: Numbers of tokens, at most `tokens`, after which there is a snapshot or can be one.
    """
    distances = sorted(tokens - place for place in places)
    needed = distances[:1]
    for i, distance in enumerate(distances[1:], start=1):
        farther = distances[i + 1] if i + 1 < len(distances) else None
        # The next snapshot must serve an edit one token before the last needed one.
        if farther is None or farther > 2 * (needed[-1] + 1) + BLOCK_SIZE:
            needed.append(distance)
    return [tokens - distance for distance in needed]
