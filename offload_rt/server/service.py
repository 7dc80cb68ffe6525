"""State and operations that all endpoints share: generation, sessions and metrics."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from ..async_llm import AsyncLLM
from ..errors import ConfigError, OffloadError, PoolFullError, SessionBusyError
from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from ..utils.atomic_files import write_atomic
from ..utils.home import expand_user
from ..utils.private_files import make_private_folder
from ..utils.small_files import read_small
from .documents import Conversations, DocumentCache, ResponseStore, response_of, session_of
from .engines import Engines
from .errors import RefusedError, bad_request, shutting_down
from .log import logger
from .metrics import Metrics, Usage
from .openai.requests import RequestBody, SampledBody
from .options import ServerOptions
from .parsers import reasoning_parser, tool_parser
from .prompts import Prompts, TokenLimits


@dataclass(frozen=True)
class EngineArguments:
    """Engine options of a request.

    `session` is the engine's session id (see `session_of`), not the client's name for it.
    """

    policy: str | None = None
    policy_options: Mapping[str, Any] | None = None
    session: str | None = None
    trace: bool = False
    cache_salt: str = ""


class Service:
    """Engines, stores and options of one server. All endpoints share this object."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.engines = Engines(engine, options)
        self.conversations = Conversations(self._documents("conversations", Conversations.FIELDS))
        self.responses = ResponseStore(self._documents("responses", ResponseStore.FIELDS))
        self._locked: set[str] = set()
        self._salt_key = _salt_key(options.documents)
        self._separate_keys = len(set(options.api_keys)) > 1 and not options.share_prefixes
        self._deletions: set[asyncio.Task[None]] = set()
        self.names = options.served_model_names or (_default_name(engine.llm.name),)
        self.name = self.names[0]
        self.created = int(time.time())
        self.limits = limits = TokenLimits(engine.llm.runner.max_positions, engine.llm.max_model_len, options)
        self.prompts = Prompts(engine.llm.tokenizer, limits)
        self.metrics = Metrics(self.engines, self.name)
        self.tools = tool_parser(options.tool_parser, self.prompts.template)
        self.reasoning = reasoning_parser(options.reasoning_parser, self.prompts.template)

    def check_model(self, name: str | None) -> str:
        """Return the model name to use in the response.

        Raises RefusedError (404) if `name` is not a name of this model.
        """
        if name is None or name in self.names or self.options.accept_any_model:
            return name or self.name
        raise RefusedError(
            404,
            f"the model {name!r} does not exist: this server has {' and '.join(map(repr, self.names))}",
            param="model",
            code="model_not_found",
        )

    def check_request(self, body: RequestBody, request: Request) -> None:
        """Check the model name in a request, and record unknown fields for the log and the response header."""
        request.state.model = self.check_model(body.model)
        if ignored := body.ignored_fields:
            request.state.notes["ignored_fields"] = ignored

    def arguments(self, body: SampledBody, request: Request, *, trace: bool = False) -> EngineArguments:
        """Return the engine options of a request. Raises RefusedError if its fields cannot be combined."""
        if body.exact is not None and body.exact != (self.engine.llm.config.exact is not None):
            raise bad_request(
                "exact differs from the server's setting, which requests cannot change: remove it", "exact"
            )
        salt = self.salt(request, body.cache_salt)
        if body.session is None:
            return EngineArguments(body.policy, body.policy_options, None, trace, salt)
        if not self.stores_sessions:
            raise bad_request(
                "this server does not store sessions: remove session, or start the server with its own --store folder",
                "session",
            )
        if body.policy is not None:
            raise bad_request("a session always uses the server's policy: remove policy or session", "policy")
        session = session_of(request.state.owner, body.session)
        return EngineArguments(session=session, trace=trace, cache_salt=salt)

    def salt(self, request: Request, given: str | None) -> str:
        """Return the engine's cache salt for a request. `given` is the request's `cache_salt` field.

        With several API keys, each key gets its own salts, so that clients do not share KV.
        """
        owner = request.state.owner if self._separate_keys else ""
        if not owner and not given:
            return ""
        text = f"{owner}:{given or ''}"
        # The engine writes the salt to session files. Because of the secret key, readers of these files cannot test
        # guessed API keys.
        return hmac.new(self._salt_key, text.encode(), hashlib.sha256).hexdigest()

    def params(self, **fields: Any) -> SamplingParams:
        return self.engine.llm.get_default_sampling_params(**fields)

    def _documents(self, kind: str, fields: Collection[str]) -> DocumentCache:
        folder = self.options.documents
        try:
            return DocumentCache(None if folder is None else folder / kind, fields)
        except OSError as error:
            raise ConfigError(f"cannot store conversations in {str(folder)!r}: {error.strerror or error}") from error

    @property
    def stores_sessions(self) -> bool:
        return self.options.documents is not None

    def is_locked(self, session: str) -> bool:
        return session in self._locked

    @contextmanager
    def locked(self, *names: str | None) -> Iterator[None]:
        """Lock sessions and responses, given by id, during the `with` statement. Names that are None are ignored.

        Other requests that use, store or delete a locked session get SessionBusyError (409).
        """
        sessions = {name for name in names if name is not None}
        if sessions & self._locked:
            raise SessionBusyError("this conversation is in use by another request")
        self._locked |= sessions
        try:
            yield
        finally:
            self._locked -= sessions

    async def delete_session(self, owner: str, name: str) -> None:
        """Delete a conversation and its KV.

        Raises:
            RefusedError: The conversation does not exist (404).
            SessionBusyError: A request is using the conversation.
            StoreError: A file cannot be deleted.
        """
        session = session_of(owner, name)
        with self.locked(session):
            # Text completions and early disconnects leave behind engine sessions that have no conversation.
            known = await self._delete_kv(session)
            if not known or self.conversations.exists(owner, name):
                self.conversations.delete(owner, name)

    async def delete_response(self, owner: str, name: str) -> None:
        """Delete a response and the KV of its conversation. Raises the same errors as `delete_session`."""
        with self.locked(response_of(owner, name)):  # lock before `get`: a running response is not stored yet
            session = self.responses.get(name, owner).session
            with self.locked(None if session == response_of(owner, name) else session):
                await self._delete_kv(session)
                self.responses.delete(name)

    async def _delete_kv(self, session: str) -> bool:
        return self.stores_sessions and await self.engine.delete_session(session)

    def delete_in_background(self, sessions: Sequence[str]) -> None:
        """Delete the KV of evicted conversations in the background, but skip sessions that are in use."""
        # A request that is using a session will store the conversation again.
        for session in [name for name in sessions if self.stores_sessions and not self.is_locked(name)]:
            task = asyncio.ensure_future(self._delete_quietly(session))
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    async def _delete_quietly(self, session: str) -> None:
        try:
            await self.engine.delete_session(session)
        except OffloadError as error:
            logger.warning("cannot delete a session: %s", error)

    async def outputs(
        self, request: Request, ids: Sequence[int], params: SamplingParams, arguments: EngineArguments
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request until it is finished. Closing the iterator aborts the request.

        Raises:
            OffloadError: Generation failed. The message contains no private information, so it may be sent to clients.
            TimeoutError: The deadline has passed.
            RefusedError: The server is shutting down.
        """
        begun = time.perf_counter()
        given: dict[str, Any] = {
            "session": arguments.session,
            "trace": arguments.trace,
            "cache_salt": arguments.cache_salt,
        }
        deadline, first, last = request.state.deadline, 0.0, None
        reason, copies = "abort", 1
        if params.temperature == 0 and params.num_beams == 1:  # all completions would be equal, so compute only one
            copies, params = params.n, replace(params, n=1)
        try:
            async with (
                self.engines.engine_for(arguments.policy, arguments.policy_options) as engine,
                aclosing(engine.generate(list(ids), params, **given)) as states,
            ):
                while last is None or not last.finished:
                    async with asyncio.timeout_at(deadline):
                        last = _repeat_completion(await anext(states), copies)
                    if not first and any(each.token_ids for each in last.outputs):
                        first = time.perf_counter()
                        self.metrics.record_first_token(first - begun)
                    reasons = [each.finish_reason for each in last.outputs]
                    if "abort" in reasons:
                        raise shutting_down()
                    if last.finished:
                        reason = reasons[0] or "abort"
                    yield last
        except TimeoutError:
            reason = "timeout"
            raise
        except OffloadError as error:
            error.args = (self._public_message(error),)
            raise
        finally:
            now = time.perf_counter()
            usage = Usage(len(ids)) if last is None else Usage.from_output(last)
            self.metrics.record_request(reason, usage, now - begun, now - first if first else 0.0)
            self._log_statistics(request, ids, last, usage, reason, first - begun if first else None)

    def _public_message(self, error: OffloadError) -> str:
        """Return the error message without the model's folder and without the sessions of other clients."""
        if isinstance(error, PoolFullError) and isinstance(error.__cause__, PoolFullError):
            logger.warning("not enough KV cache for a request: %s", error)
            error = error.__cause__
        return str(error).replace(self.engine.llm.name, self.name)

    def _log_statistics(
        self,
        request: Request,
        ids: Sequence[int],
        last: RequestOutput | None,
        usage: Usage,
        reason: str,
        first: float | None,
    ) -> None:
        notes: dict[str, Any] = request.state.notes
        for name, count in asdict(usage).items():
            notes[f"{name}_tokens"] = notes.get(f"{name}_tokens", 0) + count
        notes["finish"] = reason
        if first is not None:
            notes.setdefault("first_token_seconds", round(first, 4))
        if self.options.log_prompts:
            tokenizer = self.engine.llm.tokenizer
            texts = tokenizer is not None and max(ids) < len(tokenizer)  # a refused prompt may have invalid token ids
            prompt = tokenizer.decode(list(ids)) if tokenizer is not None and texts else list(ids)
            notes.setdefault("prompts", []).append(prompt)
            notes.setdefault("answers", []).append([each.text for each in last.outputs] if last else [])

    async def close(self) -> None:
        self.prompts.close()
        await asyncio.gather(*self._deletions, return_exceptions=True)
        await self.engines.close()


def _repeat_completion(output: RequestOutput, copies: int) -> RequestOutput:
    if copies == 1:
        return output
    return replace(output, outputs=[replace(output.outputs[0], index=i) for i in range(copies)])


def _salt_key(folder: Path | None) -> bytes:
    """Return the secret key for cache salts. It is stored in `folder`, so that it survives a restart.

    Raises ConfigError.
    """
    if folder is None:
        return secrets.token_bytes(32)
    path = folder / "salt.key"
    try:
        make_private_folder(folder)
        if not path.exists():
            write_atomic(path, secrets.token_bytes(32), keep=True)  # if several servers try this, one succeeds
        key = read_small(path)
        if not key:  # Without hard links, another server is writing the file, or was stopped while writing it.
            time.sleep(1)
            key = read_small(path)
        if not key:
            key = secrets.token_bytes(32)
            write_atomic(path, key)
    except OSError as error:
        raise ConfigError(f"cannot use {str(path)!r}: {error.strerror or error}") from error
    if len(key) != 32:
        raise ConfigError(f"{str(path)!r} is damaged: delete it; prompts stored with salts are then computed again")
    return key


def _default_name(name: str) -> str:
    """Return the model's hub id, or only the last part of a path, because folders are private."""
    path = expand_user(name)
    return path.name if path.is_absolute() or path.exists() else name


async def _service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(_service_of)]
"""Type for parameters of routes. FastAPI passes the application's `Service` to them."""
