"""What KV memory is wasted on while requests of unknown length are served (PagedAttention, Figure 2): one contiguous
reservation a request, as servers made before paging, against this pool. Bookkeeping only; no model runs."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ...core import CHUNK, BlockTable, ModelGeometry
from ...errors import PoolFullError
from ...kv_cache.pool import HostPool
from ..core.figures import COLOURS, picture
from ..core.report import Column, Report, Row
from .poisson_load import Scale

LONGEST = 2048
"""Tokens a request may have, prompt and answer together."""

KINDS = {
    "used": "token states",
    "reserved": "reserved for later",
    "internal": "never used by its owner",
    "external": "between owners, or free",
}


@dataclass
class Job:
    """A request: tokens of its prompt, of prompt and answer together, and how many it holds now."""

    prompt: int
    total: int
    held: int = 0


class Memory(Protocol):
    """One way to give slots to requests."""

    @property
    def running(self) -> Sequence[Job]:
        """Who has room, in order of admission or of place."""
        ...

    def admit(self, job: Job) -> bool:
        """Takes room for a request, if there is room now."""
        ...

    def grow(self) -> list[Job]:
        """One more token for each of `running`; returns those that had to give way and start again."""
        ...

    def end(self, job: Job) -> None:
        """Gives back what a request has."""
        ...

    def slots_of(self, job: Job) -> int:
        """Token slots that nobody else can have."""
        ...


class Contiguous:
    """A contiguous reservation for each request, made when it is admitted, in the first gap that it fits. `reserve`:
    for the longest there can be, for the answer rounded up to a power of two, or for exactly what it will need, which
    no server knows."""

    def __init__(self, slots: int, reserve: str) -> None:
        self._slots, self._reserve = slots, reserve
        self._taken: list[tuple[int, int, Job]] = []

    @property
    def running(self) -> list[Job]:
        """Who has a reservation, by its place in memory."""
        return [job for _, _, job in self._taken]

    def _size(self, job: Job) -> int:
        answer = job.total - job.prompt
        rounded = min(LONGEST, job.prompt + (1 << (answer - 1).bit_length()))
        return {"longest": LONGEST, "power of two": rounded, "exact": job.total}[self._reserve]

    def admit(self, job: Job) -> bool:
        """Reserves the first gap that is large enough, if there is one."""
        size, start = self._size(job), 0
        for begin, stop, _ in self._taken:
            if begin - start >= size:
                break
            start = stop
        if start + size > self._slots:
            return False
        bisect.insort(self._taken, (start, start + size, job), key=lambda entry: entry[0])
        job.held = job.prompt
        return True

    def grow(self) -> list[Job]:
        """One more token for each; all have their room, so nobody gives way."""
        for job in self.running:
            job.held += 1
        return []

    def end(self, job: Job) -> None:
        """Frees a request's reservation."""
        self._taken = [entry for entry in self._taken if entry[2] is not job]

    def slots_of(self, job: Job) -> int:
        """Token slots of the reservation."""
        return next(stop - begin for begin, stop, owner in self._taken if owner is job)


class Pool:
    """The host pool under the scheduler's rules: a prompt is admitted where there is a chunk besides for each that
    runs, block tables grow chunk by chunk, and the youngest gives way."""

    def __init__(self, slots: int) -> None:
        geometry = ModelGeometry(1, 1, 1, 1, 1, 2, (1.0,), (None,), LONGEST, False, 5.0)
        self._pool = HostPool(geometry, torch.float32, geometry.kv_bytes(slots, torch.float32))
        self._block_tables: dict[int, BlockTable] = {}
        self.running: list[Job] = []

    def admit(self, job: Job) -> bool:
        """Takes the prompt's chunks, if a chunk for each that runs stays free."""
        try:
            blocks = self._pool.new_block_table(job.prompt + 1)
        except PoolFullError:
            return False
        try:
            self._pool.check_spare(len(self.running))
        except PoolFullError:
            self._pool.release(blocks)
            return False
        self._block_tables[id(job)] = blocks
        self.running.append(job)
        job.held = job.prompt
        self._pool.commit(blocks, job.held)
        return True

    def grow(self) -> list[Job]:
        """One more token for each; where no chunk is free the youngest gives way."""
        gone: list[Job] = []
        for job in list(self.running):
            while job in self.running:
                try:
                    self._pool.reserve(self._block_tables[id(job)], job.held + 1)
                    job.held += 1
                    self._pool.commit(self._block_tables[id(job)], job.held)
                    break
                except PoolFullError:
                    gone.append(self.running[-1])
                    self.end(gone[-1])
        return gone

    def end(self, job: Job) -> None:
        """Gives a request's chunks back."""
        self._pool.release(self._block_tables.pop(id(job)))
        self.running.remove(job)

    def slots_of(self, job: Job) -> int:
        """Token slots of the request's chunks."""
        return self._block_tables[id(job)].capacity


