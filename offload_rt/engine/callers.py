"""Those who ask a shared engine: what they asked, where they wait, and what the engine has to do for all of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..outputs import RequestOutput
from ..sampling_params import SamplingParams
from .request import Request
from .watching import Watch


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has to do, and what it has done since it began.

    waiting, running: prompts that wait for room; completions that are computed, the prompt that is prefilled included.
    pool_used_bytes, pool_limit_bytes: KV of requests in host memory, and its limit.
    prompt_tokens, cached_tokens: of all prompts that have ended; those that had been computed before.
    generated_tokens, link_bytes: new tokens so far; rows that crossed to the device for what has ended.
    weight_bytes, device_kv_bytes: of the model, and KV rows of sequences on the device.
    kept_bytes: KV in host memory that nobody uses now, and that what comes may find.
    session_host_tokens, session_disk_tokens, session_computed_tokens: of what sessions had before their turns, tokens
        that were in host memory, came from disk, or had been lost and were computed again.
    store_bytes: all files of the sessions' store.
    """

    waiting: int
    running: int
    pool_used_bytes: int
    pool_limit_bytes: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    link_bytes: int
    weight_bytes: int = 0
    device_kv_bytes: int = 0
    kept_bytes: int = 0
    session_host_tokens: int = 0
    session_disk_tokens: int = 0
    session_computed_tokens: int = 0
    store_bytes: int = 0


class Mailbox:
    """The latest output of one request, on the event loop of its caller. One that is not taken in time gives way to the
    next, which says all that it said: a slow reader costs no memory."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._latest: RequestOutput | Exception | None = None
        self._arrived = asyncio.Event()

    def post(self, latest: RequestOutput | Exception) -> None:
        """From any thread. Raises RuntimeError where the event loop has been closed."""
        self._loop.call_soon_threadsafe(self._put, latest)

    def _put(self, latest: RequestOutput | Exception) -> None:
        self._latest = latest
        self._arrived.set()

    async def take(self) -> RequestOutput:
        """Waits for the next output. Raises what was posted, if that is an error."""
        await self._arrived.wait()
        self._arrived.clear()
        latest, self._latest = self._latest, None
        assert latest is not None
        if isinstance(latest, Exception):
            raise latest
        return latest


@dataclass(eq=False)
class Caller:
    """Somebody who waits for an answer. `text` is the prompt, None where token ids were given; `watch` counts where a
    trace was asked for."""

    request_id: str
    text: str | None
    ids: list[int]
    params: SamplingParams
    mailbox: Mailbox
    session: str | None = None
    watch: Watch | None = None
    request: Request | None = None
    counted: int = 0
    """Of its new tokens, those that are among the engine's."""
    cache_salt: str = ""
