"""File format of a stored KV block: a header followed by the data of each layer.

    magic, header length, xxh3-64 of the header     (fixed, 24 bytes)
    header: JSON                                    (key, layers, checksums)
    zeros up to the next multiple of 4096
    layer 0, layer 1, ...                           (`[Hkv, n, 2 (K, V), d]` each, in the data type of the pool)

A block of fewer than 64 tokens is the last one of a session. The layers of a full block are zero-padded to a multiple
of 4096 bytes, so that an on-disk pool can read the KV in place, bypassing the page cache (`kv_cache.disk.homes`).

The key is a 256-bit BLAKE2b digest of the namespace, all preceding blocks, the KV provenance and the tokens. It fully
identifies a block: a collision takes 2^128 attempts, so equal keys mean equal contents. The file does not contain the
tokens, because they would remain there in clear text after their session was deleted.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

LAYOUT_VERSION = 2
"""Version of the key derivation and of the histories. It is part of every namespace, so other versions are misses."""

FILE_VERSION = 3
"""Version of the file format. Versions 1 and 2 held tokens in clear text; `sessions.old_format` removes them."""

KEY_BYTES = 32
MAGIC = b"OFFLDKV\n"
ALIGNMENT = 4096
_FIXED = struct.Struct("<8sQQ")
_LARGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class ChunkHeader:
    """Header of a block file.

    Attributes:
        key: Key of the block.
        layer_bytes: Stored bytes per layer.
        checksums: xxh3-64 of the data of each layer.
    """

    key: bytes
    layer_bytes: int
    checksums: tuple[int, ...]

    @property
    def data_offset(self) -> int:
        """Byte offset of layer 0."""
        return data_offset(len(self.checksums))

    @property
    def file_bytes(self) -> int:
        """File size in bytes."""
        return self.data_offset + len(self.checksums) * self.layer_bytes

    def encode(self) -> bytes:
        """Return the header, zero-padded up to layer 0."""
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
    """Return the header size in bytes, given the first bytes of a file, or 0 if they are not a valid header."""
    if len(data) < _FIXED.size:
        return 0
    magic, size, _ = _FIXED.unpack_from(data)
    return _FIXED.size + int(size) if magic == MAGIC and size <= _LARGEST_HEADER else 0


def data_offset(layers: int) -> int:
    """Return the byte offset of layer 0."""
    # The offset is known before the checksums are, because these have a fixed width.
    size = _FIXED.size + len(_body(bytes(KEY_BYTES), 0, (0,) * layers)) + 20  # 20: maximum digits of layer_bytes
    return -(-size // ALIGNMENT) * ALIGNMENT


def checksum(block: bytes | bytearray | memoryview) -> int:
    """Return the xxh3-64 of the data of a layer."""
    return xxhash.xxh3_64_intdigest(block)


def _body(key: bytes, layer_bytes: int, checksums: tuple[int, ...]) -> bytes:
    fields = {
        "version": FILE_VERSION,
        "key": key.hex(),
        "layer_bytes": layer_bytes,
        "checksums": [f"{value:016x}" for value in checksums],
    }
    return json.dumps(fields, sort_keys=True).encode()