def jobs(count: int, seed: int) -> list[Job]:
    """Requests with log-normal lengths: prompts of 160 tokens and answers of 340 on average, many short, few long (as
    chats are; PagedAttention's ShareGPT trace has these means)."""
    rng = random.Random(seed)

    def length(mean: float, sigma: float, most: int) -> int:
        drawn = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return max(1, min(most, round(drawn)))

    prompts = [length(160, 1.0, LONGEST // 2) for _ in range(count)]
    return [Job(prompt, prompt + length(340, 0.8, LONGEST - prompt)) for prompt in prompts]


def wasted(memory: Memory, waiting: Sequence[Job], slots: int) -> Row:
    """Serves all of `waiting`, first come first served, a token of each a step; shares of the memory by kind, averaged
    over the steps in which somebody waited for room, and how many ran."""
    queue, sums, steps, ran, again = deque(waiting), Counter[str](), 0, 0, 0
    while queue:
        while queue and memory.admit(queue[0]):
            queue.popleft()
        if queue:
            steps, ran = steps + 1, ran + len(memory.running)
            sums.update(_kinds(memory, slots))
        gone = memory.grow()
        queue.extendleft(gone)
        again += len(gone)
        for job in [job for job in memory.running if job.held >= job.total]:
            memory.end(job)
    shares = {kind: sums[kind] / (slots * max(1, steps)) for kind in KINDS}
    return shares | {"batch": ran / max(1, steps), "again": again}


def _kinds(memory: Memory, slots: int) -> dict[str, int]:
    held = {id(job): memory.slots_of(job) for job in memory.running}
    used = sum(job.held for job in memory.running)
    later = sum(min(held[id(job)], job.total) - job.held for job in memory.running)
    taken = sum(held.values())
    return {"used": used, "reserved": later, "internal": taken - used - later, "external": slots - taken}


def fragmentation_report(scale: Scale) -> Report:
    """Shares of KV memory by kind for each way to reserve."""
    slots, count = scale.slots, scale.slots // 64
    ways: dict[str, Memory] = {
        f"contiguous, {name}": Contiguous(slots, name) for name in ("longest", "power of two", "exact")
    }
    ways[f"this pool, chunks of {CHUNK}"] = Pool(slots)
    rows: list[Row] = [{"memory": name, **wasted(memory, jobs(count, 0), slots)} for name, memory in ways.items()]
    columns = (
        Column("memory", "memory"),
        *(Column(label, kind, ".1%") for kind, label in KINDS.items()),
        Column("requests at once", "batch", ".1f"),
        Column("started again", "again", ",d"),
    )
    about = {
        "memory": f"{slots:,} token slots",
        "requests": f"{count:,} of log-normal lengths, on average 160 tokens and 340 of answer, at most {LONGEST:,}",
        "counted": "every step in which a request waits for room",
    }
    notes = (
        "Contiguous memory is taken for the whole request in advance (the longest there can be; the answer rounded up "
        "to a power of two; exactly, which needs to know the answer). Nothing is shared here. 'Started again' are "
        "preemptions.",
    )
    return Report("sharing_waste", "What KV memory is spent on (PagedAttention, Figure 2)", about, columns, rows, notes)


def draw_fragmentation(rows: Sequence[Row], path: Path) -> None:
    """Stacked bars of the shares, one bar a way to reserve."""
    names = [row["memory"] for row in rows]
    data = {label: [row[kind] for row in rows] for kind, label in KINDS.items()}
    with picture(path, "KV memory while requests wait for room", {"memory": names, "shares": data}) as [axis]:
        below = [0.0] * len(rows)
        for (label, shares), colour in zip(data.items(), COLOURS, strict=False):
            axis.bar(names, shares, bottom=below, label=label, color=colour, width=0.6)
            below = [a + b for a, b in zip(below, shares, strict=True)]
        axis.set(ylabel="share of the memory", ylim=(0, 1.4), yticks=[0, 0.25, 0.5, 0.75, 1])
        axis.tick_params("x", labelsize=6)
