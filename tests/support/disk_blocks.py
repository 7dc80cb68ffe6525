"""Numbered blocks for a disk store, and a process that saves them until it is killed."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offload_rt.storage.block_file import BlockWriter
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.naming import NamedBlock
from offload_rt.storage.options import StoreOptions

from .child_processes import fork_until_killed

LAYERS, LAYER_BYTES = 3, 512
FILE_BYTES = 4096 + LAYERS * LAYER_BYTES
KILLS = int(os.environ.get("OFFLOAD_RT_STRESS", "20"))


def padded_name(kind: str) -> str:
    return f"{kind}-{'0' * 32}"


def token_bytes(number: int, count: int = 64) -> bytes:
    return np.arange(number, number + count, dtype="<i8").tobytes()


def block_name(store: DiskStore, number: int, parent: bytes | None = None) -> NamedBlock:
    return NamedBlock(0, parent or store.root, "exact", token_bytes(number))


def block_data(number: int) -> list[bytes]:
    return [random.Random(f"{number} {layer}").randbytes(LAYER_BYTES) for layer in range(LAYERS)]


def save(store: DiskStore, number: int, parent: bytes | None = None, *, for_prompt: bool = False) -> bool:
    writer = store.begin(block_name(store, number, parent), LAYER_BYTES, for_prompt=for_prompt)
    if writer is None:
        return False
    return fill(writer, number)


def fill(writer: BlockWriter, number: int) -> bool:
    for layer, block in enumerate(block_data(number)):
        writer.write(layer, memoryview(block))
    return writer.commit()


def load(store: DiskStore, number: int, parent: bytes | None = None) -> list[bytes] | None:
    found = store.find(block_name(store, number, parent))
    if found is None:
        return None
    blocks = []
    for layer in range(LAYERS):
        into = bytearray(LAYER_BYTES)
        if not found.read_layer(layer, memoryview(into)):
            return None
        blocks.append(bytes(into))
    return blocks


def block_files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.kv"))


def open_store(
    folder: Path, limit: int | None = None, *, policy: str = "lru", ttl: float | None = None, **options: Any
) -> DiskStore:
    return DiskStore(folder, "model a", LAYERS, StoreOptions(limit, policy, ttl), **options)  # type: ignore[arg-type]


def fork_saver(folder: Path, start: int) -> int:
    """Save blocks in a forked process until it is killed. Return the process id once the store is open."""

    def steps() -> Iterator[None]:
        store = open_store(folder, 40 * FILE_BYTES)
        yield
        for number in itertools.count(start):
            save(store, number)

    return fork_until_killed(steps())
