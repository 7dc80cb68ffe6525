"""The prefix tree, which maps token prefixes to the full blocks that contain their KV."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core import BLOCK_SIZE

TOKEN_BYTES = 8

EXACT = "exact"
"""KV provenance key of KV that was computed with exact attention, in a prefill or with the policy "full"."""


def root_key(namespace: str) -> bytes:
    """Return the key that first blocks have as parent: a digest of `namespace`, which names the model and KV format."""
    return hashlib.blake2b(namespace.encode(), digest_size=16, person=b"offload-rt root").digest()


def block_key(parent: bytes, provenance_key: str, tokens: bytes) -> bytes:
    """Return the key of a block, a 32-byte digest that is the same in every process.

    Args:
        parent: Key of the previous block, or `root_key`.
        tokens: Up to 64 token ids as little-endian int64.
    """
    name = provenance_key.encode()
    digest = hashlib.blake2b(parent, digest_size=32, person=b"offload-rt chunk")
    digest.update(len(name).to_bytes(8, "little") + name + tokens)
    return digest.digest()


def pack_tokens(tokens: Sequence[int], stop: int) -> list[bytes]:
    """Return the first `stop` token ids as little-endian int64, in one bytes object per block.

    The last block may be incomplete.
    """
    data = np.asarray(tokens[:stop], dtype="<i8").tobytes()
    size = BLOCK_SIZE * TOKEN_BYTES
    return [data[start : start + size] for start in range(0, len(data), size)]


def _count_equal_tokens(block: bytes, other: bytes) -> int:
    """Return how many leading tokens are the same in both. `other` must not be longer than `block`."""
    return next((i for i in range(0, len(other), 8) if block[i : i + 8] != other[i : i + 8]), len(other)) // 8


@dataclass(eq=False)
class _Node:
    key: bytes
    parent: _Node | None
    provenance_key: str
    tokens: bytes
    block: int
    used: int  # value of the tree's clock at the last match, publication or release
    worth: int = 0  # number of blocks in the longest sequence that has used this block
    idle: bool = False  # only the tree references the block
    queued: bool = False  # the eviction queue has an entry for the block
    children: dict[bytes, _Node] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Position in the eviction order. The block with the lowest rank is evicted first."""
        # A block of a long sequence is expensive to recompute, so it counts as used more recently.
        return self.used + self.worth


