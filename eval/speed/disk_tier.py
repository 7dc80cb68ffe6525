"""Benchmark of decode steps with a context on disk: bytes read and time, compared with the speed of the disk.

KV is random and no model runs. As in a real step, the KV of a layer is fetched while the previous layer attends; then
the layer attends to it and appends one entry. Selections are recorded from a model (`generate --record`) or drawn as
runs of neighbouring tokens, most of which were already selected in the previous step. All reads bypass the page cache.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core import CHUNK, ModelGeometry, Selection, Visible
from ...engine.recording import Recording
from ...errors import InputError
from ...kv_cache.disk.direct_file import DirectFile, aligned
from ...kv_cache.disk.disk_tier import DiskTier
from ...kv_cache.disk.requests import BLOCK, Requests
from ...kv_cache.disk.speed import SEQUENTIAL, DiskSpeed, fill, measure
from ...kv_cache.pool import HostPool
from ...model_runner.attention import attend
from ...transfer.disk import DiskLink
from ...utils.allocator import give_back
from ..core.report import Column, Report, Row

CPU = torch.device("cpu")
SINKS, RECENT = 4, 64
"""Numbers of resident tokens."""

WARM_UP = 0.4
"""Fraction of the steps that warm up the host memory and are not counted."""

SPEED_BYTES = 1 << 30
"""Size of the file for measuring the speed of the disk."""


@dataclass(frozen=True)
class DiskCase:
    """Shape and selection parameters of a benchmark.

    Attributes:
        layers: Number of layers.
        kv_heads: Number of KV heads.
        head_dim: Head dimension.
        context: Context length in tokens.
        group: Query heads per KV head.
        fraction: Fraction of the context selected per step, layer and KV head.
        neighbours: Mean length of a drawn run in tokens.
        stay: Fraction of the drawn runs that the next step selects again.
        dtype: Data type of the KV.
    """

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    group: int = 4
    fraction: float = 0.05
    neighbours: float = 2.0
    stay: float = 0.8
    dtype: torch.dtype = torch.bfloat16

    @property
    def geometry(self) -> ModelGeometry:
        """Model geometry; only the KV shape is relevant."""
        heads = self.kv_heads * self.group
        return ModelGeometry(
            self.layers, heads * self.head_dim, heads, self.kv_heads, self.head_dim, vocab=2,
            scales=(self.head_dim**-0.5,) * self.layers, windows=(None,) * self.layers, max_positions=1 << 30,
            absolute_positions=False, default_alpha=4.0,
        )  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Size of the KV of the context in bytes."""
        return self.geometry.kv_bytes(self.context, self.dtype)


Step = list[torch.Tensor]
"""Selected tokens of each layer, int64 `[Hkv, n]`."""


def recorded_case(recording: Recording, head_dim: int) -> tuple[DiskCase, list[Step]]:
    """Return the case of a recording (of a model with `head_dim`) and its steps, without resident tokens."""
    info = recording.info
    steps = [[torch.from_numpy(one).long() for one in step] for _, step in recording.steps()]
    if len(steps) < 5:
        raise InputError(f"{str(recording.folder)!r} has {len(steps)} steps: record 5 new tokens or more")
    context = info.prompt_tokens // CHUNK * CHUNK
    kept = [[_within(one, context) for one in step] for step in steps]
    share = float(np.mean([one.shape[1] for step in kept for one in step])) / context
    return DiskCase(len(info.selecting), info.kv_heads, head_dim, context, fraction=share), kept


def _within(tokens: torch.Tensor, context: int) -> torch.Tensor:
    """Return the tokens `[Hkv, n]` that are candidates of a context, truncated to the shortest head."""
    own = [row[(row >= SINKS) & (row < context - RECENT)] for row in tokens]
    least = min(len(row) for row in own)
    return torch.stack([row[:least] for row in own])


