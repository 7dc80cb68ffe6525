"""Names of the stored blocks of a sequence. Names depend only on the tokens and on how their KV was computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

from ..core import BLOCK_SIZE
from ..kv_cache.layer_groups import LayerGroups
from ..kv_cache.prefix_tree import EXACT, TOKEN_BYTES, block_key, pack_tokens

STATE = -1
"""Value of `group` for blocks that contain a snapshot of recurrent state (hybrid models) instead of KV."""


@dataclass(frozen=True)
class NamedBlock:
    """Name of a stored block. The block's `key` is computed from it.

    Attributes:
        index: Index of the block in its sequence.
        parent: Key of the preceding block.
        provenance_key: KV provenance key.
        tokens: Token ids of the block as little-endian int64.
        group: Layer group whose KV the block contains (`kv_cache.layer_groups`), or `STATE`.
    """

    index: int
    parent: bytes
    provenance_key: str
    tokens: bytes
    group: int = 0

    @cached_property
    def key(self) -> bytes:
        return block_key(self.parent, self.provenance_key, self.tokens)

    @property
    def count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def window(self, group: int) -> NamedBlock:
        """Return the name of the block with the KV of the same tokens in the sliding-window layers of `group`."""
        return NamedBlock(self.index, self.key, f"{self.provenance_key} window {group}", self.tokens, group)

    def state(self) -> NamedBlock:
        """Return the name of the block that contains the recurrent state after these tokens."""
        return NamedBlock(self.index, self.key, f"{self.provenance_key} state", self.tokens, STATE)


@dataclass(frozen=True)
class SessionProvenance:
    """Inputs that determine the block names of a sequence, in addition to its tokens.

    Attributes:
        root: Parent key of the first block (`DiskStore.root`).
        policy: KV provenance of decoded tokens (`Runner.provenance_key`).
        suffix: Cache salt and truncations of the session (`History.provenance`).
        owner: Session id if only this session and its forks may use the blocks, and "" otherwise.
    """

    root: bytes
    policy: str
    suffix: str = ""
    owner: str = ""


def name_blocks(
    provenance: SessionProvenance, tokens: Seq[int], stop: int, decoded: Seq[tuple[int, int]]
) -> list[NamedBlock]:
    """Return the block names for `tokens[:stop]`. The last block may be partly filled.

    `decoded` contains the ranges [start, stop) of decoded tokens in ascending order. With sparse attention, the KV of
    all tokens from the first decoded token on depends on which tokens were decoded. The names of their blocks therefore
    include a mask of the decoded tokens.
    """
    marks = bytearray(stop)
    for first, last in decoded:
        marks[first:last] = b"\1" * len(marks[first:last])
    exact = decoded[0][0] if decoded and provenance.policy != EXACT else stop
    found, parent = [], provenance.root
    for i, data in enumerate(pack_tokens(tokens, stop)):
        start, end = i * BLOCK_SIZE, min(stop, (i + 1) * BLOCK_SIZE)
        name = EXACT + provenance.suffix
        if end > exact:
            mask = hashlib.blake2b(bytes(marks[start:end]), digest_size=8).hexdigest()
            name = f"{provenance.policy}{provenance.suffix}-{mask}"
        if provenance.owner:
            name += f"-{provenance.owner}"
        found.append(NamedBlock(i, parent, name, data))
        parent = found[-1].key
    return found


def window_blocks(groups: LayerGroups, names: Seq[NamedBlock], stop: int, floor: int) -> list[NamedBlock]:
    """Return the names of the blocks that the token at index `stop` can attend to in sliding-window layers.

    `names` contains the names of the full-attention blocks with the same tokens. Sliding-window layers ignore tokens
    before `floor`.
    """
    seen = names[groups.first_seen(stop, floor) // BLOCK_SIZE :] if groups.sliding else ()
    return [name.window(group) for name in seen for group in groups.groups if group]
