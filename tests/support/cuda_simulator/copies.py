"""Copies between host and device, and the log of host waits.

A copy is queued if it is non-blocking and its host memory is page-locked and contiguous. A queued copy accesses host
memory when it runs. For all other copies, the host waits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .simulator import Simulator

current: list[Simulator] = []
"""The active simulator, if any."""

PACKAGE = Path(__file__).parents[3]
OWN = str(Path(__file__).parent)


@dataclass(frozen=True)
class Sync:
    """A point where the host waited for the device. `place` is `file:line` in the repository."""

    what: str
    place: str

    @property
    def file(self) -> str:
        return self.place.rpartition(":")[0]


def caller_location() -> str:
    """Return `file:line` of the innermost caller outside torch and the simulator."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((OWN, "<")) and "site-packages" not in name and "contextlib" not in name:
            path = Path(name)
            for root in (PACKAGE, PACKAGE.resolve()):
                if path.is_relative_to(root):
                    path = path.relative_to(root)
            parts = path.parts
            short = parts[parts.index("offload_rt") :] if "offload_rt" in parts else parts
            return f"{'/'.join(short)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def to_device(sim: Simulator, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    target, dense = sim.host_view(into), source.is_contiguous() or source.stride() == into.stride()
    if non_blocking and dense and sim.memory.is_pinned(source.data_ptr()):
        kept = source.view_as(source) if source.numel() else source
        sim.queue_work("copy", lambda: _copy(target, kept), into.device.index)
        return
    now = source if dense else source.contiguous()
    sim.queue_work("copy", lambda: _copy(target, now), into.device.index)
    sim.host_waits(_reason("host to device", non_blocking, dense), into.device.index)


def to_host(sim: Simulator, into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    origin, dense = sim.host_view(source), into.is_contiguous() or source.stride() == into.stride()
    sim.queue_work("copy", lambda: _copy(into, origin), source.device.index)
    if not (non_blocking and dense and sim.memory.is_pinned(into.data_ptr())):
        sim.host_waits(_reason("device to host", non_blocking, dense), source.device.index)


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)


def _reason(what: str, non_blocking: bool, dense: bool) -> str:
    if not non_blocking:
        return f"copy {what}"
    return f"copy {what} of pageable memory" if dense else f"copy {what} in pieces"


def copy_between(sim: Simulator, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `copy_` or `_to_copy` if it copies between host and device. Otherwise, return NotImplemented."""
    if name == "copy_":
        into, source = args[0], args[1]
        if into.is_cuda == source.is_cuda:
            return NotImplemented
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        source = source if source.shape == into.shape or source.is_cuda else source.expand(into.shape)
        (to_device if into.is_cuda else to_host)(sim, into, source, non_blocking)
        return into
    source = args[0]
    device = torch.device(kwargs.get("device") or source.device)
    if (device.type == "cuda") == source.is_cuda:
        return NotImplemented
    dtype, non_blocking = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
    like = torch.empty_like(source, device="meta", dtype=dtype, memory_format=kwargs.get("memory_format"))
    if device.type == "meta":
        return like
    if device.type == "cuda":
        out = sim.new(like, device)
        to_device(sim, out, source, non_blocking)
        return out
    if non_blocking or kwargs.get("pin_memory"):
        out = sim.new_pinned(like)
    else:
        out = torch.empty_strided(like.shape, like.stride(), dtype=dtype)
    to_host(sim, out, source, non_blocking)
    return out


@cache
def register() -> None:
    """Register implementations of operations that bypass dispatch modes, such as `torch.tensor(..., device="cuda")`."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty_strided", _empty, "CUDA")
    library.impl("copy_", _copied, "CUDA")
    _kept.append(library)


_kept: list[Any] = []


def _empty(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **named: Any) -> torch.Tensor:
    like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
    return current[-1].new(like, torch.device("cuda") if device is None else device)


def _copied(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    assert not source.is_cuda, "a copy on the device that no mode saw"
    to_device(current[-1], into, source, non_blocking)
    return into
