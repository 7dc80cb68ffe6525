"""Keys of the stored blocks of a sequence: a pure function of its tokens and of how each was computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..core import BLOCK_SIZE
from ..kv_cache.layer_groups import LayerGroups
from ..kv_cache.prefix_tree import EXACT, block_key, pack_tokens
from .block_store import NamedBlock


@dataclass(frozen=True)
class SessionProvenance:
    """KV provenance shared by all blocks of a sequence.

    Attributes:
        root: Parent key of the first block (`StorageTier.root`).
        policy: KV provenance of decoded tokens (`Runner.provenance_key`).
        suffix: Cache salt and truncations of the session (`History.provenance`).
        owner: Session id if only the session and its forks may use the blocks. Empty if all sessions share them.
    """

    root: bytes
    policy: str
    suffix: str = ""
    owner: str = ""


def name_blocks(
    provenance: SessionProvenance, tokens: Seq[int], stop: int, decoded: Seq[tuple[int, int]]
) -> list[NamedBlock]:
    """Return the blocks of `tokens` [0, stop) with their keys. The last block may be partly filled.

    The KV of a decoded token, and all KV after it, depends on where decoding began. Therefore the provenance of every
    block from the first decoded token on includes a mask of its decoded tokens. With exact attention, KV does not
    depend on where decoding began, and there is no mask.

    Args:
        provenance: KV provenance shared by all blocks.
        tokens: Tokens of the sequence.
        stop: Number of tokens to include.
        decoded: Ascending ranges (start, stop) of tokens computed by decode steps. Prefill computed all others.
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
        key = block_key(parent, name, data)
        found.append(NamedBlock(i, parent, name, data, key))
        parent = key
    return found


def window_blocks(groups: LayerGroups, names: Seq[NamedBlock], stop: int, floor: int) -> list[NamedBlock]:
    """Return the blocks of sliding-window layers that token `stop` can see, given the blocks `names` of all tokens."""
    seen = names[groups.first_seen(stop, floor) // BLOCK_SIZE :] if groups.sliding else ()
    return [name.window(group) for name in seen for group in groups.groups if group]
