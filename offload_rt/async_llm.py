"""`AsyncLLM`: serve many asyncio clients with one engine loop that runs in a separate thread."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from .engine.async_clients import Client, EngineLoad, Mailbox, RequestTracer, call_in_thread
from .engine.checks import check_int_or_none, check_salt, check_sampling_params, describe_value
from .engine.logits_processors import check_answerable
from .engine.prompts import PromptLike, one_prompt
from .engine.request import Request, request_output
from .engine.scheduler import failure
from .errors import InputError, QueueFullError, StoreError
from .llm import LLM
from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .sessions.request_factory import StoredRequestFactory
from .sessions.stored_prompt import StoredPrompt
from .sessions.stored_request import StoredRequest
from .storage.options import StoreOptions

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Serves many asyncio clients with one engine loop that runs in a separate thread.

    Clients may run on several event loops. Requests are decoded with continuous batching, and common prefixes are
    computed once. The tokens of a request do not depend on other requests. An error ends only the request that caused
    it.

    Args:
        llm: The model to serve. `close` also closes it.
        max_waiting: Maximum number of queued requests. If the queue is full, `generate` raises QueueFullError. None
            means no limit.
        store: Folder for sessions and for the KV of all prompts. Later prompts with the same beginning reuse stored KV,
            even after a restart. With None, no KV is stored and sessions are not available.
        store_options: Options of the store.
        read_only: Reuse stored KV, but store no new KV and refuse sessions. Another process may write to the store.

    Raises:
        InputError: `llm` is not an `LLM`.
        ConfigError, StoreError: The store cannot be used. See `LLM.session`.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int | None = None,
        store: str | Path | None = None,
        store_options: StoreOptions | None = None,
        read_only: bool = False,
    ) -> None:
        if not isinstance(llm, LLM):
            raise InputError(f"llm={describe_value(llm)}; it must be an LLM: create AsyncLLM(LLM(model))")
        self._llm, self._max_waiting = llm, check_int_or_none("max_waiting", max_waiting, 1)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        opened = None if store is None else llm.session_store(store, store_options, read_only=read_only)
        self._sessions = None if opened is None else StoredRequestFactory(opened, self._calls.put)
        self._names_sessions = opened is not None and not read_only
        self._engine = llm.make_engine(
            on_failure=self._fail, on_prefill=self._prefilled, waited_for=lambda: not self._calls.empty()
        )
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._arriving = 0
        self._closed = False
        self._clients: dict[str, Client] = {}  # Only the engine thread changes the following attributes.
        self._by_number: dict[int, Client] = {}
        self._totals = EngineLoad()
        self._thread = threading.Thread(target=self._run, name="offload-rt engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def llm(self) -> LLM:
        """The `LLM` that is being served. Use it, for example, to access the tokenizer and the configuration."""
        return self._llm

    # --------------------------------------------------------------------------------------------------------- clients

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        session: str | None = None,
        trace: bool = False,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the output of one prompt as it grows. The last item has `finished` set.

        Each item contains all text so far. If the iterator is left early (break, a cancelled task, `aclose`), the
        request is aborted. A beam search yields only its final item.

        Args:
            prompt: Text or token ids.
            sampling_params: If None, the model's defaults are used.
            request_id: Name that can be passed to `abort`. If None, one is generated.
            session: Name of a session in the store. Pass the whole conversation as `prompt` each time. The KV of
                earlier turns is restored, even after a restart.
            trace: Add a `RequestTrace` to each item. Also yield an item after each layer of the prefill.
            cache_salt: See `LLM.generate`. A session keeps the salt of its first turn.

        Raises:
            InputError, ModelError, PoolFullError: See `LLM.generate`.
            QueueFullError: Too many requests are queued.
            SessionBusyError: The session is answering another request.
        """
        params = check_sampling_params(sampling_params, self._llm.runner.model.sampling)
        if session is not None and not self._names_sessions:
            raise InputError(
                f"session={describe_value(session)} needs a writable store: create AsyncLLM(llm, store=folder)"
            )
        client = await self._submit(prompt, params, request_id, session, trace, check_salt(cache_salt))
        finished = False
        try:
            while not finished:
                output = await client.mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._calls.put(lambda: self._remove(client))

    async def abort(self, request_id: str) -> None:
        """Abort a request if it exists. Its iterator then ends with the finish reason "abort"."""
        self._calls.put(lambda: self._abort(request_id))

    async def delete_session(self, name: str) -> bool:
        """Delete a session. Return whether it existed.

        Raises:
            InputError: There is no store.
            SessionBusyError: The session is answering a request.
            StoreError: A file cannot be deleted.
        """
        if (sessions := self._sessions) is None or not self._names_sessions:
            raise InputError("there is no session store for writing: create AsyncLLM(llm, store=folder)")

        def delete() -> bool:
            with self._llm.runner.pool.lock:
                return sessions.delete(name)

        return await call_in_thread(self._post, delete)

    async def reset_prefix_cache(self) -> bool:
        """Free the KV of all prefixes that are not in use by a request or an open session.

        Return whether no prefix is left.
        """
        return await asyncio.to_thread(self._llm.reset_prefix_cache)

    def load(self) -> EngineLoad:
        """Return the current load of the engine, and the totals since its start."""
        load = self._totals.at_present(self._engine, self._arriving)
        return load if self._sessions is None else self._sessions.add_load(load)

    async def close(self) -> None:
        """Abort running requests, stop the engine thread and close `llm`. A second call has no effect."""
        atexit.unregister(self._end)
        await asyncio.to_thread(self._end)
        self._llm.close()

    def _end(self) -> None:
        # Also registered with atexit: otherwise, the daemon thread would be stopped in the middle of a step at exit.
        with self._lock:
            self._closed = True
            self._calls.put(self._abort_all)
        self._thread.join()

    async def _submit(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str | None,
        session: str | None,
        trace: bool,
        cache_salt: str,
    ) -> Client:
        if request_id is not None and not isinstance(request_id, str):
            raise InputError(f"request_id={describe_value(request_id)} must be a string")
        with self._lock:
            self._check_open()
            waiting = self._arriving + len(self._engine.scheduler.waiting)
            if self._max_waiting is not None and waiting >= self._max_waiting:
                raise QueueFullError(
                    f"the queue is full ({waiting:,} requests, max_waiting={self._max_waiting:,}): try again later"
                )
            self._arriving += 1
        handed = False
        try:
            given = one_prompt(prompt)
            text = given if isinstance(given, str) else None
            ids = await asyncio.to_thread(self._llm.encode, given) if text is not None else self._llm.encode(given)
            # Compiling a tokenizer's first grammar takes about a second.
            if params.structured_outputs is not None:
                await asyncio.to_thread(check_answerable, params, self._llm.runner.model)
            name = request_id or f"request-{next(self._ids)}"
            tracer = RequestTracer(len(ids), self._llm.geometry.layers) if trace else None
            client = Client(name, text, ids, params, Mailbox(), session, tracer, cache_salt=cache_salt)
            self._post(lambda: self._join(client))
            handed = True
            return client
        finally:
            if not handed:
                self._arrived()

    def _arrived(self) -> None:
        with self._lock:
            self._arriving -= 1

    def _post(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._check_open()
            self._calls.put(call)

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"the engine of {self._llm!r} is closed: create another one")

    # -------------------------------------------------------------------------------------------------- engine's thread

    def _run(self) -> None:
        while not (self._closed and self._engine.idle and self._calls.empty()):
            try:
                call = self._calls.get(block=self._engine.idle)
            except Empty:
                call = self._step
            try:
                call()
            except Exception as error:  # The error was not caused by a single request, so no output can be trusted.
                logger.exception("the engine loop failed: all pending requests fail")
                self._fail_all(error)
            self._totals.device_kv_bytes = self._llm.runner.transfer.device_bytes

    def _step(self) -> None:
        if self._sessions is not None:
            with self._llm.runner.pool.lock, _log_errors():  # An error here affects only idle sessions.
                self._sessions.look_ahead()
        numbers = {event.request_id for event in self._engine.step()}
        for number in sorted(numbers & self._by_number.keys()):
            client = self._by_number[number]
            try:
                self._report(client)
            except Exception as error:
                assert client.request is not None
                self._fail(client.request, failure(client.request, error))

    def _prefilled(self, request: Request, layers: int) -> None:
        client = self._by_number.get(request.prompt.id)
        if client is not None and client.tracer is not None:
            client.tracer.layers_prefilled = layers
            self._send(client, self._output(client))

    def _join(self, client: Client) -> None:
        if client.request_id in self._clients:
            self._send(
                client, InputError(f"request {client.request_id!r} is already running: choose another request_id")
            )
        elif self._closed:
            self._send(client, InputError(f"the engine of {self._llm!r} is closed: create another one"))
        else:
            self._add(client)
        self._arrived()

    def _add(self, client: Client) -> None:
        try:
            client.request = self._request(client)
        except Exception as error:
            self._send(client, error)
        else:
            self._clients[client.request_id] = self._by_number[client.request.prompt.id] = client

    def _request(self, client: Client) -> Request:
        sessions = self._sessions
        if sessions is None or (client.session is None and not sessions.stores_prompt(client.params)):
            return self._engine.add(client.ids, client.params, client.tracer, client.cache_salt)
        if client.session is None:
            prompt = sessions.prompt(
                self._engine.next_id(), client.ids, client.params, client.tracer, client.cache_salt
            )
            self._engine.submit(prompt, swaps=True)
            return prompt
        with self._llm.runner.pool.lock:
            number = self._engine.next_id()
            turn = sessions.turn(client.session, number, client.ids, client.params, client.tracer, client.cache_salt)
        self._engine.submit(turn)
        return turn

    def _output(self, client: Client) -> RequestOutput:
        assert client.request is not None
        output = request_output(client.request, client.ids, client.text, client.request_id)
        return output if client.tracer is None else replace(output, trace=client.tracer.trace(client.request))

    def _report(self, client: Client) -> None:
        """Send the output so far to the client. If the request has finished, remove its client."""
        output = self._output(client)
        written = sum(len(completion.token_ids) for completion in output.outputs)
        self._totals.generated_tokens += written - client.counted
        client.counted = written
        try:
            if output.finished:
                self._remove(client)
        finally:
            self._send(client, output)

    def _send(self, client: Client, output: RequestOutput | Exception) -> None:
        try:
            client.mailbox.post(output)
        except RuntimeError:  # The client's event loop is closed, so remove the client after the current step.
            self._calls.put(lambda: self._remove(client))

    def _remove(self, client: Client) -> None:
        request = client.request
        if request is None or self._by_number.pop(request.prompt.id, None) is None:
            return
        del self._clients[client.request_id]
        self._cancel(request)
        if self._sessions is not None:
            with _log_errors():
                if isinstance(request, StoredPrompt):
                    self._sessions.prompt_ended(request)
                elif client.session is not None:
                    self._sessions.ended(client.session)
        self._totals.add(request, stored=isinstance(request, StoredRequest))

    def _fail(self, request: Request, error: Exception) -> None:
        if (client := self._by_number.get(request.prompt.id)) is not None:
            self._remove(client)
            self._send(client, error)
        elif isinstance(error, StoreError):  # the client already has the complete response
            logger.warning("a session could not be saved: %s", error)

    def _fail_all(self, error: Exception) -> None:
        for client in list(self._clients.values()):
            self._send(client, error)
            with suppress(Exception):  # an error here must not stop the loop
                self._remove(client)

    def _abort(self, request_id: str) -> None:
        if (client := self._clients.get(request_id)) is not None and client.request is not None:
            self._cancel(client.request)
            self._report(client)

    def _cancel(self, request: Request) -> None:
        with _log_errors():  # Cancelling can fail, for example if a session's history cannot be written.
            self._engine.cancel(request)

    def _abort_all(self) -> None:
        for request_id in list(self._clients):
            self._abort(request_id)


@contextmanager
def _log_errors() -> Iterator[None]:
    # Log errors instead of raising them, so that other requests can continue.
    try:
        yield
    except StoreError as error:
        logger.warning("a session could not be saved: %s", error)
    except Exception:
        logger.exception("a request or its session could not be ended properly")
