"""Responses that may be gone on with, in memory, each for the key that asked for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RefusedError

MOST = 1000
"""Responses that are kept; the one used longest ago goes first."""

MOST_CHARACTERS = 64 << 20
"""Of all conversations that are kept."""


@dataclass(frozen=True)
class Kept:
    """A response as it was answered, and the conversation up to and with it."""

    owner: str
    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]

    @property
    def characters(self) -> int:
        """Roughly what it takes."""
        return sum(len(str(message.get("content", ""))) + 100 for message in self.messages)


class ResponseStore:
    """Responses by id. One key's are not there for another: the answer is the same as for an id that never was."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._characters = 0

    def add(self, name: str, kept: Kept) -> None:
        """Keeps a response."""
        self._kept[name] = kept
        self._characters += kept.characters
        while len(self._kept) > MOST or self._characters > MOST_CHARACTERS:
            _, oldest = self._kept.popitem(last=False)
            self._characters -= oldest.characters

    def get(self, name: str, owner: str) -> Kept:
        """The response; raises RefusedError (404) where it is not there."""
        kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            raise RefusedError(
                404,
                f"the response {name!r:.80} is not here: responses are kept in memory, for a while",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        self._kept.move_to_end(name)
        return kept

    def delete(self, name: str, owner: str) -> None:
        """Forgets the response; raises as `get`."""
        self._characters -= self.get(name, owner).characters
        del self._kept[name]
