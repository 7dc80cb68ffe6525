"""The file of a stored chunk: a header, and one block of bytes for each layer.

    magic, header length, xxh3-64 of the header     (fixed, 24 bytes)
    header: JSON                                    (key, layers, checksums)
    zeros up to the next multiple of 4096
    layer 0, layer 1, ...                           (`[Hkv, n, 2 (K, V), d]` each, as the pool's numbers are)

A chunk of fewer than 64 tokens is the tail of a session. The layers of a full one end with zeros up to a multiple of
4096, so that a pool on disk can read its KV in place, past the page cache (`pool.homes`).

The key is a BLAKE2b digest of 256 bits of the namespace, all chunks before, the lineage and the tokens. It is the
whole identity of a chunk: finding two contents with one digest takes 2^128 attempts, so equal keys mean equal contents.
Tokens themselves are not in the file. They would survive there in clear text after their session was deleted.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

LAYOUT_VERSION = 2
"""The version of what keys and histories mean. It is part of every namespace, so that others miss."""

FILE_VERSION = 3
"""The version of the file. Versions 1 and 2 held tokens in clear text; `storage.old_format` removes them."""

KEY_BYTES = 32
MAGIC = b"OFFLDKV\n"
ALIGNMENT = 4096
_FIXED = struct.Struct("<8sQQ")
_LARGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class ChunkHeader:
    """The header of a chunk's file. layer_bytes: bytes of one layer's block; checksums: xxh3-64 of each layer's."""

    key: bytes
    layer_bytes: int
    checksums: tuple[int, ...]

    @property
    def data_offset(self) -> int:
        """Where layer 0 begins."""
        return data_offset(len(self.checksums))

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + len(self.checksums) * self.layer_bytes

    def encode(self) -> bytes:
        """Return the bytes before layer 0."""
        body = _body(self.key, self.layer_bytes, self.checksums)
        fixed = _FIXED.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body))
        return (fixed + body).ljust(self.data_offset, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> ChunkHeader | None:
        """Return the header at the start of `data`, or None if it is damaged or of another version."""
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
        key, layer_bytes = bytes.fromhex(fields["key"]), fields["layer_bytes"]
        checksums = tuple(int(checksum, 16) for checksum in fields["checksums"])
        possible = len(key) == KEY_BYTES and type(layer_bytes) is int and layer_bytes > 0
        return cls(key, layer_bytes, checksums) if possible and fields["version"] == FILE_VERSION else None


def header_bytes(data: bytes) -> int:
    """Return how many bytes of a file hold its header, read from the first of them; 0 if they are no header's."""
    if len(data) < _FIXED.size:
        return 0
    magic, size, _ = _FIXED.unpack_from(data)
    return _FIXED.size + int(size) if magic == MAGIC and size <= _LARGEST_HEADER else 0


def data_offset(layers: int) -> int:
    """Return where layer 0 begins, in bytes. It is known before any checksum is: these have a fixed width."""
    size = _FIXED.size + len(_body(bytes(KEY_BYTES), 0, (0,) * layers)) + 20  # 20: the most digits of layer_bytes
    return -(-size // ALIGNMENT) * ALIGNMENT


def checksum(block: bytes | bytearray | memoryview) -> int:
    """Return the xxh3-64 of a layer's block."""
    return xxhash.xxh3_64_intdigest(block)


def _body(key: bytes, layer_bytes: int, checksums: tuple[int, ...]) -> bytes:
    fields = {
        "version": FILE_VERSION,
        "key": key.hex(),
        "layer_bytes": layer_bytes,
        "checksums": [f"{value:016x}" for value in checksums],
    }
    return json.dumps(fields, sort_keys=True).encode()
