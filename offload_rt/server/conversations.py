"""Storage of conversations by session name."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .documents import Documents, digest
from .errors import RefusedError, refused

LONGEST_NAME = 100
"""Maximum length of a session name in characters."""

_TITLE = 80


def session_of(owner: str, name: str) -> str:
    """Return the engine's id of a session. It is unique for each API key and name."""
    if not 1 <= len(name) <= LONGEST_NAME:
        raise refused(f"session must be a name of 1 to {LONGEST_NAME} characters", "session")
    return digest("session", owner, name)


class Conversations:
    """Conversations by session name, separate for each API key (`owner`)."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def keep(self, owner: str, name: str, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Store a conversation. Return the engine ids of evicted sessions."""
        head = {
            "owner": owner,
            "id": name,
            "title": _title(messages),
            "turns": _turns(messages),
            "updated": time.time(),
        }
        forgotten = self._documents.put(session_of(owner, name), head, list(messages))
        return [session_of(each["owner"], each["id"]) for each in forgotten]

    def of(self, owner: str) -> list[dict[str, Any]]:
        """Return the heads of an owner's conversations, newest first."""
        found = [head for head in self._documents.heads().values() if head.get("owner") == owner]
        found.sort(key=lambda head: float(head["updated"]), reverse=True)
        return [{name: head[name] for name in ("id", "title", "turns", "updated")} for head in found]

    def exists(self, owner: str, name: str) -> bool:
        """Return whether a conversation is stored, even if its file is damaged."""
        return self._documents.head(session_of(owner, name)) is not None

    def messages(self, owner: str, name: str) -> list[dict[str, Any]]:
        """Return the messages of a conversation. Raises RefusedError (404) if it does not exist."""
        found: list[dict[str, Any]] | None = self._documents.body(session_of(owner, name))
        if found is None:
            raise _unknown(name)
        return found

    def delete(self, owner: str, name: str) -> str:
        """Delete a conversation and return its engine id. Raises RefusedError (404) if it does not exist."""
        if not self.exists(owner, name):
            raise _unknown(name)
        session = session_of(owner, name)
        self._documents.delete(session)
        return session


def _unknown(name: str) -> RefusedError:
    return RefusedError(404, f"there is no session {name!r:.80}", param="session", code="session_not_found")


def _title(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the last line of the first user message. Earlier lines may be a document."""
    for message in messages:
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            lines = [line.strip() for line in message["content"].splitlines() if line.strip()]
            return lines[-1][:_TITLE] if lines else ""
    return ""


def _turns(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(message.get("role") == "user" for message in messages)
