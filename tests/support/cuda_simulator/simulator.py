"""The simulated machine: memory, streams, launches and host waits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import torch

from .copies import Sync, caller_location
from .engine import Engine, Point, Queue, Schedule, Work
from .extension import load
from .memory import Memory


class Simulator:
    """A machine with simulated CUDA devices.

    Attributes:
        syncs: All points where the host waited for a device.
        launched: Number of launched kernels and copies by name. Poisoning is not counted.
        error: Error that the next launch raises, as CUDA does after a failed call.
        graphs: Number of graphs in each memory pool.
        nodes: Number of kernels and copies in the graph that was replayed last.
    """

    def __init__(self, schedule: Schedule, *, limit: int = 1 << 31, devices: int = 1) -> None:
        self._module = load()
        self._module.set_devices(devices)
        self._module.set_device(0)
        self.devices = devices
        self.engine = Engine(schedule)
        self.memory = Memory(self._module, self.engine, limit)
        self.defaults = [self.engine.new_queue(device) for device in range(devices)]
        self._thread = threading.local()
        self.syncs: list[Sync] = []
        self.syncs_raise = False
        self.error: str | None = None
        self.graphs: Counter[int] = Counter()
        self.nodes = 0
        self.launched: Counter[str] = Counter()

    # --------------------------------------------------------------------------------------------- device and stream

    @property
    def device(self) -> int:
        return int(self._module.current_device())

    def set_device(self, device: int) -> None:
        self._module.set_device(device)

    def stream(self, device: int | None = None) -> Queue:
        device = self.device if device is None else device
        found: Queue = self._streams.get(device, self.defaults[device])
        return found

    def set_stream(self, queue: Queue) -> None:
        self._streams[queue.device] = queue
        self.set_device(queue.device)

    @property
    def _streams(self) -> dict[int, Queue]:
        if not hasattr(self._thread, "streams"):
            self._thread.streams = {}
        streams: dict[int, Queue] = self._thread.streams
        return streams

    # ------------------------------------------------------------------------------------------------------- work

    def queue_work(self, name: str, work: Work, device: int | None = None) -> None:
        """Queue a kernel or copy in the current stream of `device` (default: the current device)."""
        if self.error is not None:
            error, self.error = self.error, None
            raise RuntimeError(f"CUDA error (simulated): {error}")
        self.launched[name] += 1
        self.engine.submit(self.stream(device), work)

    def host_waits(self, what: str, device: int | None = None, *, point: Point | None = None) -> None:
        """Let the host wait for `point` (default: the current stream of a device). Record the wait in `syncs`."""
        if self.syncs_raise:
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
        self.syncs.append(Sync(what, caller_location()))
        self.engine.finish(self.engine.record(self.stream(device)) if point is None else point)

    # ----------------------------------------------------------------------------------------------------- tensors

    def new(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        queue = self.stream(device.index if device.index is not None else self.device)
        pool = 0 if queue.capture is None else queue.capture.pool
        return self._shaped(self.memory.allocate(queue, _extent(like), pool), like)

    def new_pinned(self, like: torch.Tensor) -> torch.Tensor:
        return self._shaped(self.memory.allocate_host(_extent(like)), like)

    def _shaped(self, memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return self.part(memory, like.dtype, like.shape, like.stride(), 0)

    def part(
        self, base: torch.Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> torch.Tensor:
        """View the memory of `base` with a given shape and dtype. Views of inference tensors are inference tensors."""
        out: torch.Tensor
        if base.is_inference() == torch.is_inference_mode_enabled():  # entering a mode takes longer than the call
            out = self._module.part(base, dtype, list(size), list(stride), offset)
        else:
            with torch.inference_mode(base.is_inference()):
                out = self._module.part(base, dtype, list(size), list(stride), offset)
        return out

    def host_view(self, x: torch.Tensor) -> torch.Tensor:
        """Return a host view that does not keep the memory alive. Host tensors are returned unchanged."""
        if not x.is_cuda:
            return x
        out: torch.Tensor = self._module.seen(x)
        return out


def _extent(like: torch.Tensor) -> int:
    if like.numel() == 0:
        return 0
    last = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    return (last + 1) * like.itemsize
