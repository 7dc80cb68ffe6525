"""Memory that the prefetch stream fills and the compute stream reads."""

from __future__ import annotations

import itertools

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
