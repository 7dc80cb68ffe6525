"""Reading beside the computation: a thread that takes what is asked for in order, and long runs block by block."""

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
    """Runs one thing after the other, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload-rt read ahead")
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def start(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        """Queues `work`; its result, or what it raised, is the future's."""

        def run() -> T:
            with torch.inference_mode():  # the mode is a thread's own, and what is filled here was made in it
                return work(*args, **named)

        return self._thread.submit(run)

    def wait(self) -> None:
        """Returns when nothing is queued any more."""
        self._thread.submit(lambda: None).result()


class BlockRun:
    """Neighbouring blocks of rows, read in order, `ahead` of them before they are asked for: in memory are those, and
    the one that was asked for last."""

    def __init__(
        self, thread: ReadingThread, read: Callable[[range], KVPart], blocks: Sequence[range], ahead: int = 2
    ) -> None:
        """read: gives the rows of the tokens of a block."""
        self._thread, self._read, self._blocks, self._ahead = thread, read, blocks, ahead
        self._reading: dict[int, Future[KVPart]] = {}
        self._current: tuple[int, KVPart] | None = None
        self._begin(0)

    @property
    def parts(self) -> list[KVPart]:
        """The blocks as parts that are read when they are looked at, to be gone through in order."""
        return [_LazyPart(self, i) for i in range(len(self._blocks))]

    def take(self, i: int) -> KVPart:
        """Block `i`; the one that was taken before may be gone."""
        if self._current is None or self._current[0] != i:
            self._current = None
            self._reading = {j: job for j, job in self._reading.items() if j >= i}
            self._begin(i)
            self._current = i, self._reading.pop(i).result()
        return self._current[1]

    def _begin(self, first: int) -> None:
        """Starts reading the blocks from `first` on that are wanted now."""
        for i in range(first, min(first + 1 + self._ahead, len(self._blocks))):
            if i not in self._reading:
                self._reading[i] = self._thread.start(self._read, self._blocks[i])


class _LazyPart(KVPart):
    """A block of a run, read when it is looked at."""

    def __init__(self, run: BlockRun, number: int) -> None:
        self._run, self._number = run, number

    @property
    def k(self) -> torch.Tensor:
        """`[Hkv, n, d]`."""
        return self._run.take(self._number).k

    @property
    def v(self) -> torch.Tensor:
        """`[Hkv, n, d]`."""
        return self._run.take(self._number).v
