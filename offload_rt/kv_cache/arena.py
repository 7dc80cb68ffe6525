"""The memory of the host pool: reserved once, made ready slab by slab."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import Any

import torch

from ..core import CHUNK, KVPart
from ..errors import MemoryLimitError
from ..utils.units import format_size
from .layout import PAGE, ArenaLayout


class Arena:
    """One range of addresses for the whole limit; the kernel gives it pages only when they are first written, so an
    unused pool costs nothing. It knows places, not owners.

    Slabs are made ready one by one with `activate`: with `pin`, a slab's range is page-locked and registered with CUDA
    (which also gives it all its pages), else this is a mere count. That takes a good part of a second for a
    gigabyte: call it when a sequence is admitted, not between two tokens.

    Huge pages are asked for: fewer faults at first writes, fewer misses in gathers of scattered rows. A started
    slab may therefore take its whole size from the machine, which the limit covers. The first one has them only where
    it is pinned: the few rows of a short prompt would each begin a huge page (SmolLM2: 360 MB to clear, a second on a
    virtual machine, before the first token of 30 prompt tokens).

    Mutated by `activate`, `copy`, `fill` and by whoever writes through `planes` or `rows`. The ranges are unregistered
    and unmapped when the arena and every view of it are gone.
    """

    def __init__(self, layout: ArenaLayout, dtype: torch.dtype, *, pin: bool = False) -> None:
        assert dtype.itemsize == layout.itemsize
        self.layout = layout
        self.pin = pin
        self.active = 0
        start = 0 if pin else layout.slab_rows * layout.head_dim * layout.itemsize
        memory = reserve(layout.bytes, "the host pool", huge_from=start)
        self.rows = torch.frombuffer(memory, dtype=dtype).view(layout.rows, layout.head_dim)
        """`[R, d]`: every row of the arena by its row id."""
        shape = (layout.slabs, layout.layers, layout.kv_heads, 2, layout.plane_rows, layout.head_dim)
        steps = (layout.slab_rows, layout.layer_rows, layout.head_rows, layout.plane_rows, 1)
        self.planes = self.rows.as_strided(shape, (*(layout.head_dim * step for step in steps), 1))
        """`[slab, L, Hkv, 2, slab_chunks * 64, d]`: the same memory by place."""
        assert PAGE % mmap.PAGESIZE == 0 == self.rows.data_ptr() % mmap.PAGESIZE

    def activate(self) -> None:
        """Makes the next slab ready. MemoryLimitError where it cannot be pinned."""
        assert self.active < self.layout.slabs
        if self.pin:
            slab = self.rows.narrow(0, self.active * self.layout.slab_rows, self.layout.slab_rows)
            page_lock(slab, self)
        self.active += 1

    def view(self, slab: int, place: int, offset: int, size: int) -> KVPart:
        """K and V `[Hkv, size, width]` of neighbouring slots of a slab in one layer, as views."""
        planes = self.planes[slab, place].narrow(2, offset, size)
        return KVPart(planes[:, 0], planes[:, 1])

    def fill(self, slab: int, place: int, offset: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows k, v `[Hkv, n, width]` take neighbouring slots of a slab in one layer; blocks until copied."""
        part = self.view(slab, place, offset, k.shape[1])
        part.k.copy_(k)
        part.v.copy_(v)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` slots of chunk `source` to chunk `target`, all layers in one call."""
        (a, i), (b, j) = (divmod(chunk, self.layout.slab_chunks) for chunk in (source, target))
        old = self.planes[a, :, :, :, i * CHUNK : i * CHUNK + tokens]
        self.planes[b, :, :, :, j * CHUNK : j * CHUNK + tokens].copy_(old)


def reserve(size: int, what: str, huge_from: int = 0) -> mmap.mmap:
    """`size` bytes of page-aligned address space for `what`, with no memory behind them yet; from byte `huge_from` on,
    a multiple of `PAGE`, in huge pages where the system has them. MemoryLimitError where this process may not have
    them."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryLimitError(
            f"cannot reserve {format_size(size)} ({size} bytes) of address space for {what} ({error}): lower "
            f"host_memory, or raise this process's limits (ulimit -v, vm.overcommit_memory)"
        ) from error
    if huge_from < size:
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages, a system without the call
            memory.madvise(mmap.MADV_HUGEPAGE, huge_from)
    return memory


def page_lock(slab: torch.Tensor, owner: object) -> None:
    """Page-locks the memory of `slab` for asynchronous copies and for kernels that read it directly, for as long as
    `owner` lives. MemoryLimitError where it cannot be."""
    size = slab.numel() * slab.itemsize
    cuda: Any = torch.cuda  # cudart() is untyped in some of torch's versions
    code = int(cuda.cudart().cudaHostRegister(slab.data_ptr(), size, 0))
    if code != 0:
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # the failure would be the next launch's: let it be this one's
        raise MemoryLimitError(
            f"cannot pin {format_size(size)} of host memory for CUDA (cudaHostRegister gave error {code}): lower "
            f"host_memory, or raise the limit on locked memory (ulimit -l)"
        )
    weakref.finalize(owner, _unregister, slab)


def read_in_place() -> bool:
    """Whether kernels of the current CUDA device may read page-locked memory at the host's own addresses: a page is
    locked and the driver is asked. They may not where the driver sits behind another system's (WSL 2). MemoryLimitError
    where no page can be locked."""
    page = torch.frombuffer(mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    page_lock(page, page)
    address = page.data_ptr()
    return device_pointer(address) in (None, address)


def device_pointer(address: int) -> int | None:
    """Where the device finds the page-locked memory that the host has at `address`; None where no driver says (ROCm's
    has other names)."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_uint64()
    code = driver.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(address), 0)
    return found.value if code == 0 else None


def _unregister(slab: torch.Tensor) -> None:
    cuda: Any = torch.cuda
    cuda.cudart().cudaHostUnregister(slab.data_ptr())
