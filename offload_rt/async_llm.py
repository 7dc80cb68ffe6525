"""`AsyncLLM`: many callers, one engine loop in a thread of its own, over one `LLM`."""

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

from .arguments import salt, sampling, shown, whole_or_none
from .config import StoreOptions
from .engine.callers import Caller, EngineLoad, Mailbox
from .engine.constraints import check_answerable
from .engine.failures import failure
from .engine.prompts import PromptLike, one_prompt
from .engine.request import Request, request_output
from .engine.watching import Watch
from .errors import InputError, QueueFullError, StoreError
from .llm import LLM
from .outputs import RequestOutput
from .sampling_params import SamplingParams
from .sessions.whole_prompts import WholePrompts

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Many callers, one engine loop in a thread of its own, over one `LLM`, which it takes over: `close` closes it.

    Callers may be on several event loops. What they ask is answered in one batch that requests join and leave, and what
    prompts have in common is computed once; nobody's tokens depend on who else is there. An error of one request is
    that request's alone.

    max_waiting: so many prompts may wait for room; one more raises QueueFullError. None lets any number wait.
    store, store_options: a folder for sessions (`generate(session=...)`), and how it is kept; raises as `LLM.session`.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_waiting: int | None = None,
        store: str | Path | None = None,
        store_options: StoreOptions | None = None,
    ) -> None:
        self._llm, self._max_waiting = llm, whole_or_none("max_waiting", max_waiting, 1)
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._engine = llm.make_engine(self._fail, self._prefilled, waited_for=lambda: not self._calls.empty())
        self._sessions = None if store is None else WholePrompts(llm.session_store(store, store_options))
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._arriving = 0
        self._closed = False
        self._callers: dict[str, Caller] = {}  # this and what follows is the thread's
        self._by_number: dict[int, Caller] = {}
        self._prompt_tokens = self._cached_tokens = self._generated_tokens = self._link_bytes = self._device_bytes = 0
        self._thread = threading.Thread(target=self._run, name="offload-rt engine", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def llm(self) -> LLM:
        """The runtime, for its tokenizer, name, geometry and configuration."""
        return self._llm

    # --------------------------------------------------------------------------------------------------------- callers

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
        """What becomes of one prompt, as it comes: each item is all of it so far, the last has `finished`. Leaving the
        iterator (break, a cancelled task, `aclose`) aborts the request. Of a beam search only the last item comes.

        session: a name in the store. What it has computed of the beginning of `prompt` (the whole conversation, each
            time) comes back from host memory or disk, also after a restart; the rest and the answer are kept there.
        cache_salt: as `LLM.generate` takes it. A session keeps the salt of its first turn.
        trace: items have a `RequestTrace`; they come from the prefill too, layer by layer.

        Raises InputError, ModelError and PoolFullError as `LLM.generate`, QueueFullError where too many wait,
        SessionBusyError where the session is answering.
        """
        params = sampling(sampling_params, self._llm.runner.model.sampling)
        if session is not None and self._sessions is None:
            raise InputError(f"session={shown(session)}, and there is no store: make AsyncLLM(llm, store=folder)")
        caller = await self._arrive(prompt, params, request_id, session, trace, salt(cache_salt))
        finished = False
        try:
            while not finished:
                output = await caller.mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._calls.put(lambda: self._leave(caller))

    async def abort(self, request_id: str) -> None:
        """Ends a request where it stands: its iterator ends with what there is, for the reason "abort". Nothing happens
        where there is no such request any more."""
        self._calls.put(lambda: self._abort(request_id))

    async def delete_session(self, name: str) -> bool:
        """Delete a session. Return whether there was one. Raises SessionBusyError, StoreError; InputError without a
        store."""
        sessions, loop = self._sessions, asyncio.get_running_loop()
        if sessions is None:
            raise InputError("there is no store of sessions: make AsyncLLM(llm, store=folder)")
        done: asyncio.Future[bool] = loop.create_future()

        def tell(error: Exception | None, known: bool) -> None:
            if not done.done():  # else who asked has left
                done.set_exception(error) if error else done.set_result(known)

        def delete() -> None:
            error, known = None, False
            try:
                with self._llm.runner.pool.lock:
                    known = sessions.delete(name)
            except Exception as found:
                error = found
            with suppress(RuntimeError):  # its event loop has ended
                loop.call_soon_threadsafe(tell, error, known)

        with self._lock:
            self._check_open()
            self._calls.put(delete)
        return await done

    async def reset_prefix_cache(self) -> bool:
        """Forget the KV of prompts that no request and no open session uses. Return whether all of it is gone."""
        return await asyncio.to_thread(self._llm.reset_prefix_cache)

    def load(self) -> EngineLoad:
        """How much there is to do, and has been done."""
        load, sessions = self._load(), self._sessions
        if sessions is None:
            return load
        return replace(
            load,
            session_host_tokens=sessions.stats.host_tokens,
            session_disk_tokens=sessions.stats.disk_tokens,
            session_computed_tokens=sessions.stats.computed_tokens,
            store_bytes=sessions.disk_bytes,
        )

    def _load(self) -> EngineLoad:
        scheduler, runner = self._engine.scheduler, self._llm.runner
        pool = runner.pool
        return EngineLoad(
            waiting=self._arriving + len(scheduler.waiting),
            running=len(scheduler.running) + (scheduler.prefilling is not None),
            pool_used_bytes=pool.bytes_held,
            pool_limit_bytes=pool.limit_bytes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            link_bytes=self._link_bytes,
            weight_bytes=self._llm.weight_bytes,
            device_kv_bytes=self._device_bytes,
            kept_bytes=pool.idle_chunks * pool.chunk_bytes,
        )

    async def close(self) -> None:
        """Aborts what runs, ends the thread and closes the runtime. A second call does nothing."""
        atexit.unregister(self._end)
        await asyncio.to_thread(self._end)
        self._llm.close()

    def _end(self) -> None:
        """Aborts what runs and ends the thread, at the latest before the interpreter ends, which would end it within a
        step."""
        with self._lock:
            self._closed = True
            self._calls.put(self._abort_all)
        self._thread.join()

    async def _arrive(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str | None,
        session: str | None,
        trace: bool,
        cache_salt: str,
    ) -> Caller:
        """Hands a prompt to the engine's thread; a text is tokenized beside the event loop."""
        if request_id is not None and not isinstance(request_id, str):
            raise InputError(f"request_id={shown(request_id)}; it must be a text")
        with self._lock:
            self._check_open()
            waiting = self._arriving + len(self._engine.scheduler.waiting)
            if self._max_waiting is not None and waiting >= self._max_waiting:
                raise QueueFullError(f"{waiting:,} prompts wait, and max_waiting={self._max_waiting:,}: try later")
            self._arriving += 1
        handed = False
        try:
            given = one_prompt(prompt)
            text = given if isinstance(given, str) else None
            ids = await asyncio.to_thread(self._llm.encode, given) if text is not None else self._llm.encode(given)
            if params.structured_outputs is not None:  # the first of a tokenizer takes a second
                await asyncio.to_thread(check_answerable, params, self._llm.runner.model)
            name = request_id or f"request-{next(self._ids)}"
            watch = Watch(len(ids), self._llm.geometry.layers) if trace else None
            caller = Caller(name, text, ids, params, Mailbox(), session, watch, cache_salt=cache_salt)
            with self._lock:
                self._check_open()  # behind the last call of all nobody answers
                self._calls.put(lambda: self._join(caller))
            handed = True
            return caller
        finally:
            if not handed:
                self._arrived()

    def _arrived(self) -> None:
        with self._lock:
            self._arriving -= 1

    def _check_open(self) -> None:
        if self._closed:
            raise InputError(f"the engine of {self._llm!r} is closed: make another one")

    # -------------------------------------------------------------------------------------------------- engine's thread

    def _run(self) -> None:
        """The loop: what callers want, then a step for everything that runs; waits where there is nothing to do."""
        while not (self._closed and self._engine.idle and self._calls.empty()):
            try:
                call = self._calls.get(block=self._engine.idle)
            except Empty:
                call = self._step
            try:
                call()
            except Exception as error:  # of no single request: no answer can be trusted
                logger.exception("the engine loop failed: all pending requests fail")
                self._fail_all(error)
            self._device_bytes = self._llm.runner.link.device_bytes

    def _step(self) -> None:
        if self._sessions is not None:
            with self._llm.runner.pool.lock, _not_saved():  # it concerns idle sessions, not the requests of this step
                self._sessions.look_ahead()
        numbers = {event.request_id for event in self._engine.step()}
        for number in sorted(numbers & self._by_number.keys()):
            caller = self._by_number[number]
            try:
                self._report(caller)
            except Exception as error:
                assert caller.request is not None
                self._fail(caller.request, failure(caller.request, error))

    def _prefilled(self, request: Request, layers: int) -> None:
        """Says how far a prompt is, where somebody watches."""
        caller = self._by_number.get(request.prompt.id)
        if caller is not None and caller.watch is not None:
            caller.watch.layers_prefilled = layers
            self._tell(caller, self._output(caller))

    def _join(self, caller: Caller) -> None:
        if caller.request_id in self._callers:
            self._tell(caller, InputError(f"request {caller.request_id!r} is being answered: give another request_id"))
        elif self._closed:
            self._tell(caller, InputError(f"the engine of {self._llm!r} is closed: make another one"))
        else:
            self._add(caller)
        self._arrived()

    def _add(self, caller: Caller) -> None:
        try:
            caller.request = self._request(caller)
        except Exception as error:
            self._tell(caller, error)
        else:
            self._callers[caller.request_id] = self._by_number[caller.request.prompt.id] = caller

    def _request(self, caller: Caller) -> Request:
        """Queues what a caller asks for."""
        if caller.session is None or self._sessions is None:
            return self._engine.add(caller.ids, caller.params, caller.watch, caller.cache_salt)
        with self._llm.runner.pool.lock:
            number = self._engine.next_id()
            turn = self._sessions.turn(
                caller.session, number, caller.ids, caller.params, caller.watch, caller.cache_salt
            )
        self._engine.submit(turn)
        return turn

    def _output(self, caller: Caller) -> RequestOutput:
        assert caller.request is not None
        output = request_output(caller.request, caller.ids, caller.text, caller.request_id)
        return output if caller.watch is None else replace(output, trace=caller.watch.trace(caller.request))

    def _report(self, caller: Caller) -> None:
        """Says what has become of a request so far; where all of it has ended, it is counted and leaves."""
        output = self._output(caller)
        written = sum(len(completion.token_ids) for completion in output.outputs)
        self._generated_tokens += written - caller.counted
        caller.counted = written
        try:
            if output.finished:
                self._leave(caller)
        finally:
            self._tell(caller, output)

    def _tell(self, caller: Caller, said: RequestOutput | Exception) -> None:
        try:
            caller.mailbox.post(said)
        except RuntimeError:  # its event loop has ended, and nobody asks any more; a step may be under way
            self._calls.put(lambda: self._leave(caller))

    def _leave(self, caller: Caller) -> None:
        """Ends a request, if it has not ended by itself, and forgets it. Nothing happens to one that has left. What
        cannot be saved (its session, or another one that gives way) has ended all the same."""
        request = caller.request
        if request is None or self._by_number.pop(request.prompt.id, None) is None:
            return
        del self._callers[caller.request_id]
        self._cancel(request)
        if caller.session is not None and self._sessions is not None:
            with _not_saved():
                self._sessions.ended(caller.session)
        self._prompt_tokens += len(request.prompt.token_ids)
        self._cached_tokens += request.cached_tokens
        ended = (completion.stats for completion in request.completions())
        self._link_bytes += sum(stats.link_bytes_to_device for stats in ended if stats is not None)

    def _fail(self, request: Request, error: Exception) -> None:
        """Tell the caller of a failed request; its other completions end too. A turn whose history could not be written
        has been answered already."""
        if (caller := self._by_number.get(request.prompt.id)) is not None:
            self._leave(caller)
            self._tell(caller, error)
        elif isinstance(error, StoreError):
            logger.warning("a session could not be saved: %s", error)

    def _fail_all(self, error: Exception) -> None:
        """Fail all pending requests with `error`. Errors raised while notifying are suppressed so that the loop keeps
        running."""
        for caller in list(self._callers.values()):
            self._tell(caller, error)
            with suppress(Exception):
                self._leave(caller)

    def _abort(self, request_id: str) -> None:
        if (caller := self._callers.get(request_id)) is not None and caller.request is not None:
            self._cancel(caller.request)
            self._report(caller)

    def _cancel(self, request: Request) -> None:
        """Ends a request where it stands. A turn whose history cannot be written has ended all the same."""
        with _not_saved():
            self._engine.cancel(request)

    def _abort_all(self) -> None:
        for request_id in list(self._callers):
            self._abort(request_id)


@contextmanager
def _not_saved() -> Iterator[None]:
    """Log an error that does not concern the request that has just ended."""
    try:
        yield
    except StoreError as error:
        logger.warning("a session could not be saved: %s", error)
    except Exception:
        logger.exception("a request or its session could not be ended properly")
