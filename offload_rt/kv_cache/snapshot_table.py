"""Slots for snapshots of recurrent state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core import BLOCK_SIZE


class SnapshotTable:
    """Assigns slots of a `StatePool` to published blocks. The table stores only ids, no states. Not thread-safe.

    A snapshot is the recurrent state after the last token of a block. Its slot is *pending* until the block is
    published, and *kept* after that. If a slot is needed, the least recently used kept snapshot is evicted. When a
    block leaves the prefix tree, its snapshot is freed.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(reversed(range(slots)))
        self._pending: set[int] = set()
        self._kept: dict[int, int] = {}  # slot of each block's snapshot, least recently used first

    def __len__(self) -> int:
        return self.slots - len(self._free)

    def take(self) -> int | None:
        """Allocate a pending slot, evicting a snapshot if necessary. Return None if all slots are pending."""
        if not self._free:
            if not self._kept:
                return None
            self.forget([next(iter(self._kept))])
        slot = self._free.pop()
        self._pending.add(slot)
        return slot

    def keep(self, block: int, slot: int) -> None:
        """Keep a pending snapshot for the published block `block`. If the block already has a snapshot, free `slot`."""
        if block in self._kept:
            self.release(slot)
        else:
            self._pending.remove(slot)
            self._kept[block] = slot

    def release(self, slot: int) -> None:
        self._pending.remove(slot)
        self._free.append(slot)

    def slot_of(self, block: int) -> int | None:
        return self._kept.get(block)

    def positions(self, blocks: Sequence[int]) -> list[int]:
        """Return the token positions at which there are snapshots. `blocks` is a path from the root of the tree."""
        return [i * BLOCK_SIZE for i, block in enumerate(blocks, start=1) if block in self._kept]

    def usable(self, blocks: Sequence[int]) -> int:
        """Return the length in blocks of the longest prefix of `blocks` that ends with a snapshot."""
        return next((n for n in range(len(blocks), 0, -1) if blocks[n - 1] in self._kept), 0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Mark the snapshots of `blocks` as used now, with the last of them as the most recently used."""
        for block in blocks:
            if (slot := self._kept.pop(block, None)) is not None:
                self._kept[block] = slot

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if (slot := self._kept.pop(block, None)) is not None:
                self._free.append(slot)

    def check_integrity(self, published: Iterable[int]) -> None:
        uses = [*self._free, *self._pending, *self._kept.values()]
        assert sorted(uses) == list(range(self.slots))
        assert self._kept.keys() <= set(published)


def needed_positions(tokens: int, positions: Iterable[int], slack: int = BLOCK_SIZE) -> list[int]:
    """Return the positions at which a text of `tokens` tokens needs snapshots, in descending order.

    A position is the number of tokens before the snapshot. The distance from the end of the text roughly doubles from
    one snapshot to the next, so that after an edit d tokens before the end, at most 2 d + `slack` tokens are
    recomputed. If a snapshot can be made after every block, this stays true while the text grows.

    Args:
        tokens: Length of the text in tokens.
        positions: Positions up to `tokens` at which a snapshot exists or can be made.
        slack: Number of tokens that may be recomputed after any edit, at least 64.
    """
    distances = sorted(tokens - position for position in positions)
    needed = distances[:1]
    for i, distance in enumerate(distances[1:], start=1):
        farther = distances[i + 1] if i + 1 < len(distances) else tokens  # The state of an empty text is always known.
        # The next snapshot must be close enough for an edit one token before the last needed snapshot.
        if farther > 2 * (needed[-1] + 1) + slack:
            needed.append(distance)
    return [tokens - distance for distance in needed]
