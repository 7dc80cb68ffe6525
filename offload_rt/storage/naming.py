"""Keys of the stored blocks of a sequence: a pure function of its tokens and of how each was computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..core import CHUNK
from ..kv_cache.layer_groups import LayerGroups
from ..kv_cache.prefix_tree import EXACT, chunk_key, pack_tokens
from .chunk_store import NamedChunk


@dataclass(frozen=True)
class Lineage:
    """KV provenance shared by all blocks of a sequence.

    Attributes:
        root: Parent key of first blocks (`StorageTier.root`).
        policy: KV provenance of decoded tokens (`Runner.lineage`).
        provenance: Cache salt and truncations.
        owner: Session id if only the session and its forks may use the blocks. Empty if all sessions share them.
    """

    root: bytes
    policy: str
    provenance: str = ""
    owner: str = ""


def name_chunks(lineage: Lineage, tokens: Seq[int], stop: int, decoded: Seq[tuple[int, int]]) -> list[NamedChunk]:
    """Return the blocks of `tokens` [0, stop) with their keys. The last block may be partly filled.

    The KV of a decoded token, and all KV after it, depends on where decoding began. Therefore the provenance of every
    block from the first decoded token on includes a mask of its decoded tokens. With exact attention it does not.

    Args:
        lineage: KV provenance shared by all blocks.
        tokens: Tokens of the sequence.
        stop: Number of tokens to include.
        decoded: Ascending ranges (start, stop) of tokens computed by decode steps. Prefill computed all others.
    """
    marks = bytearray(stop)
    for first, last in decoded:
        marks[first:last] = b"\1" * len(marks[first:last])
    exact = decoded[0][0] if decoded and lineage.policy != EXACT else stop
    found, parent = [], lineage.root
    for i, data in enumerate(pack_tokens(tokens, stop)):
        start, end = i * CHUNK, min(stop, (i + 1) * CHUNK)
        name = EXACT + lineage.provenance
        if end > exact:
            mask = hashlib.blake2b(bytes(marks[start:end]), digest_size=8).hexdigest()
            name = f"{lineage.policy}{lineage.provenance}-{mask}"
        if lineage.owner:
            name += f"-{lineage.owner}"
        key = chunk_key(parent, name, data)
        found.append(NamedChunk(i, parent, name, data, key))
        parent = key
    return found


def window_chunks(groups: LayerGroups, names: Seq[NamedChunk], stop: int, floor: int) -> list[NamedChunk]:
    """Return the blocks of sliding-window layers that token `stop` can see, given the blocks `names` of all tokens."""
    seen = names[groups.first_seen(stop, floor) // CHUNK :] if groups.sliding else ()
    return [name.window(group) for name in seen for group in groups.groups if group]
