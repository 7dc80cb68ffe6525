"""Streams: ordered queues of device work that run in parallel with the compute stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in the order of a stream."""

    def synchronize(self) -> None:
        """Block the host until the point is reached."""
        ...


class Stream(Protocol):
    """A queue of device work that runs in order, in parallel with other streams."""

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Queue the work of this context in this stream, after all work of the compute stream so far."""
        ...

    def record_event(self) -> Event:
        """Return an event after all work queued in this stream so far."""
        ...

    def wait_for(self, event: Event) -> None:
        """Make later work of this stream wait for `event`."""
        ...

    def hold_compute(self, event: Event, *tensors: torch.Tensor) -> None:
        """Make later compute work wait for `event`. It uses `tensors`, which were allocated in this stream."""
        ...


class DeviceStream:
    """A stream of an accelerator that torch supports: CUDA, ROCm (which torch calls cuda) or XPU.

    The caching allocator is told of tensors used across streams, so that it does not reuse their memory while the other
    stream still works on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Queue the work of this context in the stream, after the work of the compute stream."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def record_event(self) -> torch.Event:
        """Record an event in the stream."""
        return self._stream.record_event()

    def wait_for(self, event: Any) -> None:
        """Make the stream wait for an event."""
        self._stream.wait_event(event)

    def hold_compute(self, event: Any, *tensors: torch.Tensor) -> None:
        """Make the compute stream wait for an event, and tell the allocator that it uses `tensors`."""
        compute = torch.accelerator.current_stream(self._device)
        compute.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(compute)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` current for Triton launches and graph captures; torch operations follow their tensors."""
    if device.type == "cpu":
        return nullcontext()
    chosen: AbstractContextManager[None] = torch.accelerator.device_index(device.index)
    return chosen


class _Reached:
    def synchronize(self) -> None:
        return


class InlineStream:
    """A stream that runs work synchronously, so that `CudaLink` can be used and tested on a CPU."""

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Run the work of this context at once."""
        with nullcontext():
            yield

    def record_event(self) -> Event:
        """Return an event that is reached already."""
        return _Reached()

    def wait_for(self, event: Event) -> None:
        """Do nothing, because every event is reached."""

    def hold_compute(self, event: Event, *tensors: torch.Tensor) -> None:
        """Do nothing, because every event is reached."""
