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
"""In place of a layer group: the block contains a snapshot of recurrent state (hybrid models)."""


@dataclass(frozen=True)
class NamedBlock:
    """Name of a stored block, from which its `key` is computed.

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
        """Return the name of the block with the KV of these tokens in the sliding-window layers of `group`."""
        return NamedBlock(self.index, self.key, f"{self.provenance_key} window {group}", self.tokens, group)

    def state(self) -> NamedBlock:
        """Return the name of the snapshot of the recurrent state after these tokens."""
        return NamedBlock(self.index, self.key, f"{self.provenance_key} state", self.tokens, STATE)


@dataclass(frozen=True)
class SessionProvenance:
    """Inputs of the names of all blocks of a sequence.

    Attributes:
        root: Parent key of the first block (`DiskStore.root`).
        policy: KV provenance of decoded tokens (`Runner.provenance_key`).
        suffix: Cache salt and truncations of the session (`History.provenance`).
        owner: Session id if only this session and its forks may use the blocks, else "".
    """

    root: bytes
    policy: str
    suffix: str = ""
    owner: str = ""


def name_blocks(
    provenance: SessionProvenance, tokens: Seq[int], stop: int, decoded: Seq[tuple[int, int]]
) -> list[NamedBlock]:
    """Return the names of the blocks of `tokens[:stop]`. The last block may be partly filled.

    With sparse attention, the KV of all tokens after the first decoded one depends on where decoding began. Their names
    therefore include a mask of the decoded tokens. `decoded` are ascending ranges [start, stop) of decoded tokens.
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

    `names` are the full-attention blocks of the same tokens. Sliding layers ignore tokens before `floor`.
    """
    seen = names[groups.first_seen(stop, floor) // BLOCK_SIZE :] if groups.sliding else ()
    return [name.window(group) for name in seen for group in groups.groups if group]
