"""State that `AsyncLLM` keeps for its clients: mailboxes for outputs, request traces, and the load of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from ..model_runner.trace import Trace
from ..outputs import RequestOutput, RequestTrace
from ..sampling_params import SamplingParams
from .engine import Engine
from .request import Request

T = TypeVar("T")


@dataclass
class EngineLoad:
    """Current load of an engine, and totals since its start. Sizes are in bytes.

    Attributes:
        waiting: Number of prompts in the queue.
        running: Number of completions being decoded, plus one if a prompt is being prefilled.
        pool_used_bytes: Size of the KV of running requests in host memory.
        pool_limit_bytes: Limit on the size of KV in host memory.
        prompt_tokens: Prompt tokens of finished requests.
        cached_tokens: Prompt tokens of finished requests for which KV was already cached.
        h2d_bytes: Size of the KV that was copied from host to device for finished requests.
        device_kv_bytes: Size of the KV on the device after the latest step.
        kept_bytes: Size of cached KV in host memory that no request is using.
        host_hit_tokens: Prompt tokens whose KV was found in host memory.
        disk_hit_tokens: Prompt tokens whose KV was loaded from disk.
        lost_tokens: Tokens of named sessions that had to be computed again because their stored KV was missing or
            damaged.
        store_bytes: Size of the files in the session store.
    """

    waiting: int = 0
    running: int = 0
    pool_used_bytes: int = 0
    pool_limit_bytes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    h2d_bytes: int = 0
    weight_bytes: int = 0
    device_kv_bytes: int = 0
    kept_bytes: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    lost_tokens: int = 0
    store_bytes: int = 0

    def add(self, request: Request, *, stored: bool) -> None:
        """Add a finished request to the totals. `stored` tells whether the request used a session store."""
        self.prompt_tokens += len(request.prompt.token_ids)
        self.cached_tokens += request.cached_tokens
        self.host_hit_tokens += 0 if stored else request.cached_tokens  # a store counts its hits itself
        self.h2d_bytes += request.h2d_bytes

    def at_present(self, engine: Engine, arriving: int) -> EngineLoad:
        """Return the totals together with the current load of `engine`.

        `arriving` is the number of prompts that have arrived but are not in the queue yet.
        """
        scheduler, pool = engine.scheduler, engine.runner.pool
        return replace(
            self,
            waiting=arriving + len(scheduler.waiting),
            running=len(scheduler.running) + (scheduler.prefilling is not None),
            pool_used_bytes=pool.sequence_bytes,
            pool_limit_bytes=pool.limit_bytes,
            weight_bytes=engine.runner.model.weight_bytes,
            kept_bytes=pool.idle_blocks * pool.block_bytes,
        )


async def call_in_thread(post: Callable[[Callable[[], None]], None], function: Callable[[], T]) -> T:
    """Run `function` on the engine thread. Return its result or raise its error.

    `post` schedules a call on the engine thread. Cancelling the caller does not stop `function`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def resolve(settle: Callable[[], None]) -> None:
        if not done.done():  # the caller may have been cancelled
            settle()

    def call() -> None:
        try:
            result = function()
        except Exception as error:
            settle = partial(done.set_exception, error)
        else:
            settle = partial(done.set_result, result)
        with suppress(RuntimeError):  # the caller's event loop may be closed
            loop.call_soon_threadsafe(resolve, settle)

    post(call)
    return await done


class Mailbox:
    """Passes outputs of a request to the event loop of its client. Only the latest output is kept.

    No text is lost, because each output contains all earlier text. A slow client may skip some outputs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._latest: RequestOutput | Exception | None = None
        self._arrived = asyncio.Event()

    def post(self, latest: RequestOutput | Exception) -> None:
        """Post an output from any thread. Raise RuntimeError if the event loop is closed."""
        self._loop.call_soon_threadsafe(self._put, latest)

    def _put(self, latest: RequestOutput | Exception) -> None:
        self._latest = latest
        self._arrived.set()

    async def take(self) -> RequestOutput:
        await self._arrived.wait()
        self._arrived.clear()
        latest, self._latest = self._latest, None
        assert latest is not None
        if isinstance(latest, Exception):
            raise latest
        return latest


class RequestTracer:
    """Counts, for the first completion of a request, how often each prompt token is selected."""

    def __init__(self, prompt_tokens: int, layers: int) -> None:
        self._selected = np.zeros(prompt_tokens, np.int64)
        self._layers, self.layers_prefilled = layers, 0
        self._trace: Trace | None = None

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        found = tokens.detach().cpu().numpy().ravel()
        size = len(self._selected)
        self._selected += np.bincount(found[found < size], minlength=size)

    def trace(self, request: Request) -> RequestTrace:
        for sequence in request.sequences[:1]:  # a request has no sequence before its start or after its end
            self._trace = sequence.trace
        trace = self._trace
        return RequestTrace(
            layers_prefilled=self.layers_prefilled,
            layers=self._layers,
            h2d_bytes=0 if trace is None else trace.bytes_to_device,  # waits for counts on the device
            attended_by_step=[] if trace is None else [list(step) for step in trace.attended],
            selected=self._selected.copy(),
        )


@dataclass(eq=False)
class Client:
    """A caller of `AsyncLLM` that waits for the outputs of one request.

    Attributes:
        request: The engine's request, or None until it is queued.
        counted: Number of generated tokens that are already included in the totals.
    """

    request_id: str
    text: str | None
    ids: list[int]
    params: SamplingParams
    mailbox: Mailbox
    session: str | None = None
    tracer: RequestTracer | None = None
    request: Request | None = None
    counted: int = 0
    cache_salt: str = ""
