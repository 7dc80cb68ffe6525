"""Clients of `AsyncLLM`: their requests and mailboxes, and the load of the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import torch

from ..model_runner.trace import Trace
from ..outputs import RequestOutput, RequestTrace
from ..sampling_params import SamplingParams
from .request import Request


@dataclass(frozen=True)
class EngineLoad:
    """Current load and totals of an engine.

    Attributes:
        waiting: Queued prompts.
        running: Decoding completions, plus the prompt that is being prefilled.
        pool_used_bytes: KV of requests in host memory.
        pool_limit_bytes: Limit on KV in host memory.
        prompt_tokens: Prompt tokens of finished requests.
        cached_tokens: Number of prompt tokens that were cached.
        generated_tokens: New tokens so far.
        h2d_bytes: KV copied to the device for finished requests.
        weight_bytes: Size of the model's weights.
        device_kv_bytes: KV on the device.
        kept_bytes: Cached KV in host memory that no request uses.
        host_hit_tokens: Prompt tokens whose KV was in host memory.
        disk_hit_tokens: Prompt tokens whose KV was loaded from disk.
        lost_tokens: Tokens of named sessions whose KV was lost and computed again.
        store_bytes: Size of the store's files.
    """

    waiting: int
    running: int
    pool_used_bytes: int
    pool_limit_bytes: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    h2d_bytes: int
    weight_bytes: int = 0
    device_kv_bytes: int = 0
    kept_bytes: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    lost_tokens: int = 0
    store_bytes: int = 0


class Mailbox:
    """Pass the latest output of a request to the event loop of its client.

    Each output contains all earlier ones, so a slow reader skips outputs and costs no memory.
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
        """Wait for the next output and return it. If it is an error, raise it."""
        await self._arrived.wait()
        self._arrived.clear()
        latest, self._latest = self._latest, None
        assert latest is not None
        if isinstance(latest, Exception):
            raise latest
        return latest


class RequestTracer:
    """Collects the trace of the first completion of a prompt."""

    def __init__(self, prompt_tokens: int, layers: int) -> None:
        self._selected = np.zeros(prompt_tokens, np.int64)
        self._layers, self.layers_prefilled = layers, 0
        self._trace: Trace | None = None

    def selected(self, position: int, layer: int, tokens: torch.Tensor) -> None:
        """Count selected tokens `[Hkv, n]` that belong to the prompt."""
        found = tokens.detach().cpu().numpy().ravel()
        size = len(self._selected)
        self._selected += np.bincount(found[found < size], minlength=size)

    def trace(self, request: Request) -> RequestTrace:
        """Return the trace so far. May wait for the device."""
        for sequence in request.sequences[:1]:  # no sequence before the start and after the end
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
    """A client that waits for an output.

    Attributes:
        text: Text of the prompt; None if token ids were given.
        tracer: Recorder of the trace, if requested.
        counted: New tokens that are included in the engine's total.
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
