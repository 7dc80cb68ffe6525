"""The file of one stored chunk: a header that says exactly what it holds, and one block of bytes for each layer.

    magic, header length, xxh3-64 of the header     (fixed, 24 bytes)
    header: JSON                                    (namespace, lineage, parent key, tokens, layers, checksums)
    zeros up to the next multiple of 4096
    layer 0, layer 1, ...                           (`[Hkv, n, 2 (K, V), d]` each, as the pool's numbers are)

A chunk of fewer than 64 tokens is the tail of a session. The layers of a full one end with zeros up to a multiple of
4096: its rows can be read where they are, past the page cache, and a pool on disk does so (`pool.homes`).

Everything in a header is compared with what is looked for, the tokens one by one: a file of other tokens, another model
or another layout is a miss, and so is a damaged one.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from ..core import CHUNK

LAYOUT_VERSION = 1
"""The version of what keys and histories mean. It is part of every namespace, so that others miss."""

FILE_VERSION = 2
"""The version of the file and of the order of numbers in a layer's block that is written. Files of version 1, whose
blocks are `[Hkv, 2 (K, V), n, d]` without zeros, are read."""

MAGIC = b"OFFLDKV\n"
ALIGNMENT = 4096
_FIXED = struct.Struct("<8sQQ")
_LARGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class ChunkName:
    """What a stored chunk is: everything that decides its numbers. tokens: little-endian int64, 8 bytes each."""

    namespace: str
    parent: bytes
    lineage: str
    tokens: bytes

    @property
    def count(self) -> int:
        """n, tokens of the chunk."""
        return len(self.tokens) // 8


@dataclass(frozen=True)
class ChunkHeader:
    """The header of a chunk's file. layer_bytes: bytes of one layer's block; checksums: xxh3-64 of each layer's;
    version: of the file, which says how a block is ordered."""

    name: ChunkName
    layer_bytes: int
    checksums: tuple[int, ...]
    version: int = FILE_VERSION

    @property
    def data_offset(self) -> int:
        """Where layer 0 begins."""
        return data_offset(self.name, len(self.checksums))

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + len(self.checksums) * self.layer_bytes

    def encode(self) -> bytes:
        """Returns the bytes before layer 0."""
        body = _body(self.name, self.layer_bytes, self.checksums)
        fixed = _FIXED.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body))
        return (fixed + body).ljust(self.data_offset, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> ChunkHeader | None:
        """Returns the header at the start of `data`; None where there is none that is whole and not newer."""
        if len(data) < _FIXED.size:
            return None
        magic, size, digest = _FIXED.unpack_from(data)
        body = data[_FIXED.size : _FIXED.size + min(size, _LARGEST_HEADER)]
        if magic != MAGIC or len(body) != size or xxhash.xxh3_64_intdigest(body) != digest:
            return None
        try:
            return cls._of(json.loads(body))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    @classmethod
    def _of(cls, fields: Any) -> ChunkHeader | None:
        """The header that these fields say; None where they are of a newer version. Raises ValueError, KeyError and
        TypeError where they are nobody's."""
        if fields["version"] not in range(1, FILE_VERSION + 1):
            return None
        parent, tokens = bytes.fromhex(fields["parent"]), bytes.fromhex(fields["tokens"])
        name = ChunkName(str(fields["namespace"]), parent, str(fields["lineage"]), tokens)
        layer_bytes, checksums = fields["layer_bytes"], tuple(int(checksum, 16) for checksum in fields["checksums"])
        whole = type(layer_bytes) is int and layer_bytes > 0 and 0 < len(tokens) <= 8 * CHUNK and len(tokens) % 8 == 0
        return cls(name, layer_bytes, checksums, fields["version"]) if whole else None


def header_bytes(data: bytes) -> int:
    """Returns how many bytes of a file hold its header, read from the first of them; 0 where they are no header's."""
    if len(data) < _FIXED.size:
        return 0
    magic, size, _ = _FIXED.unpack_from(data)
    return _FIXED.size + int(size) if magic == MAGIC and size <= _LARGEST_HEADER else 0


def data_offset(name: ChunkName, layers: int) -> int:
    """Returns where layer 0 begins, in bytes: known before any checksum is, because these have a fixed width."""
    size = _FIXED.size + len(_body(name, 0, (0,) * layers)) + 20  # 20: the most digits that layer_bytes can take
    return -(-size // ALIGNMENT) * ALIGNMENT


def checksum(block: bytes | bytearray | memoryview) -> int:
    """Returns the xxh3-64 of a layer's block."""
    return xxhash.xxh3_64_intdigest(block)


def _body(name: ChunkName, layer_bytes: int, checksums: tuple[int, ...]) -> bytes:
    fields = asdict(name) | {
        "version": FILE_VERSION,
        "parent": name.parent.hex(),
        "tokens": name.tokens.hex(),
        "layer_bytes": layer_bytes,
        "checksums": [f"{value:016x}" for value in checksums],
    }
    return json.dumps(fields, sort_keys=True).encode()
