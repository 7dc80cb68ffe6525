"""Store conversations and responses as JSON documents, in memory or in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..storage.files import open_regular
from ..utils.atomic_files import write_atomic
from ..utils.private_files import make_private, make_private_folder
from ..utils.small_files import parse_json
from .errors import RefusedError, bad_request

Head = dict[str, Any]

MAX_DOCUMENTS = 10_000
"""Maximum number of documents of one kind. If there are more, the least recently used ones are evicted."""

MAX_BYTES = {False: 64 << 20, True: 4 << 30}
"""Maximum total size in bytes of the documents of one kind, in memory (False) and on disk (True)."""

_SUFFIX = ".json"
_FILE = re.compile(r"([0-9a-f]{32})\.json")
_TEMPORARY = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{32})?\.tmp")
_STALE = 60.0
"""Temporary files that are at least this old, in seconds, are removed.

Another server may still be writing younger files.
"""


def digest(*parts: str) -> str:
    """Return a digest of `parts`.

    Digests serve as file names. Clients cannot choose these names, and the names do not reveal `parts`.
    """
    text = "\0".join(f"{len(part)} {part}" for part in parts)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class DocumentCache:
    """Stores JSON documents and evicts the least recently used ones.

    A document has a name (a `digest`), a body, and a small head that is always kept in memory. In a folder, each
    document is a file of two lines, the head and the body. The file is replaced atomically. Several servers may share a
    folder.
    """

    def __init__(self, folder: Path | None = None, fields: Collection[str] = ()) -> None:
        """Open the store. Raises OSError if the folder cannot be created.

        Args:
            folder: Folder for the documents. If None, they are kept in memory.
            fields: Fields that every head must have. Files without these fields are ignored.
        """
        self._folder, self._fields = folder, frozenset(fields)
        self._heads: OrderedDict[str, Head] = OrderedDict()
        self._bodies: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        if folder is not None:
            make_private_folder(folder)
            make_private(folder)
            self._clean(folder)
            self._scan()

    def _clean(self, folder: Path) -> None:
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if _TEMPORARY.fullmatch(path.name) and path.lstat().st_mtime < time.time() - _STALE:
                    path.unlink()
                elif _FILE.fullmatch(path.name):
                    make_private(path)

    def _scan(self) -> None:
        if self._folder is None:
            return
        found = {}
        for entry in os.scandir(self._folder):
            if (match := _FILE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    found[match[1]] = entry.stat().st_mtime_ns
        for name in self._heads.keys() - found.keys():
            self._forget(name)
        for name in sorted(found.keys() - self._heads.keys(), key=found.__getitem__):
            self._read_head(name)

    def _read_head(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(ValueError, OSError), os.fdopen(open_regular(path), "rb") as file:
            head = parse_json(file.readline(1 << 20))
            if isinstance(head, dict) and head.keys() >= self._fields:
                self._heads[name], self._sizes[name] = head, path.stat().st_size

    def _forget(self, name: str) -> None:
        self._heads.pop(name, None)
        self._sizes.pop(name, None)
        self._bodies.pop(name, None)

    def heads(self) -> dict[str, Head]:
        """Return the heads by document name, starting with the least recently used one."""
        self._scan()
        return dict(self._heads)

    def head(self, name: str) -> Head | None:
        if self._folder is not None:
            self._read_head(name)
        return self._heads.get(name)

    def put(self, name: str, head: Head, body: Any) -> list[Head]:
        """Store or replace a document. Return the heads of evicted documents. Raises OSError if writing fails."""
        content = (json.dumps(head, ensure_ascii=True) + "\n" + json.dumps(body, ensure_ascii=True)).encode()
        if self._folder is None:
            self._bodies[name] = content
        else:
            # The event loop must not wait for a disk while KV is being written to it.
            write_atomic(self._path(name), content, durable=False)
        self._heads[name], self._sizes[name] = head, len(content)
        self._heads.move_to_end(name)
        evicted = []
        while len(self._heads) > MAX_DOCUMENTS or sum(self._sizes.values()) > MAX_BYTES[self._folder is not None]:
            oldest = next(iter(self._heads))
            evicted.append(self._heads[oldest])
            self.delete(oldest)
        return evicted

    def body(self, name: str) -> Any:
        """Return the body of a document, or None if it does not exist or is damaged."""
        if self.head(name) is None:
            return None
        self._heads.move_to_end(name)
        return self.read_body(name)

    def read_body(self, name: str) -> Any:
        """Return the same as `body`, but do not record this as a use of the document. Thread-safe."""
        try:
            if self._folder is None:
                content = self._bodies[name]
            else:
                with os.fdopen(open_regular(self._path(name)), "rb") as file:
                    content = file.read()
            return parse_json(content.partition(b"\n")[2])
        except (KeyError, OSError, ValueError):
            return None

    def delete(self, name: str) -> None:
        self._forget(name)
        if self._folder is not None:
            for path in (self._path(name), *self._folder.glob(f"{name}.*.tmp")):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / (name + _SUFFIX)


MAX_NAME = 100

_TITLE = 80
_EXCERPT = 120


def session_of(owner: str, name: str) -> str:
    """Return the engine's session id for the session that a client calls `name`. Raises RefusedError for invalid names.

    `owner` is the digest of the client's API key.
    """
    if not 1 <= len(name) <= MAX_NAME:
        raise bad_request(f"session must be a string of 1 to {MAX_NAME} characters", "session")
    return digest("session", owner, name)


class Conversations:
    """Stores conversations by session name. A client sees only the conversations of its API key (`owner`)."""

    FIELDS = ("owner", "id", "title", "turns", "updated")

    def __init__(self, documents: DocumentCache) -> None:
        self._documents = documents

    def store(
        self, owner: str, name: str, messages: Sequence[Mapping[str, Any]], title: str | None = None
    ) -> list[str]:
        """Store a conversation. Return the engine's session ids of the conversations that were evicted.

        If `title` is None, the title from an earlier call is kept. If there is none, the first question becomes the
        title.
        """
        known = self._documents.head(session_of(owner, name)) or {}
        given = title or known.get("given_title")
        turns = sum(message.get("role") == "user" for message in messages)
        head = {"owner": owner, "id": name, "title": given or _title(messages), "turns": turns, "updated": time.time()}
        head |= {"given_title": given} if given else {}
        evicted = self._documents.put(session_of(owner, name), head, list(messages))
        return [session_of(each["owner"], each["id"]) for each in evicted]

    def list_heads(self, owner: str) -> list[dict[str, Any]]:
        found = [head for head in self._documents.heads().values() if head.get("owner") == owner]
        found.sort(key=lambda head: float(head["updated"]), reverse=True)
        return [{name: head[name] for name in ("id", "title", "turns", "updated")} for head in found]

    def search(self, owner: str, heads: Sequence[Head], words: Sequence[str]) -> list[Head]:
        """Return the heads of conversations with all `words` (lower case) in their title or their messages.

        The field `excerpt` contains the text around the first word, or "" if only the title matches. This method reads
        all files, so call it in a worker thread.
        """
        found = []
        for head in heads:
            messages = self._documents.read_body(session_of(owner, head["id"])) or []
            text = "\n".join(each["content"] for each in messages if isinstance(each.get("content"), str))
            everything = f"{head['title']}\n{text}".lower()
            if all(word in everything for word in words):
                found.append({**head, "excerpt": _excerpt(text, words)})
        return found

    def exists(self, owner: str, name: str) -> bool:
        return self._documents.head(session_of(owner, name)) is not None

    def messages(self, owner: str, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] | None = self._documents.body(session_of(owner, name))
        if found is None:
            raise _unknown(name)
        return found

    def delete(self, owner: str, name: str) -> None:
        if not self.exists(owner, name):
            raise _unknown(name)
        self._documents.delete(session_of(owner, name))


def _unknown(name: str) -> RefusedError:
    return RefusedError(404, f"the session {name!r:.80} does not exist", param="session", code="session_not_found")


def _excerpt(text: str, words: Sequence[str]) -> str:
    lower = text.lower()
    starts = [start for word in words if (start := lower.find(word)) >= 0]
    if not starts:
        return ""
    begin = max(0, min(starts) - _EXCERPT // 4)
    return " ".join(text[begin : begin + _EXCERPT].split())


def _title(messages: Sequence[Mapping[str, Any]]) -> str:
    for message in messages:
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            lines = [line.strip() for line in message["content"].splitlines() if line.strip()]
            return lines[-1][:_TITLE] if lines else ""  # the question often comes after a document
    return ""


def response_of(owner: str, name: str) -> str:
    """Return the engine's id for the response that a client calls `name`.

    `owner` is the digest of the client's API key.
    """
    return digest("response", owner, name)


@dataclass(frozen=True)
class StoredResponse:
    """A response of the Responses API, together with its conversation.

    Attributes:
        owner: Digest of the API key.
        messages: Messages of the conversation, including the response.
        session: Id of the engine session. It is the same for all responses of a conversation.
        prefill: Beginning of the last message if the response continues it, otherwise "".
    """

    owner: str
    response: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    session: str
    prefill: str = ""

    @property
    def input_messages(self) -> list[Mapping[str, Any]]:
        continued = [{"role": "assistant", "content": self.prefill}] if self.prefill else []
        return [*self.messages[:-1], *continued]


class ResponseStore:
    """Stores the responses of the Responses API by id. A response can be read only with the API key that created it."""

    FIELDS = ("owner", "session")

    def __init__(self, documents: DocumentCache) -> None:
        self._documents = documents

    def add(self, name: str, stored: StoredResponse) -> list[str]:
        """Store a response. Return the sessions that were used only by responses that have now been evicted."""
        head = {"owner": stored.owner, "session": stored.session}
        body = {"response": stored.response, "messages": stored.messages, "prefill": stored.prefill}
        evicted = self._documents.put(digest(name), head, body)
        needed = {head["session"] for head in self._documents.heads().values()} if evicted else set()
        return [session for session in {each["session"]: None for each in evicted} if session not in needed]

    def get(self, name: str, owner: str) -> StoredResponse:
        head = self._documents.head(digest(name))
        body = None if head is None or head.get("owner") != owner else self._documents.body(digest(name))
        if head is None or body is None:
            raise RefusedError(
                404,
                f"the response {name!r:.80} does not exist, or has been evicted: send the whole conversation",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return StoredResponse(owner, body["response"], body["messages"], head["session"], body.get("prefill", ""))

    def delete(self, name: str) -> None:
        """Delete a response. Its session and the other responses of the conversation are kept."""
        self._documents.delete(digest(name))
