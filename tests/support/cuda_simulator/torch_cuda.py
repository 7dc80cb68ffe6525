"""Replacements for the parts of `torch.cuda` and `torch.accelerator` that the package and its libraries use."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.bias
import torch.nn.functional as F

from .engine import Capture, Point, Queue
from .simulator import Simulator


def index_of(sim: Simulator, device: Any) -> int:
    if device is None:
        return sim.device
    if isinstance(device, int):
        return device
    found = torch.device(device).index
    return sim.device if found is None else found


class Event:
    def __init__(self, sim: Simulator, *args: Any, **named: Any) -> None:
        self._sim = sim
        self._point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._point = self._sim.engine.record(self._sim.stream() if stream is None else stream.queue)

    def wait(self, stream: Stream | None = None) -> None:
        if self._point is not None:
            self._sim.engine.wait(self._sim.stream() if stream is None else stream.queue, self._point)

    def synchronize(self) -> None:
        if self._point is not None:
            self._sim.host_waits("event", point=self._point)

    def query(self) -> bool:
        return self._point is None or self._point.reached

    def elapsed_time(self, other: Event) -> float:
        """Return a constant, because time is not simulated."""
        return 1.0


class Stream:
    """Replacement for `torch.cuda.Stream` and `torch.Stream`. As a context manager, it becomes the current stream."""

    def __init__(self, sim: Simulator, device: Any = None, *, queue: Queue | None = None, **named: Any) -> None:
        self._sim = sim
        self.queue = sim.engine.new_queue(index_of(sim, device)) if queue is None else queue
        self.device = torch.device("cuda", self.queue.device)
        self.cuda_stream = self.queue.number
        self._before: list[tuple[int, Queue]] = []

    def __enter__(self) -> Stream:
        self._before.append((self._sim.device, self._sim.stream(self.queue.device)))
        self._sim.set_stream(self.queue)
        return self

    def __exit__(self, *error: object) -> None:
        device, queue = self._before.pop()
        self._sim.set_stream(queue)
        self._sim.set_device(device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return id(self.queue)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self._sim.engine.wait(self.queue, self._sim.engine.record(stream.queue))

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self._sim) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._sim.host_waits("stream", point=self._sim.engine.record(self.queue))


class Graph:
    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._captured: Capture | None = None
        self._complete = False

    def begin(self, pool: int, queue: Queue, mode: str) -> None:
        if self._sim.graphs.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED: all graphs of this pool were deleted")
        self._sim.memory.begin_pool(pool)
        thread = None if mode == "global" else threading.get_ident()
        queue.capture = self._captured = Capture(queue, pool, thread)
        self._sim.graphs[pool] += 1

    def end(self) -> None:
        assert self._captured is not None
        self._sim.memory.collect()
        for queue in {*self._captured.queues, self._captured.origin}:
            queue.capture = None
        self._captured.check_complete()
        self._sim.memory.end_pool(self._captured.pool)
        self._complete = True

    def __del__(self) -> None:
        if self._captured is not None and self._complete:  # torch keeps the pool of a capture that it could not end
            release_pool(self._sim, self._captured.pool)

    def replay(self) -> None:
        assert self._captured is not None
        self._sim.launched["graph"] += 1
        self._sim.nodes = self._captured.nodes
        self._sim.engine.replay(self._captured, self._sim.stream())


def release_pool(sim: Simulator, pool: int) -> None:
    sim.graphs[pool] -= 1
    if not sim.graphs[pool]:
        sim.memory.drop_pool(pool)


@cache
def ignore_late_unregistration() -> None:
    """Do not fail if a runtime that outlives its simulator unregisters memory that is no longer registered."""
    setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=lambda address: 0))  # noqa: B010


def patch_torch(patch: pytest.MonkeyPatch, sim: Simulator) -> None:
    cuda, memory = torch.cuda, sim.memory
    pools, capture_stream = itertools.count(1), list[Stream]()

    def put(name: str, value: Any) -> None:
        patch.setattr(cuda, name, value, raising=False)

    def stream(given: Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if given is None else given

    @contextmanager
    def device(given: Any) -> Iterator[None]:
        before = sim.device
        sim.set_device(index_of(sim, given))
        try:
            yield
        finally:
            sim.set_device(before)

    @contextmanager
    def graph(captured: Graph, pool: int | None = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
        sim.engine.finish_all()
        if stream is None:  # torch creates one stream per process, on the device of the first capture
            stream = capture_stream[0] if capture_stream else Stream(sim)
            capture_stream[:] = [stream]
        stream.__enter__()
        captured.begin(next(pools) if pool is None else pool, stream.queue, capture_error_mode)
        try:
            yield
        finally:
            captured.end()  # as in torch, the stream stays current and the pool in use if this raises an error
            stream.__exit__()

    def synchronize(device: Any = None) -> None:
        sim.host_waits("device")
        sim.engine.finish_all()

    def reset_peaks(device: Any = None) -> None:
        memory.collect()
        memory.usage.reset_peaks()

    def peak(device: Any = None) -> int:
        return memory.usage.allocated_peak

    def allocated(device: Any = None) -> int:
        memory.collect()
        return memory.usage.allocated

    def registered(address: int, size: int, flags: int) -> int:
        memory.registered_on.add(sim.device)
        if memory.register(address, size):
            return 0
        sim.error = "cudaHostRegister failed"
        return 2

    def unregistered(address: int) -> int:
        memory.unregister(address)
        return 0

    def debug_mode(mode: str) -> None:
        sim.syncs_raise = mode == "error"
        if mode != "default":
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    runtime = SimpleNamespace(cudaHostRegister=registered, cudaHostUnregister=unregistered, cudaGetLastError=lambda: 0)
    properties = SimpleNamespace(
        name="simulated", total_memory=memory.limit, multi_processor_count=4, major=9, minor=0, L2_cache_size=1 << 20
    )
    values: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: sim.devices,
        "current_device": lambda: sim.device,
        "set_device": lambda given: sim.set_device(index_of(sim, given)),
        "device": device,
        "Stream": lambda device=None, **named: Stream(sim, device, **named),
        "Event": lambda *args, **named: Event(sim, *args, **named),
        "stream": stream,
        "current_stream": lambda device=None: Stream(sim, queue=sim.stream(index_of(sim, device))),
        "default_stream": lambda device=None: Stream(sim, queue=sim.defaults[index_of(sim, device)]),
        "set_stream": lambda given: sim.set_stream(given.queue),
        "synchronize": synchronize,
        "default_generators": tuple(torch.Generator() for _ in range(sim.devices)),
        "CUDAGraph": lambda *args, **named: Graph(sim),
        "graph": graph,
        "graph_pool_handle": lambda: next(pools),
        "is_current_stream_capturing": lambda: sim.stream().capture is not None,
        "memory_allocated": allocated,
        "max_memory_allocated": peak,
        "reset_peak_memory_stats": reset_peaks,
        "empty_cache": memory.collect,
        "mem_get_info": lambda device=None: (memory.limit - memory.usage.active, memory.limit),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "cudart": lambda: runtime,
        "set_sync_debug_mode": debug_mode,
        "_sleep": lambda cycles: sim.queue_work("sleep", lambda: None),
    }
    for name, value in values.items():
        put(name, value)
    for name, value in _accelerator(values).items():
        patch.setattr(torch.accelerator, name, value)
    patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: memory.end_pool(pool), raising=False)
    patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: release_pool(sim, pool), raising=False)
    patch.setattr(torch, "Stream", values["Stream"])
    patch.setattr(torch, "Event", values["Event"])
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch.Tensor, "pin_memory", lambda x, device=None: _pinned(sim, x))
    patch.setattr(torch.Tensor, "is_pinned", lambda x, device=None: not x.is_cuda and memory.is_pinned(x.data_ptr()))
    patch.setattr(torch.Tensor, "record_stream", lambda x, stream: _used(sim, x, stream))
    patch.setattr(torch.nn.attention.bias, "CausalBias", _Bias)
    patch.setattr(torch.backends.cuda, "can_use_flash_attention", _flash)
    patch.setattr(F, "scaled_dot_product_attention", _attention(sim, F.scaled_dot_product_attention))


def _accelerator(cuda: dict[str, Any]) -> dict[str, Any]:
    same = (
        "is_available", "device_count", "current_stream", "set_stream", "synchronize", "empty_cache",
        "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats",
    )  # fmt: skip
    return {name: cuda[name] for name in same} | {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": cuda["current_device"],
        "set_device_index": cuda["set_device"],
        "device_index": cuda["device"],
        "empty_host_cache": lambda: None,
        "get_memory_info": cuda["mem_get_info"],
    }


def _pinned(sim: Simulator, x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        raise RuntimeError("cannot pin device memory, only host memory")
    return x if sim.memory.is_pinned(x.data_ptr()) else sim.new_pinned(x).copy_(x)


def _used(sim: Simulator, x: torch.Tensor, stream: Stream) -> None:
    if x.untyped_storage().nbytes():
        sim.memory.record_stream(x.untyped_storage().data_ptr(), stream.queue)


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu")


class _Bias:
    """Replacement for the lower-right `CausalBias`, because dispatch modes do not support tensor subclasses."""

    def __init__(self, variant: Any, queries: int, keys: int) -> None:
        assert variant is torch.nn.attention.bias.CausalVariant.LOWER_RIGHT
        self.queries, self.keys = queries, keys


def _flash(params: Any, debug: bool = False) -> bool:
    return params.query.dtype in (torch.float16, torch.bfloat16) and params.query.shape[-1] <= 256


def _attention(sim: Simulator, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a version of `scaled_dot_product_attention` that counts as one launch and allocates only its result."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, **named: Any) -> torch.Tensor:
        if not q.is_cuda:
            return original(q, k, v, attn_mask=attn_mask, **named)
        assert set(named) <= {"scale", "is_causal", "enable_gqa", "dropout_p"}
        out = sim.new(torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device="meta"), q.device)
        into, seen = sim.host_view(out), [sim.host_view(x) for x in (q, k, v)]
        mask = sim.host_view(attn_mask) if isinstance(attn_mask, torch.Tensor) else attn_mask
        sim.queue_work("attention", lambda: into.copy_(_defined(*seen, mask, **named)), q.device.index)
        return out

    return attend


def _defined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any) -> torch.Tensor:
    if named.get("enable_gqa"):
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    m, n = q.shape[-2], k.shape[-2]
    scores = q @ k.transpose(-1, -2)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * named["scale"]
    if isinstance(mask, _Bias) or named.get("is_causal"):
        behind = 0 if mask is None else mask.keys - mask.queries
        mask = torch.ones(m, n, dtype=torch.bool).tril(behind)
    if mask is not None:
        assert mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v