class PrefixTree:
    """A trie of full blocks. Each node is one block, which can be found by its id or by the tokens of its path.

    The tree owns one reference to each of its blocks. The caller adds this reference for each block that `insert`
    returns, and drops it for each block that `evict` or `remove` returns.

    A block is *idle* if no sequence references it. A sequence that references a block also references all ancestors of
    the block, so all descendants of an idle block are idle too. Evicting leaf by leaf can therefore free all idle
    blocks. The eviction order depends on when a block was last used and on how expensive it is to recompute
    (`_Node.rank`), so that a short request does not evict a long conversation.

    Not thread-safe.
    """

    def __init__(self, namespace: str = "") -> None:
        self._root = root_key(namespace)
        self._nodes: dict[bytes, _Node] = {}
        self._of: dict[int, _Node] = {}
        self._tops: dict[bytes, _Node] = {}
        self._leaves: list[tuple[int, bytes, _Node]] = []
        self._clock = 0
        self.idle = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        return block in self._of

    @property
    def blocks(self) -> Iterable[int]:
        return self._of.keys()

    def match(
        self, tokens: Sequence[int], *provenance_keys: str, usable: Callable[[Sequence[int]], int] = len
    ) -> list[int]:
        """Return the blocks of the longest prefix of `tokens` in the tree. At least one token is left to compute.

        The caller must add a reference to each block.

        Args:
            *provenance_keys: Accepted KV provenance keys. For each block, the first key that matches is used.
            usable: Function that returns how many of the leading matched blocks can be used.
        """
        self._clock += 1
        path: list[_Node] = []
        for data in pack_tokens(tokens, max(0, len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE):
            parent = path[-1] if path else None
            found = (self._find(parent, key, data) for key in provenance_keys)
            node = next((node for node in found if node is not None), None)
            if node is None:
                break
            path.append(node)
        del path[usable([node.block for node in path]) :]
        for node in path:
            node.used, node.worth = self._clock, max(node.worth, len(path))
            self.idle -= node.idle
            node.idle = False
        return [node.block for node in path]

    def known_tokens(self, tokens: Sequence[int], *provenance_keys: str) -> int:
        """Return how many leading tokens of `tokens` are in the tree, even if they match only a part of a block."""
        parent, known = None, 0
        for data in pack_tokens(tokens, len(tokens)):
            node = next((n for key in provenance_keys if (n := self._find(parent, key, data)) is not None), None)
            if node is None:
                children = self._tops if parent is None else parent.children
                # Blocks with other provenance keys may belong to another client (cache salt), so their tokens must not
                # be revealed.
                mine = (child for child in children.values() if child.provenance_key in provenance_keys)
                return known + max((_count_equal_tokens(child.tokens, data) for child in mine), default=0)
            parent, known = node, known + BLOCK_SIZE
        return known

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], provenance_key: str, has_one_user: Callable[[int], bool]
    ) -> tuple[list[int], dict[int, int]]:
        """Insert the full blocks of a sequence.

        Args:
            tokens: Tokens of the sequence.
            blocks: Ids of the full blocks of the sequence. Blocks that are already in the tree stay unchanged.
            provenance_key: KV provenance key of the new blocks.
            has_one_user: Function that returns whether only this sequence references a block.

        Returns:
            A list of the blocks that were added to the tree, and a dict of replacements. The caller must add a
            reference to each added block. The dict maps block indices to blocks that were already in the tree with the
            same tokens and key. These must replace the sequence's blocks.
        """
        self._clock += 1
        known = next((i for i in range(len(blocks), 0, -1) if blocks[i - 1] in self._of), 0)
        parent = self._of[blocks[known - 1]] if known else None
        fresh: list[int] = []
        instead: dict[int, int] = {}
        pieces = pack_tokens(tokens[known * BLOCK_SIZE :], (len(blocks) - known) * BLOCK_SIZE)
        for i, data in enumerate(pieces, start=known):
            key = block_key(parent.key if parent else self._root, provenance_key, data)
            node = self._find(parent, provenance_key, data)
            if node is None:
                if key in self._nodes:
                    break  # digest collision: the blocks from here on cannot be shared
                node = self._add(_Node(key, parent, provenance_key, data, blocks[i], self._clock))
                fresh.append(blocks[i])
            elif not has_one_user(blocks[i]):
                # A fork that keeps the old block could later reference a block of the tree but not its ancestors.
                break
            else:
                instead[i] = node.block
                self.idle -= node.idle
                node.idle = False
            node.used, node.worth = self._clock, max(node.worth, len(blocks))
            parent = node
        return fresh, instead

    def release(self, blocks: Iterable[int]) -> None:
        """Mark blocks that no sequence references as idle. Blocks that are not in the tree are ignored."""
        self._clock += 1
        for block in blocks:
            node = self._of.get(block)
            if node is not None and not node.idle:
                node.idle = True
                node.used = self._clock
                self.idle += 1
                self._queue_if_idle_leaf(node)

    def evict(self, count: int) -> list[int]:
        """Remove up to `count` idle blocks, always the leaf with the lowest rank first. Return their ids."""
        gone: list[int] = []
        while len(gone) < count and self._leaves:
            rank, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if self._nodes.get(node.key) is not node or not node.idle or node.children:
                continue  # The node is queued again when it becomes an idle leaf again.
            if node.rank > rank:  # The block has been used since it was queued.
                self._queue_if_idle_leaf(node)
                continue
            gone += self._remove(node)
        return gone

    def remove(self, block: int) -> list[int]:
        """Remove `block` and its descendants. Return the ids of all removed blocks."""
        return self._remove(self._of[block])

    def check_integrity(self, refs: Callable[[int], int]) -> None:
        assert len(self._of) == len(self._nodes)
        assert all(node.key == key and self._of[node.block] is node for key, node in self._nodes.items())
        assert sum(node.idle for node in self._nodes.values()) == self.idle
        seen = 0
        stack: list[tuple[_Node | None, _Node]] = [(None, node) for node in self._tops.values()]
        while stack:
            parent, node = stack.pop()
            seen += 1
            assert node.parent is parent
            assert node.key == block_key(parent.key if parent else self._root, node.provenance_key, node.tokens)
            assert node.idle == (refs(node.block) == 1) and refs(node.block) >= 1
            assert not (node.idle and any(not child.idle for child in node.children.values())), (
                "block in use below an idle block"
            )
            assert not (node.idle and not node.children and not node.queued), "idle leaf is not queued for eviction"
            stack += [(node, child) for child in node.children.values()]
        assert seen == len(self._nodes)

    def _find(self, parent: _Node | None, provenance_key: str, data: bytes) -> _Node | None:
        node = self._nodes.get(block_key(parent.key if parent else self._root, provenance_key, data))
        # A collision of digests is a miss.
        if node is None or node.parent is not parent or node.provenance_key != provenance_key or node.tokens != data:
            return None
        return node

    def _add(self, node: _Node) -> _Node:
        self._nodes[node.key] = self._of[node.block] = node
        self._children(node.parent)[node.key] = node
        return node

    def _children(self, parent: _Node | None) -> dict[bytes, _Node]:
        return self._tops if parent is None else parent.children

    def _queue_if_idle_leaf(self, node: _Node) -> None:
        if node.idle and not node.children and not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.rank, node.key, node))

    def _remove(self, node: _Node) -> list[int]:
        del self._children(node.parent)[node.key]
        if node.parent is not None:
            self._queue_if_idle_leaf(node.parent)
        gone = [node]
        for other in gone:  # The loop is breadth-first: it appends to the list that it iterates over.
            gone += other.children.values()
            self.idle -= other.idle
            del self._nodes[other.key], self._of[other.block]
        return [other.block for other in gone]
