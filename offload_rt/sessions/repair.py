"""A session whose history is lost, from the tokens that its chunks say they hold. No weights are needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..errors import InputError, StoreError
from ..pool.prefix_tree import chunk_key, root_key
from ..storage.chunk_file import ChunkName
from ..storage.disk_store import DiskStore
from ..storage.files import read_header
from ..storage.folder import CHUNKS
from .catalog import Catalog, find_stored, read_catalog
from .history import History, document_name

_SHOWN = 60
"""Characters of a text's end in a message."""


@dataclass(frozen=True)
class Chain:
    """Chunks from a first one to one that no other follows: a text, or the beginning of one. namespace: what its
    numbers are of."""

    namespace: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Repaired:
    """A session that was rebuilt, as its history says from now on."""

    history: History

    @property
    def text(self) -> str:
        """Returns the conversation, with the tokens of the chat's format where it had any."""
        return "".join(text for _, text in self.history.turns)


def repair(
    folder: Path, name: str, model: str, tokenizer: PreTrainedTokenizerBase | None, choice: int | None = None
) -> Repaired:
    """Rebuilds the damaged session `name` (or "name@namespace digest") from the chunks that no other session has, as
    far as they go: its tokens, to be computed anew where their rows are not found, and its text. Who said what is not
    known. choice: which of several chains it is, from 1 on. The damaged history is put aside.

    Raises InputError where nothing is damaged, or `choice` is needed; StoreError where there is nothing to rebuild it
    from, or its history is one of a newer version.
    """
    catalog = read_catalog(folder)
    damaged = catalog.find_damaged(name)
    if damaged is None:
        whole = find_stored(folder, name)
        raise InputError(f"session {whole.history.name!r} can be opened: there is nothing to repair")
    if DiskStore(folder, "", 0, read_only=True).documents()[damaged.document] is not None:
        raise StoreError(
            f"the history of session {damaged.name!r} is whole, but of another format: nothing was changed"
        )
    found = unowned_chains(folder, damaged.space, catalog)
    if not found:
        raise StoreError(
            f"no chunk in {str(folder)!r} can be of session {damaged.name!r} alone: there is nothing to rebuild it "
            "from; `offload-rt sessions delete` gives it up"
        )
    texts = ["" if tokenizer is None else str(tokenizer.decode(list(chain.tokens))) for chain in found]
    if choice is None and len(found) > 1:
        shown = [f"{i}: {len(c.tokens):,} tokens, {texts[i - 1][-_SHOWN:]!r}" for i, c in enumerate(found, 1)]
        raise InputError(f"several texts can be session {damaged.name!r}; say which with --chain ({'; '.join(shown)})")
    if choice is not None and not 1 <= choice <= len(found):
        raise InputError(f"--chain {choice} must be from 1 to {len(found)}")
    place = (choice or 1) - 1
    chain = found[place]
    history = History(damaged.name, model, tokens=list(chain.tokens), turns=[("conversation", texts[place])])
    store = DiskStore(folder, chain.namespace, 0)
    try:
        store.put(document_name(damaged.name), history.to_bytes())
    finally:
        store.close()
    return Repaired(history)


def unowned_chains(folder: Path, space: str, catalog: Catalog) -> list[Chain]:
    """Returns the chains in the namespace with digest `space` that end in a chunk which no session of `catalog` has,
    the longest first."""
    names = dict(_names(folder / space))
    parents = {name.parent for name in names.values()}
    owned = {bytes.fromhex(key) for one in catalog.sessions for key in one.history.keys}
    found = []
    for key in names.keys() - parents - owned:
        path = _path(names, key)
        if path and root_key(path[0].namespace) == path[0].parent == bytes.fromhex(space):
            tokens = np.frombuffer(b"".join(name.tokens for name in path), dtype="<i8").tolist()
            found.append(Chain(path[0].namespace, tuple(tokens)))
    return sorted(found, key=lambda chain: (-len(chain.tokens), chain.tokens))


def _path(names: dict[bytes, ChunkName], key: bytes) -> list[ChunkName]:
    """The chunks from the first one to `key`."""
    path: list[ChunkName] = []
    while (name := names.get(key)) is not None:
        path.append(name)
        key = name.parent
    return path[::-1]


def _names(space: Path) -> Iterator[tuple[bytes, ChunkName]]:
    """(key, name) of chunks below `space` with whole headers; those of sliding layers only repeat others' tokens."""
    for path in sorted(space.glob(f"*/*{CHUNKS}")):
        header = read_header(path)
        if header is not None and " window " not in header.name.lineage:
            key = chunk_key(header.name.parent, header.name.lineage, header.name.tokens)
            if key.hex() == path.stem:
                yield key, header.name
