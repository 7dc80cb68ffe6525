"""The prefix tree: which full chunk holds the KV of which tokens behind which prefix."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core import CHUNK

TOKEN_BYTES = 8


def root_key(namespace: str) -> bytes:
    """The parent key of first chunks: a digest of `namespace` (the model and the number format of its KV)."""
    return hashlib.blake2b(namespace.encode(), digest_size=16, person=b"offload-rt root").digest()


def chunk_key(parent: bytes, lineage: str, tokens: bytes) -> bytes:
    """Return the key of a chunk: a digest of 32 bytes, the same in every process. parent: key of the chunk before it,
    which stands for the namespace and everything before; tokens: up to 64, little-endian int64."""
    name = lineage.encode()
    digest = hashlib.blake2b(parent, digest_size=32, person=b"offload-rt chunk")
    digest.update(len(name).to_bytes(8, "little") + name + tokens)
    return digest.digest()


def pack_tokens(tokens: Sequence[int], stop: int) -> list[bytes]:
    """Returns tokens [0, stop) chunk by chunk, each chunk as the bytes that keys and comparisons are made from:
    little-endian int64, 512 bytes of a full chunk; the last chunk may be a part."""
    data = np.asarray(tokens[:stop], dtype="<i8").tobytes()
    size = CHUNK * TOKEN_BYTES
    return [data[start : start + size] for start in range(0, len(data), size)]


def _same_tokens(chunk: bytes, other: bytes) -> int:
    """How many tokens of 8 bytes both begin with; `chunk` is not the shorter one."""
    return next((i for i in range(0, len(other), 8) if chunk[i : i + 8] != other[i : i + 8]), len(other)) // 8


@dataclass(eq=False)
class _Node:
    """One chunk in the tree. `used`: when it was last matched, published or let go; `idle`: only the tree holds it;
    `queued`: it has an entry in the queue of leaves."""

    key: bytes
    parent: _Node | None
    lineage: str
    tokens: bytes
    chunk: int
    used: int
    idle: bool = False
    queued: bool = False
    children: dict[bytes, _Node] = field(default_factory=dict)


class PrefixTree:
    """A trie of full chunks, found by key and checked by tokens, parent and lineage: a collision of digests is a miss.
    Ids only. The tree holds one reference on each of its chunks, taken and given back by its caller: `insert` returns
    chunks to take one for, `evict` and `unkey` return chunks to give it back for.

    Whoever holds a chunk of the tree holds all its ancestors: a match takes the whole path, a fork takes all, and
    `insert` exchanges a sequence's chunk for the tree's own only where no fork keeps the old path. So a chunk that
    nobody but the tree holds has only such descendants, every idle chunk can be evicted leaf by leaf, and `idle` is
    exactly what eviction can free.

    Leaves wait in a queue by last use, with at most one entry each. An entry is read as a hint: one that is held again
    or has children again is dropped (letting go, or losing the last child, enters it anew), and one that was used
    since goes back in its new place. So finding the oldest idle leaf costs O(log n) on average, with no scan.

    Everything here is mutated by `match`, `insert`, `release`, `evict` and `unkey`, on one thread.
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

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._of

    def match(self, tokens: Sequence[int], *lineages: str, usable: Callable[[Sequence[int]], int] = len) -> list[int]:
        """Chunks of the longest known prefix of `tokens`, never all of them: at least one token is left to compute.
        At each chunk the first of `lineages` that is known goes on; `usable` says how many of the chunks found are of
        use. The caller takes a reference on each."""
        self._clock += 1
        path: list[_Node] = []
        for data in pack_tokens(tokens, max(0, len(tokens) - 1) // CHUNK * CHUNK):
            parent = path[-1] if path else None
            found = (self._find(parent, lineage, data) for lineage in lineages)
            node = next((node for node in found if node is not None), None)
            if node is None:
                break
            path.append(node)
        del path[usable([node.chunk for node in path]) :]
        for node in path:
            node.used = self._clock
            self.idle -= node.idle
            node.idle = False
        return [node.chunk for node in path]

    def known_tokens(self, tokens: Sequence[int], *lineages: str) -> int:
        """Returns how many of the first `tokens` some path has, token by token: from there on the prompt parts from all
        that is here, or nothing more is here. What `match` finds of them is whole chunks. Nothing is taken."""
        parent, known = None, 0
        for data in pack_tokens(tokens, len(tokens)):
            node = next((n for lineage in lineages if (n := self._find(parent, lineage, data)) is not None), None)
            if node is None:
                children = self._tops if parent is None else parent.children
                # Blocks of other lineages may be another client's (cache salts): their tokens must not be visible.
                mine = (child for child in children.values() if child.lineage in lineages)
                return known + max((_same_tokens(child.tokens, data) for child in mine), default=0)
            parent, known = node, known + CHUNK
        return known

    def insert(
        self, tokens: Sequence[int], chunks: Sequence[int], lineage: str, alone: Callable[[int], bool]
    ) -> tuple[list[int], dict[int, int]]:
        """Enters a sequence's full chunks, which hold `tokens`; those that are in the tree already stay as they are.

        Returns the chunks that are new in the tree (take the tree's reference on each), and, by index, the tree's own
        chunks where it knew the same tokens of the same lineage under another id: the caller holds those instead.
        It stops at such a chunk where the sequence is not `alone` in holding it: a fork that kept the old one would
        later hold a chunk of the tree without its ancestors.
        """
        self._clock += 1
        known = next((i for i in range(len(chunks), 0, -1) if chunks[i - 1] in self._of), 0)
        parent = self._of[chunks[known - 1]] if known else None
        fresh: list[int] = []
        instead: dict[int, int] = {}
        pieces = pack_tokens(tokens[known * CHUNK :], (len(chunks) - known) * CHUNK)
        for i, data in enumerate(pieces, start=known):
            key = chunk_key(parent.key if parent else self._root, lineage, data)
            node = self._find(parent, lineage, data)
            if node is None:
                if key in self._nodes:
                    break  # other tokens with the same digest: nothing from here on can be shared
                node = self._add(_Node(key, parent, lineage, data, chunks[i], self._clock))
                fresh.append(chunks[i])
            elif not alone(chunks[i]):
                break
            else:
                instead[i] = node.chunk
                self.idle -= node.idle
                node.idle = False
            node.used = self._clock
            parent = node
        return fresh, instead

    def release(self, chunks: Iterable[int]) -> None:
        """Marks `chunks` idle: only the tree holds them now. Those that it does not know are ignored."""
        self._clock += 1
        for chunk in chunks:
            node = self._of.get(chunk)
            if node is not None and not node.idle:
                node.idle = True
                node.used = self._clock
                self.idle += 1
                self._queue(node)

    def evict(self, count: int) -> list[int]:
        """Drops `count` idle chunks, least recently used leaves first (fewer where there are fewer). Returns them."""
        gone: list[int] = []
        while len(gone) < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if self._nodes.get(node.key) is not node or not node.idle or node.children:
                continue
            if node.used > used:
                self._queue(node)
                continue
            gone += self._remove(node)
        return gone

    def unkey(self, chunk: int) -> list[int]:
        """Drops `chunk` and everything behind it from the tree: its content is about to change. Returns them."""
        return self._remove(self._of[chunk])

    def check_integrity(self, refs: Callable[[int], int]) -> None:
        """Asserts that keys, links, idle marks and queue agree with each other and with the reference counts."""
        assert len(self._of) == len(self._nodes)
        assert all(node.key == key and self._of[node.chunk] is node for key, node in self._nodes.items())
        assert sum(node.idle for node in self._nodes.values()) == self.idle
        seen = 0
        stack: list[tuple[_Node | None, _Node]] = [(None, node) for node in self._tops.values()]
        while stack:
            parent, node = stack.pop()
            seen += 1
            assert node.parent is parent
            assert node.key == chunk_key(parent.key if parent else self._root, node.lineage, node.tokens)
            assert node.idle == (refs(node.chunk) == 1) and refs(node.chunk) >= 1
            assert not (node.idle and any(not child.idle for child in node.children.values())), "held below an idle one"
            assert not (node.idle and not node.children and not node.queued), "an idle leaf that is never evicted"
            stack += [(node, child) for child in node.children.values()]
        assert seen == len(self._nodes)

    def _find(self, parent: _Node | None, lineage: str, data: bytes) -> _Node | None:
        """The child of `parent` with these tokens and lineage, by digest and then by comparison."""
        node = self._nodes.get(chunk_key(parent.key if parent else self._root, lineage, data))
        if node is None or node.parent is not parent or node.lineage != lineage or node.tokens != data:
            return None
        return node

    def _add(self, node: _Node) -> _Node:
        self._nodes[node.key] = self._of[node.chunk] = node
        self._children(node.parent)[node.key] = node
        return node

    def _children(self, parent: _Node | None) -> dict[bytes, _Node]:
        return self._tops if parent is None else parent.children

    def _queue(self, node: _Node) -> None:
        """Enters an idle leaf in the queue, once."""
        if node.idle and not node.children and not node.queued:
            node.queued = True
            heapq.heappush(self._leaves, (node.used, node.key, node))

    def _remove(self, node: _Node) -> list[int]:
        """Takes out `node` with its subtree; returns their chunks."""
        del self._children(node.parent)[node.key]
        if node.parent is not None:
            self._queue(node.parent)
        gone = [node]
        for other in gone:  # grows while it runs: breadth first
            gone += other.children.values()
            self.idle -= other.idle
            del self._nodes[other.key], self._of[other.chunk]
        return [other.chunk for other in gone]
