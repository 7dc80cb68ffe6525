"""What a session is when nothing of it is in memory: its tokens, how each was computed, and what was said."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..core import CHUNK, ranges_of
from ..engine.runner import EXACT
from ..pool.prefix_tree import chunk_key, pack_tokens
from ..storage.disk_store import DiskStore
from ..storage.saver import NamedChunk

FORMAT = 1
"""Of a history's document; another is none of ours."""

_SINKS = ".sinks"


@dataclass
class History:
    """tokens: of the whole conversation, without those that were cut; the first `computed` have rows. decoded: ranges
    of tokens that decode steps computed, in order (the others came by prefill). turns: (role, text), for people.

    cut: names every cut so far (empty: none); shift: tokens cut out, hence how far positions run ahead; sinks: tokens
    before the gap, whose keys have been turned by `sink_shift` positions. id: the same in forks.
    keys: of its chunks on disk; tail: of the partly filled one; tail_shared: a fork may use it too.
    """

    name: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    decoded: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    cut: str = ""
    shift: int = 0
    sinks: int = 0
    sink_shift: int = 0
    keys: list[str] = field(default_factory=list)
    tail: str = ""
    tail_shared: bool = False

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> History | None:
        """None where it is no history of this format."""
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields.pop("format") != FORMAT:
                return None
            history = cls(**fields)
            history.decoded = [(int(a), int(b)) for a, b in history.decoded]
            history.turns = [(str(role), str(text)) for role, text in history.turns]
        except (ValueError, TypeError, KeyError):
            return None
        return history

    def fork(self, name: str) -> History:
        """The same conversation under another name."""
        self.tail_shared = True
        return replace(self, name=name, tokens=list(self.tokens), decoded=list(self.decoded), turns=list(self.turns))

    def forget_from(self, token: int) -> None:
        """Tokens from `token` on are to be computed anew, by prefill."""
        self.computed = min(self.computed, token)
        self.decoded = [(a, min(b, token)) for a, b in self.decoded if a < token]

    def mark_decoded(self, start: int, stop: int) -> None:
        """Tokens [start, stop) were computed by decode steps."""
        if start < stop:
            self.decoded.append((start, stop))

    @property
    def sinks_document(self) -> str:
        """Where the originals of its sinks' keys lie in a store: of all forks the same."""
        return f"{self.id}.{self.sinks}{_SINKS}"

    @property
    def exact(self) -> int:
        """Tokens before the first that a decode step computed."""
        return self.decoded[0][0] if self.decoded else len(self.tokens)

    def keep(self, kept: list[int], sinks: int) -> None:
        """Only the tokens at `kept` (rising, below `computed`) and those not computed yet are left."""
        marks = self._marks()
        gone = self.computed - len(kept)
        digest = hashlib.blake2b(f"{self.cut} {self.id} {self.computed} {kept}".encode(), digest_size=8).hexdigest()
        self.tokens = [self.tokens[i] for i in kept] + self.tokens[self.computed :]
        self.decoded = [(run.start, run.stop) for run in ranges_of(new for new, old in enumerate(kept) if marks[old])]
        self.computed, self.shift, self.sinks = len(kept), self.shift + gone, sinks
        self.cut = f"+cut-{digest}"

    def turn_sinks(self) -> None:
        """The sinks' keys have been turned across the whole gap."""
        self.sink_shift = self.shift
        self.cut += f"+{self.shift}"

    def uncut(self) -> None:
        """Everything is to be computed anew, as if what is left were all there ever was."""
        self.forget_from(0)
        self.cut, self.shift, self.sinks, self.sink_shift = "", 0, 0, 0

    def restart(self, tokens: list[int]) -> None:
        """Only `tokens` are left, to be computed as if they were all there ever was."""
        self.tokens = tokens
        self.uncut()

    def names(self, root: bytes, lineage: str, stop: int, *, private: bool = False) -> list[NamedChunk]:
        """Chunks of tokens [0, stop) by their names on disk, the last one maybe a part. `lineage` is the policy's:
        tokens it decoded have rows that depend on where decoding began, so a chunk's lineage says of each token how it
        was computed. `private` keeps all of it to this session and its forks."""
        marks, found, parent = self._marks(), [], root
        first = self.exact if lineage != EXACT else len(self.tokens)
        for i, tokens in enumerate(pack_tokens(self.tokens, stop)):
            name = EXACT + self.cut
            if i * CHUNK + len(tokens) // 8 > first:
                mask = bytes(marks[i * CHUNK : i * CHUNK + len(tokens) // 8])
                name = f"{lineage}{self.cut}-{hashlib.blake2b(mask, digest_size=8).hexdigest()}"
            if private:
                name += f"-{self.id}"
            key = chunk_key(parent, name, tokens)
            found.append(NamedChunk(i, parent, name, tokens, key))
            parent = key
        return found

    def _marks(self) -> bytearray:
        """1 for each token that a decode step computed."""
        marks = bytearray(len(self.tokens))
        for start, stop in self.decoded:
            marks[start:stop] = b"\1" * (stop - start)
        return marks


def remove_orphans(store: DiskStore) -> None:
    """Deletes the originals of sinks that no history in `store` has any more."""
    documents = store.documents()
    histories = [History.from_bytes(data) for data in documents.values()]
    alive = {history.id for history in histories if history is not None}
    for name in documents:
        if name.endswith(_SINKS) and name.split("/")[1].split(".")[0] not in alive:
            store.delete(name)
