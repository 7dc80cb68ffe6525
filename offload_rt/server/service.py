"""What all protocols ask of the engine: prompts, room, and a request's outputs as they come, with a time limit,
figures and a line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request

from ..async_llm import AsyncLLM
from ..errors import ConfigError, OffloadError, PoolFullError, SessionBusyError
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from .conversations import Conversations, session_of
from .deltas import Usage, usage_of
from .documents import Documents
from .engines import Engines
from .errors import RefusedError, ending, refused
from .figures import Figures
from .log import logger
from .openai.requests import SampledBody
from .openai.response_store import ResponseStore, response_of
from .options import ServerOptions
from .parsers.choose import reasoning_parser, tool_parser
from .prompts import Prompts
from .sampling import Room


@dataclass(frozen=True)
class Where:
    """How the engine takes a request: under which policy, in which session (the engine's name for it), traced or not,
    and with which cache salt."""

    policy: str | None = None
    policy_options: Mapping[str, Any] | None = None
    session: str | None = None
    trace: bool = False
    cache_salt: str = ""

    @property
    def named(self) -> dict[str, Any]:
        """Arguments of `AsyncLLM.generate`, without those that have their defaults."""
        given = {"session": self.session, "trace": self.trace, "cache_salt": self.cache_salt}
        return {name: value for name, value in given.items() if value}


class Service:
    """One model behind all endpoints."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.engines = Engines(engine, options)
        self.conversations = Conversations(self._documents("conversations"))
        self.responses = ResponseStore(self._documents("responses"))
        self._held: set[str] = set()
        self._salt_key = secrets.token_bytes(32)
        self._salts_keys = len(set(options.api_keys)) > 1 and not options.share_prefixes
        self._forgetting: set[asyncio.Task[None]] = set()
        self.name = options.served_model_name or _called(engine.llm.name)
        self.created = int(time.time())
        self.room = room = Room(engine.llm.geometry.max_positions, engine.llm.most_tokens, options)
        self.prompts = Prompts(engine.llm.tokenizer, room)
        self.figures = Figures(self.engines, self.name)
        self.tools = tool_parser(options.tool_parser, self.prompts.template)
        self.reasoning = reasoning_parser(options.reasoning_parser, self.prompts.template)

    def check_model(self, asked: str | None) -> None:
        """Refuses another model than the one there is."""
        if asked is not None and asked != self.name:
            raise RefusedError(
                404,
                f"the model {asked!r} is not here: this server has {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def where(self, body: SampledBody, request: Request, *, trace: bool = False) -> Where:
        """How the engine takes a request. Raises RefusedError for what this server cannot."""
        if body.exact is not None and body.exact != (self.engine.llm.config.exact is not None):
            raise refused("exact is the server's, not a request's: leave it out, or start another server", "exact")
        salt = self.salt(request, body.cache_salt)
        if body.session is None:
            return Where(body.policy, body.policy_options, None, trace, salt)
        if not self.remembers:
            raise refused("this server keeps no sessions: leave session out, or start it with --store", "session")
        if body.policy is not None:
            raise refused("a session stays under the server's policy: leave policy or session out", "policy")
        session = session_of(request.scope["state"]["owner"], body.session)
        return Where(session=session, trace=trace, cache_salt=salt)

    def salt(self, request: Request, given: str | None) -> str:
        """Return the cache salt of a request: from its API key if there are several, and from the client's own.

        The engine writes a digest of it to the files of sessions. The digest is keyed with a secret of this process, so
        that nobody who reads the files can try API keys against it. A session keeps its salt in its file, so no secret
        has to outlive the process.
        """
        owner = request.scope["state"]["owner"] if self._salts_keys else ""
        if not owner and not given:
            return ""
        text = f"{owner}:{given or ''}"
        return hmac.new(self._salt_key, text.encode(), hashlib.sha256).hexdigest()

    def params(self, **fields: Any) -> SamplingParams:
        """How tokens are chosen: as the model's `generation_config.json` says, with `fields` on top. Raises ConfigError
        (400)."""
        return self.engine.llm.get_default_sampling_params(**fields)

    def _documents(self, kind: str) -> Documents:
        """Texts of one kind. Raises ConfigError where the folder cannot be used."""
        folder = self.options.documents
        try:
            return Documents(None if folder is None else folder / kind)
        except OSError as error:
            raise ConfigError(f"cannot keep conversations in {str(folder)!r}: {error.strerror or error}") from error

    @property
    def remembers(self) -> bool:
        """Whether sessions are kept, in a store."""
        return self.options.documents is not None

    def is_answering(self, name: str) -> bool:
        """Whether a session or a response is held by `answering`."""
        return name in self._held

    @contextmanager
    def answering(self, *names: str | None) -> Iterator[None]:
        """Hold sessions and responses while they are answered, until what was said is stored, or while they are
        deleted. Raises SessionBusyError (409) if one of them is held."""
        held = {name for name in names if name is not None}
        if held & self._held:
            raise SessionBusyError("this conversation is being answered or deleted")
        self._held |= held
        try:
            yield
        finally:
            self._held -= held

    async def delete_session(self, owner: str, name: str) -> None:
        """Delete a conversation and its KV. Raises RefusedError (404), SessionBusyError, StoreError."""
        session = session_of(owner, name)
        with self.answering(session):
            # The engine may have one without a conversation: of text completions, and of clients that left early.
            known = await self._delete_kv(session)
            if not known or self.conversations.exists(owner, name):
                self.conversations.delete(owner, name)

    async def delete_response(self, owner: str, name: str) -> None:
        """Delete a response and the KV of its conversation. Raises as `delete_session`."""
        with self.answering(response_of(owner, name)):  # first: one that is being answered is not stored yet
            session = self.responses.get(name, owner).session
            with self.answering(None if session == response_of(owner, name) else session):
                await self._delete_kv(session)
                self.responses.delete(name, owner)

    async def _delete_kv(self, session: str) -> bool:
        return self.remembers and await self.engine.delete_session(session)

    def forget(self, sessions: Sequence[str]) -> None:
        """Delete in the background the KV of conversations that were evicted. One that is being answered stays: its
        conversation is stored again when the answer ends."""
        for session in [name for name in sessions if self.remembers and not self.is_answering(name)]:
            task = asyncio.ensure_future(self._forget(session))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    async def _forget(self, session: str) -> None:
        try:
            await self.engine.delete_session(session)
        except OffloadError as error:
            logger.warning("a session could not be deleted: %s", error)

    async def outputs(
        self, request: Request, ids: Sequence[int], params: SamplingParams, where: Where | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The states of one request; the last is finished. Closing the iterator aborts it. Raises what the engine does,
        TimeoutError, and RefusedError where the server ends."""
        where = where or Where()
        begun = time.perf_counter()
        deadline, first, last = request.scope["state"]["deadline"], 0.0, None
        reason = "abort"
        try:
            async with (
                self.engines.under(where.policy, where.policy_options) as engine,
                aclosing(engine.generate(list(ids), params, **where.named)) as states,
            ):
                while last is None or not last.finished:
                    async with asyncio.timeout_at(deadline):
                        last = await anext(states)
                    if not first and any(each.token_ids for each in last.outputs):
                        first = time.perf_counter()
                        self.figures.began(first - begun)
                    reasons = [each.finish_reason for each in last.outputs]
                    if "abort" in reasons:
                        raise ending()
                    if last.finished:
                        reason = reasons[0] or "abort"
                    yield last
        except TimeoutError:
            reason = "timeout"
            raise
        except OffloadError as error:
            error.args = (self._for_client(error),)
            raise
        finally:
            now = time.perf_counter()
            usage = Usage(len(ids)) if last is None else usage_of(last)
            self.figures.ended(reason, usage, now - begun, now - first if first else 0.0)
            self._note(request, ids, last, usage, reason, first - begun if first else None)

    def _for_client(self, error: OffloadError) -> str:
        """The message of an error without what clients must not see: the folder of the model, and which sessions, maybe
        of other keys, hold how much memory. The log has all of it."""
        if isinstance(error, PoolFullError) and isinstance(error.__cause__, PoolFullError):
            logger.warning("a request found no room: %s", error)
            error = error.__cause__
        return str(error).replace(self.engine.llm.name, self.name)

    def _note(
        self,
        request: Request,
        ids: Sequence[int],
        last: RequestOutput | None,
        usage: Usage,
        reason: str,
        first: float | None,
    ) -> None:
        """Adds what a request cost to its line in the log; several prompts of one request add up."""
        notes: dict[str, Any] = request.scope["state"]["notes"]
        for name, count in (
            ("prompt_tokens", usage.prompt),
            ("cached_tokens", usage.cached),
            ("generated_tokens", usage.generated),
        ):
            notes[name] = notes.get(name, 0) + count
        notes["finish"] = reason
        if first is not None:
            notes.setdefault("first_token_seconds", round(first, 4))
        if self.options.log_prompts:
            tokenizer = self.engine.llm.tokenizer
            texts = tokenizer is not None and max(ids) < len(tokenizer)  # a refused prompt may have ids of no token
            prompt = tokenizer.decode(list(ids)) if tokenizer is not None and texts else list(ids)
            notes.setdefault("prompts", []).append(prompt)
            notes.setdefault("answers", []).append([each.text for each in last.outputs] if last else [])

    async def close(self) -> None:
        """Aborts what runs and ends all threads."""
        self.prompts.close()
        await asyncio.gather(*self._forgetting, return_exceptions=True)
        await self.engines.close()


def _called(name: str) -> str:
    """What clients call a model: a hub id as it is, of a path the last part, which says nothing of this machine."""
    path = Path(name).expanduser()
    return path.name if path.is_absolute() or path.exists() else name
