"""What a session is when nothing of it is in memory: its tokens, how each was computed, and what was said."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..core import CHUNK, ranges_of
from ..errors import InputError

FORMAT = 2
"""Format of a history's document. Documents of format 1 are read by `sessions.old_format`."""

SINKS = "sinks"
"""First word of the names of documents that hold originals of sinks."""

LONGEST_NAME = 200
"""Characters of a session's name."""

_IDENTITY = re.compile("[0-9a-f]{32,64}")

_MOST = 1 << 40
"""Tokens that no conversation has had: positions are computed with int64."""


@dataclass
class History:
    """tokens: of the whole conversation, without those that were truncated; the first `computed` have rows. decoded:
    ranges of tokens that decode steps computed, in order (the others came by prefill). turns: (role, text), for people.

    truncation_id: names every truncation so far (empty: none); it belongs to the lineage of every chunk. shift: tokens
    that are gone, hence how far positions run ahead. sinks: tokens before the gap, whose keys have been rotated by
    `sink_shift` positions. id: the same in forks.
    floor: the first token that sliding layers may see. system: what the model was told before all turns. salt: what the
    cache salt of the first turn adds to the provenance (`salt_provenance`).
    keys: of its chunks on disk; tail: of the partly filled one; tail_windows: of its rows of sliding layers;
    tail_shared: a fork may use them too.
    """

    name: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    decoded: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    truncation_id: str = ""
    shift: int = 0
    sinks: int = 0
    sink_shift: int = 0
    keys: list[str] = field(default_factory=list)
    tail: str = ""
    tail_shared: bool = False
    floor: int = 0
    tail_windows: list[str] = field(default_factory=list)
    system: str = ""
    salt: str = ""

    def to_bytes(self) -> bytes:
        """Returns the history as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> History | None:
        """Returns the history that `to_bytes` wrote; None where it is none of this format, or cannot be one."""
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields.pop("format") != FORMAT:
                return None
            history = cls(**fields)
            history.decoded = [(int(a), int(b)) for a, b in history.decoded]
            history.turns = [(str(role), str(text)) for role, text in history.turns]
            return history if history._possible() else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def _possible(self) -> bool:
        """Whether all fields have their types and agree; a document can say anything, and file names are made of
        some."""
        texts = (self.name, self.model, self.truncation_id, self.tail, self.system, self.salt)
        counts = (self.computed, self.shift, self.sinks, self.sink_shift, self.floor, *self.tokens)
        ends = [0, *itertools.chain(*self.decoded), len(self.tokens)]
        return (
            all(isinstance(text, str) for text in texts)
            and _IDENTITY.fullmatch(self.id) is not None
            and all(type(count) is int and 0 <= count < _MOST for count in counts)
            and self.sink_shift <= self.shift
            and max(self.computed, self.floor) <= len(self.tokens)
            and self.sinks < CHUNK
            and ends == sorted(ends)
            and all(len(bytes.fromhex(key)) > 0 for key in (*self.keys, *self.tail_windows))
            and isinstance(bytes.fromhex(self.tail), bytes)
        )

    @property
    def provenance(self) -> str:
        """The part of the key of every chunk that tells this session's KV from that of the same tokens elsewhere."""
        return self.salt + self.truncation_id

    @property
    def document(self) -> str:
        """The name of its document in a store."""
        return document_name(self.name)

    @property
    def chunk_keys(self) -> list[bytes]:
        """Keys of its chunks on disk, the first one first."""
        return [bytes.fromhex(key) for key in self.keys]

    def fork(self, name: str) -> History:
        """Returns the same conversation under another name."""
        self.tail_shared = True
        return replace(self, name=name, tokens=list(self.tokens), decoded=list(self.decoded), turns=list(self.turns))

    def forget_from(self, token: int) -> None:
        """Tokens from `token` on are to be computed anew, by prefill."""
        self.computed = min(self.computed, token)
        self.decoded = [(a, min(b, token)) for a, b in self.decoded if a < token]

    def decoded_with(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Returns what `decoded` is when decode steps have computed tokens [start, stop) too, behind all others."""
        return [*self.decoded, (start, stop)] if start < stop else list(self.decoded)

    @property
    def sinks_document(self) -> str:
        """The document with the originals of its sinks' keys. All forks share it."""
        return f"{SINKS}-{self.id}-{self.sinks:x}"

    @property
    def exact(self) -> int:
        """Tokens before the first that a decode step computed."""
        return self.decoded[0][0] if self.decoded else len(self.tokens)

    def truncate(self, kept: list[int], sinks: int) -> None:
        """Only the tokens at `kept` (rising, below `computed`) and those not computed yet are left."""
        gone = self.computed - len(kept)
        text = f"{self.truncation_id} {self.id} {self.computed} {kept}"
        decoded = {token for start, stop in self.decoded for token in range(start, stop)}
        ranges = ranges_of(new for new, old in enumerate(kept) if old in decoded)
        self.tokens = [self.tokens[i] for i in kept] + self.tokens[self.computed :]
        self.decoded = [(run.start, run.stop) for run in ranges]
        # What slides sees no token across a gap: only the last run of kept tokens, if the next ones follow it at once.
        follows = kept[-1:] == [self.computed - 1]
        run = len(ranges_of(kept)[-1]) if follows else 0
        self.floor = max(len(kept) - run, sum(token < self.floor for token in kept))
        self.computed, self.shift, self.sinks = len(kept), self.shift + gone, sinks
        self.truncation_id = f"+cut-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def close_gap(self) -> None:
        """The sinks' keys have been rotated across the whole gap."""
        self.sink_shift = self.shift
        self.truncation_id += f"+{self.shift}"

    def restart(self, tokens: list[int]) -> None:
        """Only `tokens` are left, to be computed as if they were all there ever was."""
        self.tokens = tokens
        self.forget_from(0)
        self.truncation_id, self.shift, self.sinks, self.sink_shift, self.floor = "", 0, 0, 0, 0


def document_name(name: str) -> str:
    """Return the name of the document of the session `name` in a store: a digest. Any text may be a session's name, and
    file systems differ in the characters, cases and normal forms that they tell apart."""
    return f"session-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


def check_name(name: object) -> None:
    """Raise InputError if `name` cannot be a session's name."""
    try:
        possible = isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and bool(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair
        possible = False
    if not possible:
        raise InputError(f"session name {name!r:.80} must be a text of 1 to {LONGEST_NAME} characters")
