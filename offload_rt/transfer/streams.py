"""Lanes: ordered queues of device work beside the compute stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream's order."""

    def synchronize(self) -> None:
        """Blocks the host until the point is reached."""
        ...


class Stream(Protocol):
    """Work queued in a stream runs in order, beside other streams."""

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Work queued in this context runs in this stream, after everything queued on the compute stream so far."""
        ...

    def mark(self) -> Event:
        """The point behind everything queued in this stream so far."""
        ...

    def wait_for(self, mark: Event) -> None:
        """Later work of this stream starts after `mark`."""
        ...

    def hold_compute(self, mark: Event, *tensors: torch.Tensor) -> None:
        """Later work of the compute stream starts after `mark`; `tensors`, allocated in this stream, are used there."""
        ...


class DeviceStream:
    """A stream of an accelerator, of whichever kind torch has: CUDA, ROCm (which torch calls cuda) or XPU. Cross-stream
    use of a tensor is told to the caching allocator, so that its memory is not given out again while the other stream
    still works on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Queues the work of this context in the stream, behind the compute stream."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def mark(self) -> torch.Event:
        """Records an event in the stream."""
        return self._stream.record_event()

    def wait_for(self, mark: Any) -> None:
        """Makes the stream wait for an event."""
        self._stream.wait_event(mark)

    def hold_compute(self, mark: Any, *tensors: torch.Tensor) -> None:
        """Makes the compute stream wait for an event, and tells the allocator that it uses `tensors`."""
        compute = torch.accelerator.current_stream(self._device)
        compute.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(compute)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """What Triton launches and a graph captures in this context is on `device`, whichever is the process's current one
    (torch's own operations look at their tensors)."""
    if device.type == "cpu":
        return nullcontext()
    chosen: AbstractContextManager[None] = torch.accelerator.device_index(device.index)
    return chosen


class _Reached:
    def synchronize(self) -> None:
        return


class InlineStream:
    """A device without streams: work runs when it is queued. With it the CUDA link's bookkeeping runs, and is tested,
    on a CPU."""

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Runs the work of this context at once."""
        with nullcontext():
            yield

    def mark(self) -> Event:
        """A point that is reached already."""
        return _Reached()

    def wait_for(self, mark: Event) -> None:
        """Does nothing: every mark is reached."""

    def hold_compute(self, mark: Event, *tensors: torch.Tensor) -> None:
        """Does nothing: every mark is reached."""
