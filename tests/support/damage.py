"""Damage files: flip bits, truncate them, replace their contents or type, or change JSON values."""

from __future__ import annotations

import json
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**30, 1e308, -1.5, float("nan"), "", "x", "../../outside",
    "/outside", "\0", "ff", "x" * 5000, [], [[]], [None], [0] * 3, ["x"], {}, {"x": 1}, [2**62, -1],
]  # fmt: skip

CONTENTS = [
    b"", b"\0" * 100, b"{}", b"[]", b"null", b'{"format": 1}', b"\xff" * 64, b"GIF89a", b"not json",
    struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"{}", b"[" * 100_000, b'{"a":' * 5000, b"1" * 10_000,
]  # fmt: skip


def damage_file(path: Path, rng: random.Random, others: list[Path], spread: int) -> str:
    """Damage a file in a random way and return its name. Most bit flips hit the first `spread` bytes."""
    kinds = [
        flip,
        truncate,
        extend,
        zero,
        huge_number,
        arbitrary_content,
        content_of_other_file,
        json_value,
        json_value,
        delete,
        folder,
        link,
        sparse,
    ]
    kind = rng.choice(kinds)
    if not path.is_file() or path.stat().st_size > 1 << 26:
        return "damaged before"
    kind(path, rng, others if kind is content_of_other_file else spread)
    return kind.__name__


def _random_offset(data: bytes, rng: random.Random, spread: int) -> int:
    return rng.randrange(min(len(data), spread) if rng.random() < 0.7 else len(data))


def _edit(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    if data:
        change(data)
        path.write_bytes(data)


def flip(path: Path, rng: random.Random, spread: int) -> None:
    def flipped(data: bytearray) -> None:
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[_random_offset(data, rng, spread)] ^= 1 << rng.randrange(8)

    _edit(path, flipped)


def truncate(path: Path, rng: random.Random, spread: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: _random_offset(data, rng, spread) if data else 0])


def extend(path: Path, rng: random.Random, spread: int) -> None:
    path.write_bytes(path.read_bytes() + rng.choice((b"\0", b"x" * 4096, b"}\n", b"\xff")))


def zero(path: Path, rng: random.Random, spread: int) -> None:
    def zeroed(data: bytearray) -> None:
        start = _random_offset(data, rng, spread)
        stop = min(len(data), start + rng.choice((1, 8, 100, 4096)))
        data[start:stop] = bytes(stop - start)

    _edit(path, zeroed)


def huge_number(path: Path, rng: random.Random, spread: int) -> None:
    """Overwrite bytes with a length or an offset that is too large for any file."""

    def overwritten(data: bytearray) -> None:
        start = rng.choice((0, 8, 16, _random_offset(data, rng, spread)))
        if start + 8 <= len(data):
            value = rng.choice((2**63 - 1, 2**62, 2**40, 2**33, 2**32 - 1, 2**31, len(data), len(data) + 1, 0))
            struct.pack_into("<Q", data, start, value)

    _edit(path, overwritten)


def arbitrary_content(path: Path, rng: random.Random, spread: int) -> None:
    path.write_bytes(rng.choice(CONTENTS))


def content_of_other_file(path: Path, rng: random.Random, others: Any) -> None:
    data = [
        other.read_bytes()
        for other in others
        if other.is_file() and not other.is_symlink() and other.stat().st_size < 1 << 26
    ]
    path.write_bytes(rng.choice(data))


def json_value(path: Path, rng: random.Random, spread: int) -> None:
    """Change a JSON value, and update the checksum or safetensors header length that precedes the JSON."""
    data = path.read_bytes()
    for start in (0, 8):
        try:
            if start == 8 and 8 + (size := struct.unpack("<Q", data[:8])[0]) < len(data):
                found, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
                new = change_json(found, rng)
                path.write_bytes(struct.pack("<Q", len(new)) + new + rest)
                return
            found = json.loads(data[start:])
        except (ValueError, struct.error, RecursionError):
            continue
        new = change_json(found, rng)
        path.write_bytes(new if start == 0 else seal_data(new))
        return
    flip(path, rng, spread)


def seal_data(data: bytes) -> bytes:
    from offload_rt.storage.files import seal

    return seal(data)


def change_json(found: Any, rng: random.Random) -> bytes:
    node, parents = found, []
    while isinstance(node, (dict, list)) and node and (rng.random() < 0.85 or not parents):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        parents.append((node, key))
        node = node[key]
    if not parents:
        return json.dumps(rng.choice(VALUES)).encode()
    holder, key = parents[-1]
    if isinstance(holder, dict) and rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES)
    return json.dumps(found).encode()


def delete(path: Path, rng: random.Random, spread: int) -> None:
    path.unlink()


def folder(path: Path, rng: random.Random, spread: int) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, rng: random.Random, spread: int) -> None:
    path.unlink()
    path.symlink_to(rng.choice((path, Path("/nowhere"), Path("/dev/zero"))))


def sparse(path: Path, rng: random.Random, spread: int) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


@contextmanager
def memory_limit(extra_bytes: int) -> Iterator[None]:
    """Limit the address space, so that unbounded reads raise MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
