"""Disk store of sessions. Each KV block is a file that is found by key, verified by checksum and written atomically."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from pathlib import Path

from ..kv_cache.prefix_tree import root_key
from ..utils.atomic_files import write_all
from ..utils.private_files import open_private
from .block_file import BlockHeader, BlockWriter, StoredBlock, data_offset
from .documents import DocumentStore
from .files import open_regular, read_header
from .folder import BLOCKS, StoreFolder, block_paths
from .naming import NamedBlock
from .options import StoreOptions


class DiskStore:
    """Stores KV blocks and small documents in a folder of at most `options.limit` bytes. Thread-safe.

    Each namespace (model, KV data type, layout) has a subfolder. The file name of a block is its key. Damaged files,
    files whose header contains a different key, and files that vanish between two calls count as missing.

    Only one process may write, but any number of processes may read. A file gets its final name only when it is
    complete, so readers need no lock. Files are not kept open between calls, unless they are used by an extent.

    Args:
        namespace: Text that identifies the model, the KV data type and the layout.
        layers: Number of layers per block, either of the model or of a layer group (`kv_cache.layer_groups`).
        read_only: Whether to open the folder without the write lock. No file is then written or evicted.
        clock: Function that returns the time in nanoseconds since 1970.

    Attributes:
        root: Parent key of the first block of every sequence in the namespace.
        documents: Documents of the namespace, such as session histories.

    Raises:
        StoreError: The folder cannot be used.
        StoreInUseError: Another process writes to the folder.
    """

    def __init__(
        self,
        folder: Path,
        namespace: str,
        layers: int,
        options: StoreOptions | None = None,
        *,
        read_only: bool = False,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        options = options or StoreOptions()
        self.namespace, self.layers, self.root = namespace, layers, root_key(namespace)
        self._own = folder / self.root.hex()
        self._folder = StoreFolder(folder, options, read_only=read_only, clock=clock)
        self._index = self._folder.index
        self.documents = DocumentStore(self._folder, self._own, options.limit)

    @property
    def bytes_used(self) -> int:
        return self._index.bytes_used

    @property
    def last_error(self) -> str:
        return self._folder.last_error

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._index

    def find(self, name: NamedBlock) -> StoredBlock | None:
        path = self._path(name.key)
        if not self._folder.read_only and path not in self._index:
            return None
        header = read_header(path)
        # Check the header too, because the file may have been renamed or written for a different number of layers.
        if header is None or header.key != name.key or len(header.checksums) != self.layers:
            self._folder.discard(path)
            return None
        return StoredBlock(
            name.key, name.count, header.layer_bytes, header.checksums, header.data_offset,
            partial(open_regular, path), partial(self._folder.discard, path), own_file=True,
        )  # fmt: skip

    def verify(self, name: NamedBlock) -> bool:
        if (block := self.find(name)) is None:
            return False
        buffer = memoryview(bytearray(block.layer_bytes))
        return all(block.read_layer(layer, buffer) for layer in range(self.layers))

    def begin(
        self, name: NamedBlock, layer_bytes: int, cost: int = 0, *, for_prompt: bool = False
    ) -> BlockWriter | None:
        """Reserve space for a block and create its file.

        Return None if the block is already stored, the limit leaves no space, the file cannot be created (see
        `last_error`), or the store is read-only.

        Args:
            cost: Recomputation cost in tokens (`policies.recomputation_cost`), which affects the eviction order.
            for_prompt: Whether a prompt without a session name uses the block (see `mark_for_prompts`).
        """
        if self._folder.read_only:
            return None
        key, offset = name.key, data_offset(self.layers)
        path, size = self._path(key), offset + self.layers * layer_bytes
        temporary = self._folder.reserve(path, size, cost, for_prompt=for_prompt)
        if temporary is None:
            return None

        def finish(checksums: Sequence[int]) -> None:
            handle = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
            try:
                write_all(
                    handle,
                    0,
                    memoryview(BlockHeader(key, layer_bytes, tuple(checksums)).encode(marked=for_prompt)),
                )
                os.fsync(handle)
            finally:
                os.close(handle)
            self._folder.finish(temporary, path, size, cost, marked=for_prompt)

        give_up = partial(self._folder.give_up, temporary, size)
        try:
            self._folder.make_subfolder(path.parent)
            os.close(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError as error:
            give_up(error)
            return None
        opened = partial(os.open, temporary, os.O_RDWR | os.O_CLOEXEC)
        return BlockWriter(self.layers, layer_bytes, offset, opened, finish, give_up, own_file=True)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._folder.discard(self._path(key))

    def mark_for_prompts(self, keys: Iterable[bytes]) -> None:
        """Set a *prompt mark* in stored blocks that a prompt without a session name uses.

        Without the mark, `retain` would remove these blocks, because no session history lists them. Blocks that are not
        stored are ignored.
        """
        self._folder.mark_for_prompts(self._path(key) for key in keys)

    def retain(self, keys: Container[bytes], namespace: str | None = None, *, keep_marked: bool = True) -> int:
        """Remove all blocks of a namespace except `keys` and blocks with a prompt mark. Return the freed bytes.

        Files that have the name of a block but different content, such as renamed documents, are also removed if they
        are detected (see `StoreFolder.files_without_block`).

        Args:
            namespace: Digest of the namespace. None means the store's own namespace.
            keep_marked: Whether to keep blocks with a prompt mark. If False, the marks of the kept blocks are removed.

        Raises:
            StoreError: A block cannot be removed.
        """
        own, folder = self._own if namespace is None else self._folder.path / namespace, self._folder
        paths = set(block_paths(own))
        kept = {path for path in paths if bytes.fromhex(path.stem) in keys or (keep_marked and folder.is_marked(path))}
        kept -= folder.files_without_block(kept)
        freed = folder.remove(paths - kept)
        if not keep_marked:
            folder.unmark(kept)
        return freed

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark the blocks of a sequence as used now. `keys` must be in the order of the sequence."""
        if not self._folder.read_only:
            self._index.mark_used([self._path(key) for key in keys])

    def expect(self, keys: Sequence[bytes]) -> None:
        """Set which blocks waiting turns will use, in the order of the turns. These blocks are evicted last.

        The blocks need not be stored yet.
        """
        self._index.set_window([self._path(key) for key in keys])

    def pin(self, keys: Iterable[bytes]) -> None:
        """Protect blocks from eviction, even if they are not stored yet. Each call needs a matching `unpin`."""
        self._index.pin(self._path(key) for key in keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        self._index.unpin(self._path(key) for key in keys)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._own / name[:2] / f"{name}{BLOCKS}"

    def close(self) -> None:
        self._folder.close()

    def check_integrity(self) -> None:
        self._folder.check_integrity()
