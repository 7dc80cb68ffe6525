"""Reads from disk in parallel with computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from ..core import KVPart

T = TypeVar("T")
P = ParamSpec("P")


class ReadingThread:
    """A thread that runs queued functions in order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-rt read ahead")
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def start(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        def run() -> T:
            # Inference mode is set per thread, and the buffers that this thread fills are inference tensors.
            with torch.inference_mode():
                return work(*args, **named)

        return self._thread.submit(run)

    def wait(self) -> None:
        self._thread.submit(lambda: None).result()


class RangeReader:
    """Reads the KV of token ranges in order, one range ahead. At most two ranges are in memory at the same time."""

    def __init__(self, thread: ReadingThread, read: Callable[[range], KVPart], blocks: Sequence[range]) -> None:
        self._thread, self._read, self._blocks = thread, read, blocks
        self._reading: dict[int, Future[KVPart]] = {}
        self._current: tuple[int, KVPart] | None = None
        self._begin(0)

    @property
    def parts(self) -> list[KVPart]:
        """The KV of all ranges, one part per range. Accessing a part waits for its range. Access the parts in order."""
        return [_LazyPart(self, i) for i in range(len(self._blocks))]

    def take(self, i: int) -> KVPart:
        """Wait for range `i` and return its KV. The next call for another range may reuse the memory."""
        if self._current is None or self._current[0] != i:
            self._current = None
            self._reading = {j: job for j, job in self._reading.items() if j >= i}
            self._begin(i)
            self._current = i, self._reading.pop(i).result()
        return self._current[1]

    def _begin(self, first: int) -> None:
        for i in range(first, min(first + 2, len(self._blocks))):
            if i not in self._reading:
                self._reading[i] = self._thread.start(self._read, self._blocks[i])


class _LazyPart(KVPart):
    def __init__(self, reader: RangeReader, number: int) -> None:
        self._reader, self._number = reader, number

    @property
    def k(self) -> torch.Tensor:
        return self._reader.take(self._number).k

    @property
    def v(self) -> torch.Tensor:
        return self._reader.take(self._number).v
