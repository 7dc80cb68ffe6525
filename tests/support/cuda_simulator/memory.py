"""Device memory as the caching allocator gives it out, and page-locked host memory. What is given back is poisoned in
the order of its stream: NaN in every float, a large number in every integer.

A block goes back to the stream that it was allocated on, at once; only streams that `record_stream` named keep it out
of use, until what they had queued by then has run. It is given out again, to its stream and for its size, when the
poison has been written: so a reader that did not wait finds no right numbers from the last time.
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
"""Twice or four times in a row NaN as float16, bfloat16, float32 and float64; beyond every index as an integer."""

MOST_POISONED = 1 << 26
"""Bytes of registered memory that are poisoned: more would only take memory."""

ROUND = 512
"""Bytes that a block's size is a multiple of, as in torch's allocator."""


_numbers = itertools.count()
"""Of blocks, on all machines that this process simulates: tensors may outlive theirs."""


class Region:
    """Address space that blocks are cut from, one behind the other; nothing is behind it that was not touched."""

    def __init__(self, size: int) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
        self.start = self._memory.ctypes.data
        self.stop = self.start + size
        self._next = self.start

    def cut(self, size: int) -> int:
        """The address of `size` fresh bytes, poisoned."""
        address = self._next
        if address + size > self.stop:
            raise MemoryError("the simulator's own memory is too small for this test")
        self._next += size
        self.poison(address, size)
        return address

    def poison(self, address: int, size: int) -> None:
        """Overwrites a block."""
        at = address - self.start
        self._memory[at : at + size].view(np.uint16)[:] = POISON


@dataclass(eq=False)
class Block:
    """`size` bytes at `address`, allocated on `queue` from the memory of `pool` (0: everybody's, else a graph's).
    `users`: the streams that `record_stream` named."""

    number: int
    address: int
    size: int
    queue: Queue
    pool: int = 0
    users: set[Queue] = field(default_factory=set)


@dataclass
class Usage:
    """Bytes now and at most. `allocated`: of tensors that exist. `active`: of these and of what a stream still keeps
    from being used again, and all that graphs have."""

    allocated: int = 0
    active: int = 0
    allocated_peak: int = 0
    active_peak: int = 0

    def take(self, size: int, more: int) -> None:
        """A block is given out, `more` bytes of which were not kept already."""
        self.allocated, self.active = self.allocated + size, self.active + more
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        self.active_peak = max(self.active_peak, self.active)

    def reset_peaks(self) -> None:
        """Peaks count from now on."""
        self.allocated_peak, self.active_peak = self.allocated, self.active


_host_regions: list[Region] = []
"""Kept, since a test may read what was copied to the host when its machine is gone."""


class Memory:
    """Blocks of the device and of page-locked host memory. `limit`: bytes that may be active, as on a small card."""

    def __init__(self, module: Any, engine: Engine, limit: int) -> None:
        self._module, self._engine, self.limit = module, engine, limit
        self.device, self.host = Region(1 << 31), Region(1 << 28)
        _host_regions.append(self.host)
        self.usage = Usage()
        self._blocks: dict[int, Block] = {}
        self._at: dict[int, int] = {}
        self._host_blocks: dict[int, tuple[int, int]] = {}
        self._free: dict[tuple[int, Queue, int], list[int]] = defaultdict(list)
        self._free_host: dict[int, list[int]] = defaultdict(list)
        self._kept: list[tuple[Block, list[Point]]] = []
        self._of_pools: Counter[int] = Counter()
        self.in_place = True
        """Whether kernels find page-locked memory where the host does."""
        self.lockable = 1 << 62
        """Bytes that may be registered."""
        self.registered: list[tuple[int, int]] = []

    # ------------------------------------------------------------------------------------------------------ device

    def allocate(self, queue: Queue, nbytes: int, pool: int = 0) -> torch.Tensor:
        """Bytes on the device `[nbytes]`. torch.OutOfMemoryError where the limit does not allow them."""
        self.collect()
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        if self.usage.active + size > self.limit:
            self._engine.finish_all()
            self.collect()
        if self.usage.active + size > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory (simulated). Tried to allocate {nbytes} bytes; {self.usage.active} of "
                f"{self.limit} are in use"
            )
        free = self._free[pool, queue, size]
        fresh = pool == 0 or not free  # a graph keeps what it once had
        address = free.pop() if free else self.device.cut(size)
        if pool and fresh:
            self._of_pools[pool] += size
        number = next(_numbers)
        self._blocks[number] = Block(number, address, size, queue, pool)
        self._at[address] = number
        self.usage.take(size, size if fresh else 0)
        return self._module.over(address, nbytes, number, queue.device)

    def drop_pool(self, pool: int) -> None:
        """The last graph of a pool is gone: its memory is everybody's."""
        self.usage.active -= self._of_pools.pop(pool, 0)

    def use(self, address: int, queue: Queue) -> None:
        """`record_stream`: the block at `address` is not given out again before `queue` has got to where the host
        is when the block goes."""
        block = self._blocks[self._at[address]]
        if block.queue is not queue:
            block.users.add(queue)

    def collect(self) -> None:
        """Takes back what nobody holds any more, as far as streams let it go."""
        for number in self._module.take_returned():
            if (place := self._host_blocks.pop(number, None)) is not None:
                self.host.poison(*place)
                self._free_host[place[1]].append(place[0])
            elif (block := self._blocks.pop(number, None)) is not None:
                self.usage.allocated -= block.size
                self._kept.append((block, [self._engine.record(queue) for queue in block.users]))
        kept, self._kept = self._kept, []
        for block, points in kept:
            if all(point.reached for point in points):
                self._give_back(block)
            else:
                self._kept.append((block, points))

    def _give_back(self, block: Block) -> None:
        self.usage.active -= 0 if block.pool else block.size

        def poison() -> None:
            self.device.poison(block.address, block.size)
            self._free[block.pool, block.queue, block.size].append(block.address)

        self._engine.submit(block.queue, Poisoning(poison))

    # -------------------------------------------------------------------------------------------------------- host

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Page-locked bytes `[nbytes]` of the host. Copies that are queued hold what they read, so that a block comes
        back when they have run, as torch's own page-locked memory does."""
        self.collect()
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        free = self._free_host[size]
        address = free.pop() if free else self.host.cut(size)
        number = next(_numbers)
        self._host_blocks[number] = address, size
        return self._module.over(address, nbytes, number, -1)

    def register(self, address: int, size: int) -> bool:
        """cudaHostRegister, which poisons what nobody has written yet: False where a part is registered already, or it
        would be too much."""
        held = sum(stop - start for start, stop in self.registered)
        if held + size > self.lockable or any(
            start < address + size and address < stop for start, stop in self.registered
        ):
            return False
        self.registered = sorted([*self.registered, (address, address + size)])
        fresh = (ctypes.c_uint16 * (min(size, MOST_POISONED) // 2)).from_address(address)
        np.frombuffer(fresh, dtype=np.uint16)[:] = POISON
        return True

    def unregister(self, address: int) -> None:
        """cudaHostUnregister."""
        self.registered = [place for place in self.registered if place[0] != address]

    def is_pinned(self, address: int) -> bool:
        """Whether the device can read and write the host memory at `address`."""
        if self.host.start <= address < self.host.stop:
            return True
        at = bisect_right(self.registered, (address, 1 << 62)) - 1
        return at >= 0 and self.registered[at][0] <= address < self.registered[at][1]

    def reachable(self, low: int, high: int) -> bool:
        """Whether a kernel may touch the addresses from `low` to `high`."""
        if self.device.start <= low and high < self.device.stop:
            return True
        return self.in_place and self.is_pinned(low) and self.is_pinned(high)
