"""Persistent state of a session: its tokens and messages, and the keys of its blocks."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import uuid
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..core import BLOCK_SIZE, ranges_of

FORMAT = 2
"""Format version of stored histories. Stores with format 1 are rejected."""

SINKS = "sinks"
"""Prefix of the names of files that store the unrotated keys of attention sinks."""

_IDENTITY = re.compile("[0-9a-f]{32,64}")

_MOST = 1 << 40
"""Token counts and token ids in a stored history must be below this limit so that they fit in int64."""


@dataclass
class History:
    """Persistent state of a session, stored as one JSON document.

    A truncation does not move the tokens after the removed ones. The positions of the removed tokens form the *gap*.

    Attributes:
        id: Hexadecimal id of the session, the same for all forks.
        tokens: Tokens of the conversation, without truncated tokens.
        computed: Number of leading tokens whose KV was computed.
        decoded: Ranges [start, stop) of tokens whose KV was computed by decode steps, in ascending order. All other KV
            was computed by a prefill.
        turns: (role, text) of each message, for display.
        starts: For each of the latest turns, the number of tokens before it. Used by `undo`.
        truncation_id: Part of the KV provenance key that identifies all truncations, or "".
        shift: Number of truncated tokens. After the gap, the token at index i has the position i + `shift`.
        sinks: Number of attention sinks (first tokens) whose unrotated keys are stored. 0 if sinks are never rotated.
        sink_shift: Number of positions by which the sinks' keys are rotated (RoPE).
        keys: Keys of the blocks on disk, in hexadecimal.
        tail: Key of the partly filled last block of the full-attention layers, or "".
        tail_windows: Keys of the partly filled last blocks of the sliding layers.
        tail_shared: Whether a fork may use these partly filled blocks.
        floor: Index of the first token that sliding layers may attend to.
        salt: Part of the KV provenance key that is derived from the cache salt of the first turn (`salt_provenance`).
        states: The subset of `keys` that belongs to snapshots of recurrent state.
        removed: Number of truncated tokens. Unlike `shift`, it is kept if the remaining tokens are computed again.
    """

    name: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    decoded: list[tuple[int, int]] = field(default_factory=list)
    turns: list[tuple[str, str]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
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
    states: list[str] = field(default_factory=list)
    removed: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> History | None:
        """Parse the output of `to_bytes`. Return None if the format version or the content is invalid."""
        try:
            fields: dict[str, Any] = json.loads(data)
            if fields.pop("format") != FORMAT:
                return None
            fields.setdefault("removed", fields["shift"])  # earlier versions did not store it
            history = cls(**fields)
            history.decoded = [(int(a), int(b)) for a, b in history.decoded]
            history.turns = [(str(role), str(text)) for role, text in history.turns]
            return history if history._is_valid() else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def _is_valid(self) -> bool:
        # The document may have been edited or damaged. Some fields become file names, so they are checked.
        texts = (self.name, self.model, self.truncation_id, self.tail, self.system, self.salt)
        counts = (self.computed, self.shift, self.sinks, self.sink_shift, self.floor, self.removed)
        starts = [0, *self.starts, len(self.tokens)]
        ends = [0, *itertools.chain(*self.decoded), len(self.tokens)]
        return (
            all(isinstance(text, str) for text in texts)
            and all(isinstance(text.encode(), bytes) for text in (self.name, self.provenance))  # no lone surrogates
            and _IDENTITY.fullmatch(self.id) is not None
            and all(type(count) is int and 0 <= count < _MOST for count in (*counts, *self.starts, *self.tokens))
            and self.sink_shift <= self.shift
            and max(self.computed, self.floor) <= len(self.tokens)
            and self.sinks < BLOCK_SIZE
            and ends == sorted(ends)
            and starts == sorted(starts)
            and 2 * len(self.starts) <= len(self.turns)
            and all(len(bytes.fromhex(key)) > 0 for key in (*self.keys, *self.tail_windows, *self.states))
            and isinstance(bytes.fromhex(self.tail), bytes)
        )

    @property
    def provenance(self) -> str:
        """Part of the KV provenance key that covers the cache salt and truncations."""
        return self.salt + self.truncation_id

    @property
    def document(self) -> str:
        return document_name(self.name)

    @property
    def block_keys(self) -> list[bytes]:
        return [bytes.fromhex(key) for key in self.keys]

    def add_turn(self, start: int, user: str, response: str, *, rewritten: bool) -> None:
        """Record a turn whose tokens begin at index `start`.

        `rewritten` tells whether the turn has replaced earlier tokens. If so, `undo` can no longer remove this turn or
        any earlier turn.
        """
        self.turns += [("user", user), ("assistant", response)]
        self.starts = [] if rewritten else [*self.starts, start]

    def undo(self) -> str:
        """Remove the last turn and return its user message. `starts` must not be empty."""
        self.tokens = self.tokens[: self.starts.pop()]
        self.forget_from(len(self.tokens))
        self.floor = min(self.floor, len(self.tokens))
        if len(self.tokens) <= self.sinks:  # no token is left after the gap of a truncation
            self.restart(self.tokens)
        (_, text), _ = self.turns[-2:]
        del self.turns[-2:]
        return text

    def fork(self, name: str) -> History:
        self.tail_shared = True
        return replace(
            self, name=name, tokens=list(self.tokens), decoded=list(self.decoded), turns=list(self.turns),
            starts=list(self.starts),
        )  # fmt: skip

    def forget_from(self, token: int) -> None:
        """Mark the KV of all tokens from index `token` on as lost."""
        self.computed = min(self.computed, token)
        self.decoded = [(a, min(b, token)) for a, b in self.decoded if a < token]

    def decoded_with(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return `decoded` extended by the tokens [start, stop). They must follow all earlier decoded tokens."""
        return [*self.decoded, (start, stop)] if start < stop else list(self.decoded)

    @property
    def sinks_document(self) -> str:
        return f"{SINKS}-{self.id}-{self.sinks:x}"

    @property
    def exact(self) -> int:
        return self.decoded[0][0] if self.decoded else len(self.tokens)

    def truncate(self, kept: list[int], sinks: int) -> None:
        """Remove all computed tokens except those whose indices are in `kept` (ascending, each below `computed`).

        `sinks` is the number of sinks whose unrotated keys are stored.
        """
        gone = self.computed - len(kept)
        text = f"{self.truncation_id} {self.id} {self.computed} {kept}"
        gaps = [bisect_left(kept, start) if start < self.computed else start - gone for start in self.starts]
        decoded = {token for start, stop in self.decoded for token in range(start, stop)}
        ranges = ranges_of(new for new, old in enumerate(kept) if old in decoded)
        self.tokens = [self.tokens[i] for i in kept] + self.tokens[self.computed :]
        self.decoded, self.starts = [(run.start, run.stop) for run in ranges], gaps
        # Sliding windows do not cross gaps. If the last computed token is dropped, they include no kept token.
        follows = kept[-1:] == [self.computed - 1]
        run = len(ranges_of(kept)[-1]) if follows else 0
        self.floor = max(len(kept) - run, sum(token < self.floor for token in kept))
        self.computed, self.shift, self.sinks = len(kept), self.shift + gone, sinks
        self.removed += gone
        self.truncation_id = f"+cut-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"

    def close_gap(self) -> None:
        """Record that the sinks' keys have been rotated to the positions directly before the other tokens."""
        self.sink_shift = self.shift
        self.truncation_id += f"+{self.shift}"

    def restart(self, tokens: list[int]) -> None:
        """Replace all tokens with `tokens`, which have no KV, and forget the positions of truncated tokens."""
        self.removed += len(self.tokens) - len(tokens)
        if tokens is not self.tokens:
            self.starts = []  # it is unknown which of the new tokens belong to which turn
        self.tokens = tokens
        self.forget_from(0)
        self.truncation_id, self.shift, self.sinks, self.sink_shift, self.floor = "", 0, 0, 0, 0


def document_name(name: str) -> str:
    # Use a digest, because a session name may be any text. File systems differ in the characters that they allow, in
    # case folding and in Unicode normalization.
    return f"session-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