def drawn_steps(case: DiskCase, steps: int, seed: int = 0) -> Iterator[Step]:
    """Draw the selections of a case step by step."""
    generator = np.random.default_rng(seed)
    first, stop = SINKS, case.context - RECENT
    count = max(1, round(case.fraction * (stop - first)))
    lists = case.layers * case.kv_heads
    held = [_runs(generator, case, count, first, stop, np.empty(0, np.int64)) for _ in range(lists)]
    for _ in range(steps):
        rows = [torch.from_numpy(own) for own in held]
        yield [torch.stack(rows[i : i + case.kv_heads]) for i in range(0, lists, case.kv_heads)]
        for i, own in enumerate(held):
            breaks = np.flatnonzero(np.diff(own, prepend=own[0] - 2) > 1)
            stays = generator.random(len(breaks)) < case.stay
            held[i] = _runs(generator, case, count, first, stop, own[np.repeat(stays, np.diff(breaks, append=count))])


def _runs(
    generator: np.random.Generator, case: DiskCase, count: int, first: int, stop: int, kept: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Draw `count` sorted tokens in [first, stop): the tokens `kept`, and runs of new ones."""
    chosen = kept
    while len(chosen) < count:
        runs = max(1, int((count - len(chosen)) / case.neighbours))
        starts = generator.integers(first, stop, runs)
        sizes = generator.geometric(1 / case.neighbours, runs)
        new = np.repeat(starts, sizes) + np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        fresh = np.setdiff1d(new[new < stop], chosen)
        chosen = np.union1d(chosen, generator.permutation(fresh)[: count - len(chosen)] if len(fresh) else fresh)
    return chosen


class DiskContext:
    """The context of a case in a pool on disk, with a host memory limit of `host_bytes`."""

    def __init__(self, case: DiskCase, folder: Path, host_bytes: int, speed: DiskSpeed, scratch: torch.Tensor) -> None:
        """Fill the context. `scratch` is the target of `read_in_order` and `read_alone`."""
        self.case, geometry = case, case.geometry
        # Includes room for the new tokens of the steps and for unused blocks of each slab.
        room = geometry.kv_bytes(case.context + case.context // 64 + 4096, case.dtype)
        self.pool = HostPool(geometry, case.dtype, host_bytes, disk=DiskTier(folder, room, speed))
        self.link = DiskLink(self.pool, geometry, CPU)
        assert self.pool.file is not None
        self.file = self.pool.file
        self.blocks = self.pool.new_block_table(case.context)
        self._fill()
        give_back()  # as the runner does after a prompt
        self.link.storage.open(self.blocks, SINKS, RECENT)
        self._q = torch.randn(geometry.heads, case.head_dim).to(case.dtype)
        self._scratch, self._read_from = scratch, 0
        self._scales = geometry.scales
        self._row = torch.randn(case.kv_heads, 1, case.head_dim).to(case.dtype)

    def _fill(self, at_once: int = 4096) -> None:
        """Fill the context with repeated random KV."""
        shape = (2, self.case.kv_heads, at_once, self.case.head_dim)
        k, v = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.case.dtype)
        for layer in range(self.case.layers):
            for start in range(0, self.case.context, at_once):
                count = min(at_once, self.case.context - start)
                self.pool.write(self.blocks, layer, start, k[:, :count], v[:, :count])
        self.pool.commit(self.blocks, self.case.context)

    @torch.inference_mode()
    def step(self, selected: Step | None) -> None:
        """Decode one token: each layer attends to its selection (None: to all tokens)."""
        position = self.blocks.length
        self.pool.reserve(self.blocks, position + 1)
        visible = Visible.of(position + 1, sinks=SINKS, recent=RECENT, window=None)
        fetched = self._fetch(0, visible, selected)
        for layer in range(self.case.layers):
            self.link.storage.append(self.blocks, layer, position, self._row, self._row)
            upcoming = self._fetch(layer + 1, visible, selected)
            attend(self._q, fetched.wait(), self._scales[layer])
            fetched = upcoming
        self.pool.commit(self.blocks, position + 1)

    def wanted_bytes(self, selected: Step | None) -> int:
        """Return the size of the KV that a step attends to, without resident tokens."""
        if selected is None:
            return self.case.kv_bytes
        return sum(one.numel() for one in selected) * self.file.places.pair_bytes

    def read_in_order(self, size: int) -> float:
        """Return the time in seconds to read `size` bytes of the file sequentially in concurrent requests of 1 MiB."""
        count = max(1, min(size, self.case.kv_bytes) // SEQUENTIAL)
        size = max(BLOCK, min(size // count, SEQUENTIAL) // BLOCK * BLOCK)
        self._read_from = (self._read_from + count * size) % max(1, self.case.kv_bytes - count * size + 1)
        began = time.perf_counter()
        for first in range(0, count, 64):
            at = np.arange(min(64, count - first), dtype=np.int64) * size
            offset = self._read_from // BLOCK * BLOCK + first * size + at
            self.file.file.read(Requests(offset, np.full(len(at), size, np.int64), at), self._scratch)
        return time.perf_counter() - began

    def read_alone(self, requests: int, size: int) -> float:
        """Return the time in seconds of `requests` scattered reads of the file, `size` bytes in total.

        Requests cover whole disk blocks. As many as fit into the scratch buffer are issued at once.
        """
        blocks, larger = divmod(size // BLOCK, max(1, requests))
        sizes = (np.full(requests, blocks, np.int64) + (np.arange(requests) < larger)) * BLOCK
        end = self.case.kv_bytes // BLOCK - blocks - 1
        offsets = np.random.default_rng(requests).integers(0, max(1, end), requests) * BLOCK
        stops = np.cumsum(sizes)
        done, began = 0, time.perf_counter()
        while done < requests:
            before = stops[done] - sizes[done]
            own = slice(done, max(done + 1, int(np.searchsorted(stops, before + len(self._scratch), side="right"))))
            at = stops[own] - sizes[own] - before
            self.file.file.read(Requests(offsets[own], sizes[own], at), self._scratch)
            done = own.stop
        return time.perf_counter() - began

    def _fetch(self, layer: int, visible: Visible, selected: Step | None) -> Any:
        if layer == self.case.layers:
            return None
        chosen = None if selected is None else Selection(selected[layer])
        return self.link.rows.fetch(self.blocks, layer, visible, chosen)


def disk_speeds(folder: Path) -> tuple[list[Row], DiskSpeed]:
    """Measure scattered and sequential reads of several sizes. Returns the rows and the fitted speed model."""
    file = DirectFile(folder)
    try:
        fill(file, SPEED_BYTES)
        found = [
            measure(file, SPEED_BYTES, block, random=random)
            for block in (BLOCK, 4 * BLOCK, 16 * BLOCK, SEQUENTIAL)
            for random in (True, False)
        ]
    finally:
        file.close()
    rows = [
        {"size": one.size, "order": "scattered" if one.random else "in order", "direct": file.direct,
         "requests_per_second": one.requests_per_second, "mb_per_second": one.bytes_per_second / 1e6}
        for one in found
    ]  # fmt: skip
    byte = 1 / found[-1].bytes_per_second
    return rows, DiskSpeed(max(0.0, 1 / found[0].requests_per_second - BLOCK * byte), byte)


def measure_case(
    case: DiskCase, steps: Sequence[Step], folder: Path, host_shares: Sequence[float], speed: DiskSpeed, full_steps: int
) -> list[Row]:
    """Measure steps under full attention with the largest host memory, then sparse steps with each host memory."""
    small = replace(case, layers=1, context=4096)
    _measured(
        small, [None, *drawn_steps(small, 1)], folder, 4.0, speed, "libraries are loaded, memory is counted after"
    )
    rows = [_measured(case, [None] * full_steps, folder, max(host_shares), speed, "full")]
    rows += [_measured(case, steps, folder, share, speed, "selected") for share in host_shares]
    for row in rows:
        row["times_full"] = rows[0]["step_ms"] / row["step_ms"]
    return rows


def _measured(
    case: DiskCase, steps: Sequence[Step | None], folder: Path, share: float, speed: DiskSpeed, what: str
) -> Row:
    scratch = aligned(64 * SEQUENTIAL).fill_(1)  # part of the benchmark; resident from here on
    before = _reset_peak()
    context = DiskContext(case, folder, int(share * case.kv_bytes), speed, scratch)
    file, skipped = context.file, int(len(steps) * WARM_UP)
    seconds: list[float] = []
    cpu: list[float] = []
    ordered: list[float] = []
    alone: list[float] = []
    for i, selected in enumerate(steps):
        if i == skipped:
            wanted, cached, requests, size = file.use.wanted, file.use.cached, file.use.requests, file.use.bytes_read
        size_asked, before_step = context.wanted_bytes(selected), replace(file.use)
        began, worked = time.perf_counter(), time.process_time()
        context.step(selected)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
        own = file.use.since(before_step)
        ordered.append(context.read_in_order(size_asked))
        alone.append(context.read_alone(own.requests, own.bytes_read))
    counted = len(steps) - skipped
    read = (file.use.bytes_read - size) / counted
    asked = float(np.mean([context.wanted_bytes(selected) for selected in steps[skipped:]]))
    return {
        "what": what,
        "context": case.context,
        "kv_bytes": case.kv_bytes,
        "host_bytes": int(share * case.kv_bytes),
        "host_share": share,
        "rows_kept": file.shares.slots * file.places.pair_bytes / case.kv_bytes,
        "wanted_bytes": asked,
        "hit_rate": (file.use.cached - cached) / max(1, file.use.wanted - wanted),
        "read_bytes": read,
        "requests": (file.use.requests - requests) / counted,
        "step_ms": 1e3 * float(np.median(seconds[skipped:])),
        "cpu_ms": 1e3 * float(np.median(cpu[skipped:])),
        "wanted_ms": 1e3 * float(np.median(ordered[skipped:])),
        "over_wanted": float(np.median(np.divide(seconds[skipped:], ordered[skipped:]))),
        "alone_ms": 1e3 * float(np.median(alone[skipped:])),
        "over_alone": float(np.median(np.divide(seconds[skipped:], alone[skipped:]))),
        "read_ms": 1e3 * speed.seconds(round((file.use.requests - requests) / counted), round(read)),
        "over_limit_mb": (_peak() - before) / 1e6 - share * case.kv_bytes / 1e6,
    }


def _peak() -> int:
    """Return the peak resident memory since `_reset_peak` in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def _reset_peak() -> int:
    """Release free memory, reset the peak, and return the resident memory in bytes."""
    gc.collect()
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


SPEEDS = (
    Column("bytes a request", "size", ",d"),
    Column("order", "order"),
    Column("requests a second", "requests_per_second", ",.0f"),
    Column("MB a second", "mb_per_second", ",.0f"),
)

STEPS = (
    Column("context", "context", ",d"),
    Column("attended", "what"),
    Column("host memory, of KV", "host_share", ".0%"),
    Column("rows kept, of KV", "rows_kept", ".1%"),
    Column("wanted MB a step", "mb_wanted", ",.1f"),
    Column("from memory", "hit_rate", ".1%"),
    Column("read MB", "mb_read", ",.1f"),
    Column("requests", "requests", ",.0f"),
    Column("step ms", "step_ms", ",.1f"),
    Column("CPU ms", "cpu_ms", ",.1f"),
    Column("wanted bytes in order ms", "wanted_ms", ",.1f"),
    Column("step over that", "over_wanted", ".2f"),
    Column("what it read, alone ms", "alone_ms", ",.1f"),
    Column("step over that", "over_alone", ".2f"),
    Column("the same by the disk's table ms", "read_ms", ",.1f"),
    Column("faster than full", "times_full", ".1f"),
    Column("peak over limit MB", "over_limit_mb", ",.0f"),
)

NOTES = (
    "A step is its reads and its attention, nothing else of a model. After each step as many bytes as it wanted are",
    "read in order from the same file, and then as many requests as it made, together of as many bytes, scattered over",
    "the file and all at once: medians of all three, and of ratios. CPU ms: of all threads.",
    "Peak: of resident memory, less what was resident before, less the limit.",
)


def report(about: dict[str, Any], speeds: list[Row], rows: list[Row]) -> list[Report]:
    """Return the reports of the disk and of the steps."""
    for row in rows:
        row["mb_wanted"], row["mb_read"] = row["wanted_bytes"] / 1e6, row["read_bytes"] / 1e6
    return [
        Report("disk_speed", "The disk by itself", about, SPEEDS, speeds),
        Report("disk_steps", "Steps of a context on disk", about, STEPS, rows, NOTES),
    ]
