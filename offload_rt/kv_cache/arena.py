"""Host memory of the KV cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from typing import Any

import torch

from ..core import BLOCK_SIZE, KVPart
from ..errors import MemoryLimitError
from ..utils.units import format_size
from .layout import PAGE, ArenaLayout, fill_planes


class Arena:
    """Host memory for KV: one reserved address range, divided into slabs of equal size.

    The operating system allocates each memory page when it is first written. `activate` makes the next slab usable and,
    if `pin` is True, page-locks it, which takes up to a second per gigabyte. The memory is unmapped when the arena and
    all views of it have been deleted.
    """

    def __init__(self, layout: ArenaLayout, dtype: torch.dtype, *, pin: bool = False) -> None:
        assert dtype.itemsize == layout.itemsize
        self.layout = layout
        self.pin = pin
        # The engine may activate slabs while another device is current.
        self._device = torch.cuda.current_device() if pin else None
        self.active = 0
        # Huge pages reduce page faults and TLB misses. However, the first slab does not use them unless it is pinned: a
        # short prompt would touch many huge pages, and the kernel clears each of them (SmolLM2 with 30 tokens: 360 MB,
        # which takes one second on a virtual machine).
        start = 0 if pin else layout.slab_rows * layout.head_dim * layout.itemsize
        memory = reserve(layout.bytes, "the KV cache", huge_from=start)
        self.rows = torch.frombuffer(memory, dtype=dtype).view(layout.rows, layout.head_dim)
        """All stored vectors `[R, d]`, indexed by row id (see `layout`)."""
        shape = (layout.slabs, layout.layers, layout.kv_heads, layout.planes, layout.plane_rows, layout.head_dim)
        steps = (layout.slab_rows, layout.layer_rows, layout.head_rows, layout.plane_rows, 1)
        self.planes = self.rows.as_strided(shape, (*(layout.head_dim * step for step in steps), 1))
        """The same memory as a tensor `[slab, L, Hkv, planes (K, V), slab_blocks * 64, d]`."""
        assert PAGE % mmap.PAGESIZE == 0 == self.rows.data_ptr() % mmap.PAGESIZE

    def activate(self) -> None:
        """Make the next slab usable. Raise MemoryLimitError if it cannot be page-locked."""
        assert self.active < self.layout.slabs
        if self.pin:
            slab = self.rows.narrow(0, self.active * self.layout.slab_rows, self.layout.slab_rows)
            page_lock(slab, self, self._device)
        self.active += 1

    def view(self, slab: int, storage_layer: int, offset: int, size: int) -> KVPart:
        """Return views of K and V `[Hkv, size, width]` of one storage layer.

        The views cover `size` token slots of the slab, starting at slot `offset`.
        """
        return KVPart.of(self.planes[slab, storage_layer].narrow(2, offset, size), dim=1)

    def planes_of(self, slab: int, storage_layers: range, offset: int, size: int) -> torch.Tensor:
        """Return a view `[p, size, width]` of token slots [offset, offset + size) in all planes of several layers.

        A plane is the K or the V of one KV head in one storage layer (see `layout.py`).
        """
        return self.planes[slab, storage_layers.start : storage_layers.stop].flatten(0, 2).narrow(1, offset, size)

    def fill(self, slab: int, storage_layer: int, offset: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy encoded k and v `[Hkv, n, width]` to the token slots [offset, offset + n), and wait for the copy."""
        fill_planes(self.planes[slab, storage_layer].narrow(2, offset, k.shape[1]), 1, k, v)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` token slots of block `source` to block `target`, in all layers."""
        (a, i), (b, j) = (divmod(block, self.layout.slab_blocks) for block in (source, target))
        old = self.planes[a, :, :, :, i * BLOCK_SIZE : i * BLOCK_SIZE + tokens]
        self.planes[b, :, :, :, j * BLOCK_SIZE : j * BLOCK_SIZE + tokens].copy_(old)


def reserve(size: int, what: str, huge_from: int = 0) -> mmap.mmap:
    """Reserve `size` bytes of page-aligned address space without allocating memory. Raises MemoryLimitError.

    `what` describes the purpose in error messages. Huge pages are used from byte `huge_from` on, which must be a
    multiple of `PAGE`.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryLimitError(
            f"cannot reserve {format_size(size)} ({size} bytes) of address space for {what} ({error}): lower "
            f"host_memory, or raise this process's limits (ulimit -v, vm.overcommit_memory)"
        ) from error
    if huge_from < size:
        with contextlib.suppress(OSError, AttributeError):  # The kernel or the platform may not support huge pages.
            memory.madvise(mmap.MADV_HUGEPAGE, huge_from)
    return memory


def page_lock(slab: torch.Tensor, owner: object, device: torch.device | int | None = None) -> None:
    """Page-lock the memory of `slab` for CUDA, until `owner` is deleted. Raise MemoryLimitError if CUDA refuses.

    `device` is the CUDA device that uses the memory, by default the current device.
    """
    size = slab.numel() * slab.itemsize
    cuda: Any = torch.cuda  # cudart() is untyped in some versions of torch
    with cuda.device(device):  # on any other device, CUDA would allocate a context there
        code = int(cuda.cudart().cudaHostRegister(slab.data_ptr(), size, 0))
        if code != 0:
            with contextlib.suppress(RuntimeError):
                # This clears CUDA's error state. Otherwise, the next kernel launch would report the error.
                torch.zeros(1, device="cuda")
    if code != 0:
        raise MemoryLimitError(
            f"cannot pin {format_size(size)} of host memory for CUDA (cudaHostRegister gave error {code}): lower "
            f"host_memory, or raise the limit on locked memory (ulimit -l)"
        )
    # Not at exit, because copies may still be pending.
    weakref.finalize(owner, _unregister, slab).atexit = False


def reads_host_addresses() -> bool:
    """Return whether CUDA kernels can read page-locked memory at its host address. On WSL 2, for example, they cannot.

    The test page-locks one page. If this fails, MemoryLimitError is raised.
    """
    page = torch.frombuffer(mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    page_lock(page, page)
    address = page.data_ptr()
    return device_pointer(address) in (None, address)


def device_pointer(address: int) -> int | None:
    """Return the device address of page-locked host memory. Return None if there is no CUDA driver, as on ROCm."""
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
