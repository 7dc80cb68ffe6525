"""Storage of responses that can be continued with `previous_response_id`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..documents import Documents, digest
from ..errors import RefusedError


def response_of(owner: str, name: str) -> str:
    """Return the engine's session id of a response. It is unique for each API key and response id."""
    return digest("response", owner, name)


@dataclass(frozen=True)
class Kept:
    """A stored response.

    Attributes:
        owner: Digest of the API key.
        response: JSON of the response.
        messages: Conversation including the response.
        session: Engine session with the KV. Consecutive responses of a conversation share it.
    """

    owner: str
    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    session: str


class ResponseStore:
    """Responses by id. For other API keys a response does not exist."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def add(self, name: str, kept: Kept) -> list[str]:
        """Store a response. Return the sessions of evicted responses that no other response uses."""
        head = {"owner": kept.owner, "session": kept.session}
        body = {"response": kept.response, "messages": kept.messages}
        forgotten = self._documents.put(digest(name), head, body)
        return self._unneeded([each["session"] for each in forgotten])

    def get(self, name: str, owner: str) -> Kept:
        """Return a response. Raises RefusedError (404) if it does not exist."""
        head = self._documents.head(digest(name))
        body = None if head is None or head.get("owner") != owner else self._documents.body(digest(name))
        if head is None or body is None:
            raise RefusedError(
                404,
                f"the response {name!r:.80} does not exist, or has been evicted: send the whole conversation",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return Kept(owner, body["response"], body["messages"], head["session"])

    def delete(self, name: str, owner: str) -> str:
        """Delete a response and return its session, which the caller deletes too. Raises as `get`.

        Other responses of the conversation remain usable.
        """
        session = self.get(name, owner).session
        self._documents.delete(digest(name))
        return session

    def _unneeded(self, sessions: Sequence[str]) -> list[str]:
        needed = {head.get("session") for head in self._documents.heads().values()} if sessions else set()
        return [session for session in dict.fromkeys(sessions) if session not in needed]
