"""Streams: ordered queues of device work that run in parallel with the compute stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch


class HasAdapter(Protocol):
    adapter: Any


S = TypeVar("S", bound=HasAdapter)
T = TypeVar("T")
P = ParamSpec("P")


class Event(Protocol):
    """A point in a stream's queue that is reached when all earlier work has finished."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """A queue of device work that runs in order, in parallel with other streams."""

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Return a context in which work is queued in this stream. It waits for all compute work queued so far."""
        ...

    def record_event(self) -> Event:
        """Return an event that is reached when all work queued in this stream so far has finished."""
        ...

    def wait_for(self, event: Event) -> None: ...

    def hold_compute(self, event: Event, *tensors: torch.Tensor) -> None:
        """Make later compute work wait for `event`, and allow it to use `tensors`, which this stream has allocated."""
        ...


class DeviceStream(Stream):
    """A stream on a CUDA, ROCm or XPU device. (In torch, ROCm devices are also called cuda.)

    Tensors that are used by two streams are registered with the caching allocator, so that their memory is not reused
    too early.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            yield

    def record_event(self) -> torch.Event:
        return self._stream.record_event()

    def wait_for(self, event: Any) -> None:
        self._stream.wait_event(event)

    def hold_compute(self, event: Any, *tensors: torch.Tensor) -> None:
        compute = torch.accelerator.current_stream(self._device)
        compute.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(compute)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which `device` is the current device, as Triton launches and graph captures require."""
    if device.type == "cpu":
        return nullcontext()
    chosen: AbstractContextManager[None] = torch.accelerator.device_index(device.index)
    return chosen


def device_guard(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Run a method with the device of `self.adapter` as the current device."""

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        with on_device(self.adapter.device):
            return method(self, *args, **named)

    return guarded


class _Reached:
    def synchronize(self) -> None:
        return


class InlineStream(Stream):
    """A stream that runs work immediately, for `CudaTransfer` on a CPU."""

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        yield

    def record_event(self) -> Event:
        return _Reached()

    def wait_for(self, event: Event) -> None:
        pass

    def hold_compute(self, event: Event, *tensors: torch.Tensor) -> None:
        pass
