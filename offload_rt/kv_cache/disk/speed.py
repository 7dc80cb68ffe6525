"""How fast a disk is: what beginning a request takes, and what a byte takes, past the page cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .direct_file import BLOCK, DirectFile, aligned
from .requests import Requests

SEQUENTIAL = 1 << 20
"""Bytes of a request of a sequential read."""


@dataclass(frozen=True)
class DiskSpeed:
    """seek: seconds that a request of one block takes, many being made at once; byte: seconds a byte of large ones."""

    seek: float
    byte: float

    @property
    def gap(self) -> int:
        """Bytes that are read through rather than skipped: what takes as long as a request."""
        return int(self.seek / self.byte) // BLOCK * BLOCK

    def seconds(self, requests: int, size: int) -> float:
        """What so many requests of `size` bytes together take."""
        return requests * self.seek + size * self.byte


USUAL = DiskSpeed(seek=10e-6, byte=1 / 2e9)
"""Of a disk that nobody has measured: 100,000 requests a second, 2 GB a second."""


@dataclass(frozen=True)
class Measured:
    """Reads of `size` bytes each: how many a second."""

    size: int
    random: bool
    requests_per_second: float

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second."""
        return self.size * self.requests_per_second


def fill(file: DirectFile, size: int, seed: int = 0) -> None:
    """Writes `size` random bytes (whole MiB), so that reads of them cannot be answered without the disk."""
    file.allocate(0, size)
    data = aligned(SEQUENTIAL)
    generator = np.random.default_rng(seed)
    for offset in range(0, size, SEQUENTIAL):
        data.copy_(torch.from_numpy(generator.integers(0, 256, SEQUENTIAL, np.uint8)))
        file.write(offset, data)


def measure(file: DirectFile, held: int, size: int, *, random: bool, seconds: float = 0.25, seed: int = 1) -> Measured:
    """Reads pieces of `size` bytes of the file's first `held` for about so long, in order or scattered."""
    pieces, batch = held // size, max(1, min(512, (32 << 20) // size))
    generator, buffer = np.random.default_rng(seed), aligned(batch * size)
    at = np.arange(batch, dtype=np.int64) * size
    done, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        chosen = generator.integers(0, pieces, batch) if random else np.arange(done, done + batch) % pieces
        file.read(Requests(chosen * size, np.full(batch, size, np.int64), at), buffer)
        done += batch
    return Measured(size, random, done / took)


def speed(file: DirectFile, held: int) -> DiskSpeed:
    """From reads of single blocks, scattered, and of large ones, in order."""
    large = measure(file, held, SEQUENTIAL, random=False)
    small = measure(file, held, BLOCK, random=True)
    byte = 1 / large.bytes_per_second
    return DiskSpeed(max(0.0, 1 / small.requests_per_second - BLOCK * byte), byte)


def measured_speed(folder: Path, size: int = 256 << 20) -> DiskSpeed:
    """Of the disk that `folder` lies on, from a file of `size` bytes that is gone when this returns."""
    file = DirectFile(folder)
    try:
        fill(file, size)
        return speed(file, size)
    finally:
        file.close()
