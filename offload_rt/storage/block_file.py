"""File format of a stored KV block: a header followed by the data of each layer.

    magic, header length, xxh3-64 of the header     24 bytes
    header                                          JSON: key, layers, checksums
    zeros                                           padding up to 8 bytes before a multiple of 4096
    prompt mark                                     8 bytes: `PROMPT_MARK` if a prompt without a session uses the block
    layer 0, layer 1, ...                           `[Hkv, n, 2 (K, V), d]` each, in the data type of the pool

With latent attention, the layers contain only K (`ModelGeometry.value_dim`). In full blocks (64 tokens), each layer is
zero-padded to a multiple of 4096 bytes, so that a KV pool on disk can read it in place with direct I/O.

The key is a 256-bit BLAKE2b digest of the namespace, all preceding blocks, the KV provenance and the tokens. Equal keys
mean equal contents, because finding a collision takes 2^128 attempts. The file contains no tokens, so that no text
remains on disk after a session is deleted.

After a file is written, only its prompt mark may change. Files of earlier versions have no prompt mark.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from ..core import BLOCK_SIZE
from ..utils.atomic_files import write_all

if TYPE_CHECKING:
    from ..kv_cache.disk.extents import StoredExtent

LAYOUT_VERSION = 2
"""Version of block keys and histories. It is part of the namespace, so blocks with other versions are not found."""

FILE_VERSION = 3
"""Version of the file format. Versions 1 and 2 contained tokens in clear text; `storage.folder` refuses them."""

KEY_BYTES = 32
MAGIC = b"OFFLDKV\n"
PROMPT_MARK = b"PROMPTS\n"
"""Mark of blocks that are used by a prompt without a session. `data_offset` leaves at least 8 bytes for it."""

ALIGNMENT = 4096
_FIXED = struct.Struct("<8sQQ")
_LARGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class BlockHeader:
    """Header of a block file. Each layer has `layer_bytes` bytes and an xxh3-64 checksum in `checksums`."""

    key: bytes
    layer_bytes: int
    checksums: tuple[int, ...]

    @property
    def data_offset(self) -> int:
        return data_offset(len(self.checksums))

    @property
    def file_bytes(self) -> int:
        return self.data_offset + len(self.checksums) * self.layer_bytes

    @property
    def mark_offset(self) -> int:
        return self.data_offset - len(PROMPT_MARK)

    def encode(self, *, marked: bool = False) -> bytes:
        """Return the header, padded up to the offset of layer 0. If `marked`, it ends with `PROMPT_MARK`."""
        body = _body(self.key, self.layer_bytes, self.checksums)
        fixed = _FIXED.pack(MAGIC, len(body), xxhash.xxh3_64_intdigest(body))
        return (fixed + body).ljust(self.mark_offset, b"\0") + (PROMPT_MARK if marked else bytes(len(PROMPT_MARK)))

    @classmethod
    def decode(cls, data: bytes) -> BlockHeader | None:
        """Return the header at the start of `data`, or None if the header is damaged or has a different version."""
        if len(data) < _FIXED.size:
            return None
        magic, size, digest = _FIXED.unpack_from(data)
        body = data[_FIXED.size : _FIXED.size + min(size, _LARGEST_HEADER)]
        if magic != MAGIC or len(body) != size or xxhash.xxh3_64_intdigest(body) != digest:
            return None
        try:
            return cls._from_fields(json.loads(body))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    @classmethod
    def _from_fields(cls, fields: Any) -> BlockHeader | None:
        key, layer_bytes = bytes.fromhex(fields["key"]), fields["layer_bytes"]
        checksums = tuple(int(checksum, 16) for checksum in fields["checksums"])
        possible = len(key) == KEY_BYTES and type(layer_bytes) is int and layer_bytes > 0
        return cls(key, layer_bytes, checksums) if possible and fields["version"] == FILE_VERSION else None


def header_bytes(data: bytes) -> int:
    """Return the size in bytes of the header at the start of `data`, or 0 if it is not valid."""
    if len(data) < _FIXED.size:
        return 0
    magic, size, _ = _FIXED.unpack_from(data)
    return _FIXED.size + int(size) if magic == MAGIC and size <= _LARGEST_HEADER else 0


def data_offset(layers: int) -> int:
    # The checksums have a fixed width, so the offset is known before they are computed.
    size = _FIXED.size + len(_body(bytes(KEY_BYTES), 0, (0,) * layers)) + 20  # 20: maximum digits of layer_bytes
    return -(-size // ALIGNMENT) * ALIGNMENT


def checksum(block: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(block)


def _body(key: bytes, layer_bytes: int, checksums: tuple[int, ...]) -> bytes:
    fields = {
        "version": FILE_VERSION,
        "key": key.hex(),
        "layer_bytes": layer_bytes,
        "checksums": [f"{value:016x}" for value in checksums],
    }
    return json.dumps(fields, sort_keys=True).encode()


@dataclass(frozen=True)
class StoredBlock:
    """A KV block in a store. Its layers can be read until the block is removed.

    Attributes:
        count: Number of tokens n.
        checksums: xxh3-64 checksum of each layer.
        offset: Byte offset of layer 0 in the file.
        open: Function that opens the file for reading and returns its descriptor. Raises OSError.
        damaged: Function that is called if a layer does not match its checksum.
        own_file: Whether the file contains only this block.
    """

    key: bytes
    count: int
    layer_bytes: int
    checksums: Sequence[int]
    offset: int
    open: Callable[[], int]
    damaged: Callable[[], None]
    own_file: bool = False

    def read_layer(self, layer: int, into: memoryview) -> bool:
        """Read one layer into `into`, a buffer of `layer_bytes` bytes. Return False if this fails. Thread-safe."""
        if len(into) != self.layer_bytes:
            return False
        try:
            handle = self.open()
        except OSError:
            return False
        try:
            return self.read_from(handle, layer, into)
        finally:
            os.close(handle)

    def read_from(self, handle: int, layer: int, into: memoryview) -> bool:
        try:
            size = os.preadv(handle, [into], self.offset + layer * self.layer_bytes)
        except OSError:
            size = 0
        if size == self.layer_bytes and checksum(into) == self.checksums[layer]:
            return True
        self.damaged()
        return False

    def extent(self) -> StoredExtent | None:
        """Return the location of the KV in the file, so that a KV pool on disk can read the KV without copying it.

        The extent stays readable after the block is evicted. Return None if the block is partial, shares its file with
        other blocks, or cannot be opened.
        """
        # Direct I/O needs layers that are padded to the disk alignment, and only the layers of full blocks are padded.
        if self.count < BLOCK_SIZE or not self.own_file:
            return None
        from ..kv_cache.disk.direct_file import BlockFile
        from ..kv_cache.disk.extents import StoredExtent

        try:
            return StoredExtent(BlockFile(self.open()), self.offset, self.layer_bytes)
        except OSError:
            return None


class BlockWriter:
    """Writes one KV block to a part of a file, layer by layer.

    Call `write` once per layer, in any order, but from only one thread at a time. Then call either `commit`, which
    makes the block available in the store, or `abort`.

    Args:
        offset: Byte offset of layer 0 in the file.
        open: Function that opens the file for writing and returns its descriptor. Raises OSError.
        finish: Function that `commit` calls with the checksums of all layers. Raises OSError.
        give_up: Function that is called with the error if a write fails, or with None if the block is discarded.
        own_file: Whether the file contains only this block.
    """

    def __init__(
        self,
        layers: int,
        layer_bytes: int,
        offset: int,
        open: Callable[[], int],
        finish: Callable[[Sequence[int]], None],
        give_up: Callable[[OSError | None], None],
        *,
        own_file: bool = False,
    ) -> None:
        self.layers, self.layer_bytes, self.offset = layers, layer_bytes, offset
        self._file, self._finish, self._give_up, self._own_file = open, finish, give_up, own_file
        self._checksums: dict[int, int] = {}
        self._open = True

    def write(self, layer: int, block: memoryview) -> None:
        """Write the data of one layer. If the write fails, the block is discarded."""
        assert layer not in self._checksums and len(block) == self.layer_bytes
        self.record_checksum(layer, block)
        if not self._open:
            return
        try:
            handle = self._file()
            try:
                write_all(handle, self.offset + layer * self.layer_bytes, block)
            finally:
                os.close(handle)
        except OSError as error:
            self._discard(error)

    def record_checksum(self, layer: int, block: memoryview) -> None:
        """Record the checksum of a layer that a KV pool has written to the extent."""
        self._checksums[layer] = checksum(block)

    def extent(self) -> StoredExtent | None:
        """Return the location of the layers in the file.

        A KV pool on disk can then write the layers itself, in place of calls to `write`. The extent stays readable
        after the block is evicted. Return None if the file contains other blocks, or if disk space cannot be allocated.
        """
        if not self._own_file:
            return None
        from ..kv_cache.disk.direct_file import BlockFile
        from ..kv_cache.disk.extents import StoredExtent

        try:
            file = BlockFile(self._file())
            file.allocate(0, self.offset + self.layers * self.layer_bytes)
        except OSError:
            return None
        return StoredExtent(file, self.offset, self.layer_bytes, self.record_checksum)

    def commit(self) -> bool:
        """Make the block available in the store. Return False if a write failed or a layer is missing."""
        if len(self._checksums) < self.layers:
            self.abort()
        if self._open:
            try:
                self._finish([self._checksums[layer] for layer in range(self.layers)])
            except OSError as error:
                self._discard(error)
        done, self._open = self._open, False
        return done

    def abort(self) -> None:
        if self._open:
            self._discard(None)

    def _discard(self, error: OSError | None) -> None:
        self._open = False
        self._give_up(error)
