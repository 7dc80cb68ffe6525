"""Measure the speed of a disk with direct I/O: time per request and time per byte."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from .direct_file import DirectFile, aligned
from .requests import BLOCK, Requests

SEQUENTIAL = 1 << 20  # bytes per request of a sequential read


@dataclass(frozen=True)
class DiskSpeed:
    """`seek`: seconds per request with many concurrent requests. `byte`: seconds per byte of large requests."""

    seek: float
    byte: float

    @property
    def gap(self) -> int:
        """Bytes that take as long to read as a new request. Shorter gaps are read through."""
        return int(self.seek / self.byte) // BLOCK * BLOCK

    def seconds(self, requests: int, size: int) -> float:
        return requests * self.seek + size * self.byte


USUAL = DiskSpeed(seek=10e-6, byte=1 / 2e9)  # default if not measured: 100,000 requests/s, 2 GB/s


@dataclass(frozen=True)
class Measured:
    """Measured rate of reads of `size` bytes each."""

    size: int
    random: bool
    requests_per_second: float

    @property
    def bytes_per_second(self) -> float:
        return self.size * self.requests_per_second


def fill(file: DirectFile, size: int, seed: int = 0) -> None:
    """Write `size` random bytes (whole MiB), so that reads cannot be served without the disk."""
    file.allocate(0, size)
    data = aligned(SEQUENTIAL)
    generator = np.random.default_rng(seed)
    for offset in range(0, size, SEQUENTIAL):
        data.copy_(torch.from_numpy(generator.integers(0, 256, SEQUENTIAL, np.uint8)))
        file.write(offset, data)


def measure(file: DirectFile, held: int, size: int, *, random: bool, seconds: float = 0.25, seed: int = 1) -> Measured:
    """Read pieces of `size` bytes from the first `held` bytes for about `seconds`, in order or at random."""
    pieces, batch = held // size, max(1, min(512, (32 << 20) // size))
    generator, buffer = np.random.default_rng(seed), aligned(batch * size)
    at = np.arange(batch, dtype=np.int64) * size
    done, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        chosen = generator.integers(0, pieces, batch) if random else np.arange(done, done + batch) % pieces
        file.read(Requests(chosen * size, np.full(batch, size, np.int64), at), buffer)
        done += batch
    return Measured(size, random, done / took)
