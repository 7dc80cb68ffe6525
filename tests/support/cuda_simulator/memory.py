"""Device memory with a caching allocator, and page-locked host memory.

Freed blocks are poisoned in stream order: floats with NaN, integers with a large number. A freed block returns to the
stream that allocated it, once the streams passed to `record_stream` have finished their pending work. Only that stream
reuses the block, after poisoning it and only for allocations of the same size. A reader that did not wait therefore
never finds correct old values.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .engine import Engine, Point, Poisoning, Queue

POISON = np.uint16(0x7FFF)
"""Pattern that, when repeated, is NaN in every float type and larger than any index in every integer type."""

MOST_POISONED = 1 << 26
"""Maximum number of bytes that are poisoned in registered memory."""

ROUND = 512
"""Block sizes are multiples of this number of bytes, as in torch's allocator."""


_numbers = itertools.count()
"""Block numbers, unique over all simulators in this process because tensors may outlive their simulator."""


class Region:
    def __init__(self, size: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        self.start = self._memory.ctypes.data
        self.stop = self.start + size
        self._next = self.start

    def allocate_poisoned(self, size: int) -> int:
        address = self._next
        if address + size > self.stop:
            raise MemoryError("the simulator's own memory is too small for this test")
        self._next += size
        self.poison(address, size)
        return address

    def poison(self, address: int, size: int) -> None:
        at = address - self.start
        self._memory[at : at + size].view(np.uint16)[:] = POISON


@dataclass(eq=False)
class Block:
    """A block of device memory.

    Attributes:
        queue: Stream that allocated the block.
        pool: Id of a graph's memory pool, or 0.
        users: Streams passed to `record_stream`.
        free: Whether the block can be allocated again.
    """

    number: int
    address: int
    size: int
    queue: Queue
    pool: int = 0
    users: set[Queue] = field(default_factory=set)
    free: bool = False


@dataclass
class Usage:
    """Bytes in use and their peaks.

    Attributes:
        allocated: Bytes used by existing tensors.
        active: `allocated`, plus blocks that a stream still uses, plus all memory owned by graphs.
    """

    allocated: int = 0
    active: int = 0
    allocated_peak: int = 0
    active_peak: int = 0

    def take(self, size: int, newly_active: int) -> None:
        self.allocated, self.active = self.allocated + size, self.active + newly_active
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.active_peak = max(self.active_peak, self.active)

    def reset_peaks(self) -> None:
        self.allocated_peak, self.active_peak = self.allocated, self.active


_host_regions: list[Region] = []
"""Host memory of all simulators, kept alive because a test may read it after its simulator is gone."""


class Memory:
    """Allocator for up to `limit` bytes of device memory, and for page-locked host memory."""

    def __init__(self, module: Any, engine: Engine, limit: int) -> None:
        self._module, self._engine, self.limit = module, engine, limit
        self.device, self.host = Region(1 << 31), Region(1 << 28)
        _host_regions.append(self.host)
        self.usage = Usage()
        self.allocations = 0
        """Number of device allocations outside graphs."""
        self._blocks: dict[int, Block] = {}
        self._at: dict[int, int] = {}
        self._host_blocks: dict[int, tuple[int, int]] = {}
        self._free: dict[tuple[int, Queue, int], list[int]] = defaultdict(list)
        self._free_host: dict[int, list[int]] = defaultdict(list)
        self._deferred: list[tuple[Block, list[Point]]] = []
        self._pool_bytes: Counter[int] = Counter()
        self.capturing: set[int] = set()
        """Pools of captures that have not ended. Until they end, blocks passed to `record_stream` are not freed."""
        self.in_place = True
        """Whether kernels access page-locked memory at its host address."""
        self.lockable = 1 << 62
        """Maximum number of bytes that can be registered."""
        self.registered: list[tuple[int, int]] = []
        self.registered_on: set[int] = set()
        """Devices that were current when memory was registered."""

    # ------------------------------------------------------------------------------------------------------ device

    def allocate(self, queue: Queue, nbytes: int, pool: int = 0) -> torch.Tensor:
        """Return device memory, uint8 `[nbytes]`. Raise torch.OutOfMemoryError if the limit is exceeded."""
        self.collect()
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        self.allocations += pool == 0
        if self.usage.active + size > self.limit:
            self._engine.finish_all()
            self.collect()
        if self.usage.active + size > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory (simulated). Tried to allocate {nbytes} bytes; {self.usage.active} of "
                f"{self.limit} are in use"
            )
        free = self._free[pool, queue, size]
        fresh = pool == 0 or not free  # a graph keeps its memory
        address = free.pop() if free else self.device.allocate_poisoned(size)
        if pool and fresh:
            self._pool_bytes[pool] += size
        number = next(_numbers)
        self._blocks[number] = Block(number, address, size, queue, pool)
        self._at[address] = number
        self.usage.take(size, size if fresh else 0)
        return self._module.over(address, nbytes, number, queue.device)

    def begin_pool(self, pool: int) -> None:
        if pool in self.capturing:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.capturing.add(pool)

    def end_pool(self, pool: int) -> None:
        if pool not in self.capturing:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.capturing.remove(pool)

    def drop_pool(self, pool: int) -> None:
        self.usage.active -= self._pool_bytes.pop(pool, 0)
        for key in [key for key in self._free if key[0] == pool]:
            del self._free[key]

    def record_stream(self, address: int, queue: Queue) -> None:
        """Prevent reuse of the block at `address` until `queue` has finished its pending work."""
        block = self._blocks[self._at[address]]
        if block.queue is not queue:
            block.users.add(queue)

    def collect(self) -> None:
        """Free the blocks whose tensors were deleted and that no stream uses any more."""
        for number in self._module.take_returned():
            if (place := self._host_blocks.pop(number, None)) is not None:
                self.host.poison(*place)
                self._free_host[place[1]].append(place[0])
            elif (block := self._blocks.pop(number, None)) is not None:
                self.usage.allocated -= block.size
                self._deferred.append((block, [self._engine.record(queue) for queue in block.users]))
        deferred, self._deferred = self._deferred, []
        for block, points in deferred:
            if all(point.reached for point in points) and not (points and self.capturing):
                self._poison_and_free(block)
            else:
                self._deferred.append((block, points))

    def _poison_and_free(self, block: Block) -> None:
        self.usage.active -= 0 if block.pool else block.size

        def poison() -> None:
            self.device.poison(block.address, block.size)
            if not block.free:  # each replay poisons the memory that was freed during the capture
                block.free = True
                self._free[block.pool, block.queue, block.size].append(block.address)

        self._engine.submit(block.queue, Poisoning(poison))

    # -------------------------------------------------------------------------------------------------------- host

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Return page-locked host memory, uint8 `[nbytes]`. Queued copies keep their source alive, as in torch."""
        self.collect()
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        free = self._free_host[size]
        address = free.pop() if free else self.host.allocate_poisoned(size)
        number = next(_numbers)
        self._host_blocks[number] = address, size
        return self._module.over(address, nbytes, number, -1)

    def register(self, address: int, size: int) -> bool:
        """Register host memory like cudaHostRegister, and poison it. Callers pass memory that has no contents yet.

        Return False if part of the memory is already registered, or if the total would exceed `lockable`.
        """
        registered_bytes = sum(stop - start for start, stop in self.registered)
        if registered_bytes + size > self.lockable or any(
            start < address + size and address < stop for start, stop in self.registered
        ):
            return False
        self.registered = sorted([*self.registered, (address, address + size)])
        fresh = (ctypes.c_uint16 * (min(size, MOST_POISONED) // 2)).from_address(address)
        np.frombuffer(fresh, dtype=np.uint16)[:] = POISON
        return True

    def unregister(self, address: int) -> None:
        self.registered = [place for place in self.registered if place[0] != address]

    def is_pinned(self, address: int) -> bool:
        if self.host.start <= address < self.host.stop:
            return True
        at = bisect_right(self.registered, (address, 1 << 62)) - 1
        return at >= 0 and self.registered[at][0] <= address < self.registered[at][1]

    def on_device(self, low: int, high: int) -> bool:
        return self.device.start <= low and high < self.device.stop

    def reachable(self, low: int, high: int) -> bool:
        if self.on_device(low, high):
            return True
        return self.in_place and self.is_pinned(low) and self.is_pinned(high)
