"""Lifetime of buffers that are used by two streams."""

from __future__ import annotations

import itertools
from collections import deque

import torch

from .streams import Event, Stream


class Staging:
    """Keeps the buffers of a fetch alive until the compute stream waits for the fetch.

    Buffers are allocated in the compute stream, and are released as soon as the wait is queued in this stream. From
    then on, later compute work can reuse the memory. With the allocator's `record_stream`, the memory could not be
    reused until the device has executed the wait.
    """

    def __init__(self, prefetch: Stream) -> None:
        self._prefetch = prefetch
        self._numbers = itertools.count()
        self._buffers: dict[int, tuple[torch.Tensor, ...]] = {}

    def hold(self, *tensors: torch.Tensor) -> int:
        """Keep the buffers of a fetch alive. Return a number that identifies the fetch."""
        number = next(self._numbers)
        self._buffers[number] = tensors
        return number

    def release(self, number: int, event: Event, *made: torch.Tensor) -> None:
        """Make the compute stream wait for a fetch, and release its buffers.

        Args:
            number: The result of `hold`.
            event: An event that is recorded after the fetch.
            *made: Tensors that were allocated in the prefetch stream and will be used in the compute stream.
        """
        self._prefetch.hold_compute(event, *made)
        self._buffers.pop(number, None)

    def clear(self) -> None:
        """Release all buffers. The prefetch stream must be idle."""
        self._buffers.clear()


HELD_BACK = 1 << 20
"""Maximum size in bytes of the pending write-backs in decode steps.

If it is exceeded, the compute stream waits for the oldest write-backs. The limit is larger than the write-backs of one
step, so the compute stream only waits for write-backs of earlier steps.
"""


class PendingWriteBacks:
    """Keeps the buffers of write-backs alive, as `Staging` does for fetches.

    A prefill releases the buffers of a layer when the next layer starts. Until then, the write-back runs in parallel
    with the attention and the MLP of the layer.
    """

    def __init__(self, write_back: Stream) -> None:
        self._write_back = write_back
        self._pending: deque[tuple[Event, int, tuple[torch.Tensor, ...]]] = deque()
        self._bytes = 0

    def hold(self, event: Event, *tensors: torch.Tensor) -> None:
        """Keep `tensors` alive until the compute stream waits for `event`.

        `event` must be the newest event of the write-back stream, recorded after all reads of the tensors.
        """
        size = sum(tensor.nbytes for tensor in tensors)
        self._pending.append((event, size, tensors))
        self._bytes += size

    def release(self, most: int = 0) -> None:
        """Release the oldest tensors until at most `most` bytes remain. The compute stream waits for their events."""
        last: Event | None = None
        while self._pending and self._bytes > most:
            last, size, _ = self._pending.popleft()
            self._bytes -= size
        if last is not None:
            self._write_back.hold_compute(last)

    def clear(self) -> None:
        """Release all tensors. Before, all write-backs must have ended or the compute stream must wait for them."""
        self._pending.clear()
        self._bytes = 0
