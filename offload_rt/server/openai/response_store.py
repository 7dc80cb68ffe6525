"""Responses that may be gone on with, each for the key that asked for it: in memory, or in the sessions' folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..documents import Documents, digest
from ..errors import RefusedError


def response_of(owner: str, name: str) -> str:
    """Return the session of the response `name` of a key; no other key's response has the same."""
    return digest("response", owner, name)


@dataclass(frozen=True)
class Kept:
    """A response as it was answered, and the conversation up to and with it. session: where the engine keeps what it
    computed, the same for all responses of a conversation."""

    owner: str
    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    session: str


class ResponseStore:
    """Responses by id. One key's are not there for another: the answer is the same as for an id that never was."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def add(self, name: str, kept: Kept) -> list[str]:
        """Keeps a response. Returns the sessions that no response needs any more."""
        head = {"owner": kept.owner, "session": kept.session}
        body = {"response": kept.response, "messages": kept.messages}
        forgotten = self._documents.put(digest(name), head, body)
        return self._unneeded([each["session"] for each in forgotten])

    def get(self, name: str, owner: str) -> Kept:
        """The response; raises RefusedError (404) where it is not there."""
        head = self._documents.head(digest(name))
        body = None if head is None or head.get("owner") != owner else self._documents.body(digest(name))
        if head is None or body is None:
            raise RefusedError(
                404,
                f"the response {name!r:.80} is not here: responses are kept for a while",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return Kept(owner, body["response"], body["messages"], head["session"])

    def delete(self, name: str, owner: str) -> str:
        """Forgets the response, and returns its session, of which nothing should be left either; other responses of
        the conversation can be gone on with all the same. Raises as `get`."""
        session = self.get(name, owner).session
        self._documents.delete(digest(name))
        return session

    def _unneeded(self, sessions: Sequence[str]) -> list[str]:
        needed = {head.get("session") for head in self._documents.heads().values()} if sessions else set()
        return [session for session in dict.fromkeys(sessions) if session not in needed]
