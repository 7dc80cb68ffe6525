"""The names of a session's chunks in a store: a pure function of its tokens and of how each was computed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..core import CHUNK
from ..engine.room import EXACT
from ..kv_cache.prefix_tree import chunk_key, pack_tokens
from ..storage.chunk_store import NamedChunk


@dataclass(frozen=True)
class Lineage:
    """What the names of all chunks of a session have in common.

    root: the parent key of first chunks (`ChunkStore.root`). policy: the policy's lineage, on which decoded tokens'
    rows depend. provenance: the session's cache salt and truncations (`History.provenance`). owner: keeps the chunks to
    one session and its forks; empty where all sessions share them.
    """

    root: bytes
    policy: str
    provenance: str = ""
    owner: str = ""


def name_chunks(lineage: Lineage, tokens: Seq[int], stop: int, decoded: Seq[tuple[int, int]]) -> list[NamedChunk]:
    """Returns the chunks of `tokens` [0, stop) by their names, the last one maybe a part.

    decoded: rising ranges (start, stop) of tokens that decode steps computed; the others came by prefill. Rows of a
    decoded token depend on where decoding began, and so do the rows after it: from the first decoded token on, a
    chunk's lineage says of each token how it was computed.
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
