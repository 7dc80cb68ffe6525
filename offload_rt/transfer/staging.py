"""Memory that two streams have in common: what the prefetch stream fills and the compute stream reads, what the
compute stream made and the write-back stream reads. Nobody tells the allocator of the other stream."""

from __future__ import annotations

import itertools
from collections import deque

import torch

from .streams import Event, Stream


class Staging:
    """Holds what a fetch reads and writes until the compute stream has been told to wait for it.

    All of it is allocated on the compute stream before the fetch begins, and the fetch begins behind everything queued
    there so far; let go of behind the wait, it is free in the compute stream's own order. So nobody has to tell the
    allocator of the other stream, which would keep the memory until the device had got there: staged at once is what
    was asked for and not yet waited for, however far the host runs ahead, and a captured graph uses the same memory
    for layer after layer. What nobody ever waits for (a step that was interrupted) is held until the stream is idle.
    """

    def __init__(self, prefetch: Stream) -> None:
        self._prefetch = prefetch
        self._numbers = itertools.count()
        self._held: dict[int, tuple[torch.Tensor, ...]] = {}

    def hold(self, *tensors: torch.Tensor) -> int:
        """Holds tensors of a fetch; the number is for `arrive`."""
        number = next(self._numbers)
        self._held[number] = tensors
        return number

    def arrive(self, number: int, mark: Event, *made: torch.Tensor) -> None:
        """Later work of the compute stream starts after `mark`, behind which the fetch is; its tensors are nobody's but
        their users'. `made`: tensors that were allocated in the prefetch stream."""
        self._prefetch.hold_compute(mark, *made)
        self._held.pop(number, None)

    def clear(self) -> None:
        """The prefetch stream is idle: nothing has to be held."""
        self._held.clear()


HELD_BACK = 1 << 20
"""Bytes of rows that decode steps leave with the write-back stream before compute waits for the oldest of them: more
than a step of any batch has, so that it is a wait for what was written long ago."""


class Returning:
    """Holds what the write-back stream reads, memory of the compute stream, until that has been told to wait for it.

    Then it is free in the compute stream's own order, as staged rows are: how much is held does not depend on how far
    the host runs ahead. A prefill lets go of a layer's slices when it begins the next layer: by then attention and MLP
    have run beside their write-back.
    """

    def __init__(self, write_back: Stream) -> None:
        self._write_back = write_back
        self._held: deque[tuple[Event, int, tuple[torch.Tensor, ...]]] = deque()
        self._bytes = 0

    def hold(self, mark: Event, *tensors: torch.Tensor) -> None:
        """Holds tensors that are read before `mark`, the newest one of the write-back stream."""
        size = sum(tensor.nbytes for tensor in tensors)
        self._held.append((mark, size, tensors))
        self._bytes += size

    def release(self, most: int = 0) -> None:
        """Lets go of the oldest until at most so many bytes are held: later work of the compute stream starts after
        their marks."""
        last: Event | None = None
        while self._held and self._bytes > most:
            last, size, _ = self._held.popleft()
            self._bytes -= size
        if last is not None:
            self._write_back.hold_compute(last)

    def clear(self) -> None:
        """The compute stream is behind all that was written back, or the write-back stream is idle."""
        self._held.clear()
        self._bytes = 0
