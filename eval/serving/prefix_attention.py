"""What sharing a prefix saves in the attention of a decode step: segments against one sequence after the other, on the
same memory, one after another; the least of each. Time is CPU time of this process on one thread.

`offload-rt eval sharing` writes these tables and those of `poisson_load`, `workload` and `fragmentation`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...core import BlockTable, ModelGeometry
from ...errors import ConfigError
from ...kernels.dispatch import attend_runs
from ...kernels.segments import Run
from ...kv_cache.pool import HostPool
from ...model_runner.attention import attend
from ...model_runner.shared_prefix import SharedPrefixes, Sharing
from ...utils.config_fields import check_choice
from ..core.report import Column, Report, Row
from .fragmentation import draw_fragmentation, fragmentation_report
from .poisson_load import SMALL, Scale, poisson_load_report, questions_report
from .prefix_workload import steps_report, workload_report

HEADS, HEAD_DIM = 8, 128
LEAST_SECONDS = 0.4
"""CPU time that each comparison goes on for, at the least."""

SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Batch:
    """Sequences in one pool that share chunks as their prompts do, in tree order, and a query of each `[H, B, d]`."""

    pool: HostPool
    block_tables: list[BlockTable]
    q: torch.Tensor

    @classmethod
    def of(cls, levels: Sequence[tuple[int, int]], suffix: int) -> Batch:
        """levels: (sequences that branch off each one above, tokens they share), from the root on; each sequence of
        the last level has `suffix` tokens of its own. One layer, 8 heads of 128 numbers, float32, random rows."""
        total, width = 0, 1
        for count, tokens in levels:
            width *= count
            total += width * tokens
        total += width * (suffix + 64)
        geometry = ModelGeometry(1, HEADS * HEAD_DIM, HEADS, HEADS, HEAD_DIM, 2, (SCALE,), (None,), 1 << 20, False, 5.0)
        pool = HostPool(geometry, torch.float32, geometry.kv_bytes(total + 128, torch.float32))
        block_tables = [BlockTable()]
        for count, tokens in (*levels, (1, suffix)):
            block_tables = [pool.fork(blocks) for blocks in block_tables for _ in range(count)]
            for blocks in block_tables:
                grow(pool, blocks, tokens)
        block_tables = [block_tables[i] for i in Sharing.of(block_tables, 1).order]
        generator = torch.Generator().manual_seed(0)
        return cls(pool, block_tables, torch.randn(HEADS, len(block_tables), HEAD_DIM, generator=generator))

    def one_by_one(self) -> torch.Tensor:
        """Each sequence reads all of its rows: `[H, B, d]`."""
        outs = [
            attend(self.q[:, b], self.pool.runs(blocks, 0, range(blocks.length)), SCALE)[0]
            for b, blocks in enumerate(self.block_tables)
        ]
        return torch.stack(outs, dim=1)

    def with_segments(self, sharing: Sharing) -> torch.Tensor:
        """Shared rows are read once: `[H, B, d]`. Without a segment it is `one_by_one`."""
        if not sharing.segments:
            return self.one_by_one()
        wanted = [(s.first, s.stop, s.tokens) for s in sharing.segments]
        wanted += [(b, b + 1, range(sharing.private[b], blocks.length)) for b, blocks in enumerate(self.block_tables)]
        runs = [
            Run(first, stop, part.k, part.v)
            for first, stop, tokens in wanted
            for part in self.pool.runs(self.block_tables[first], 0, tokens)
        ]
        return attend_runs(self.q, runs, SCALE)[0]

    @property
    def floor_bytes(self) -> tuple[int, int]:
        """Bytes that have to be read: by one sequence after the other, and with every shared chunk once."""
        apart = sum(blocks.length for blocks in self.block_tables)
        once = len({chunk for blocks in self.block_tables for chunk in blocks.chunks}) * 64
        return apart * 8 * HEADS * HEAD_DIM, once * 8 * HEADS * HEAD_DIM


def grow(pool: HostPool, blocks: BlockTable, tokens: int) -> None:
    """Adds `tokens` random tokens to a block table."""
    if not tokens:
        return
    start = blocks.length
    pool.reserve(blocks, start + tokens)
    for run in pool.runs(blocks, 0, range(start, start + tokens)):
        run.k.normal_()
        run.v.normal_()
    pool.commit(blocks, start + tokens)


def least(repeats: int, *rivals: Callable[[], object]) -> list[float]:
    """Milliseconds of CPU time, the least of many runs of each: `repeats`, or as many as fit `LEAST_SECONDS` if more.
    The order is turned round every time, so that nobody always finds what the same other one left in the caches."""
    best = [float("inf")] * len(rivals)
    order, started, repeat = list(range(len(rivals))), time.process_time(), 0
    while repeat < repeats or time.process_time() - started < LEAST_SECONDS:
        for i in order:
            began = time.process_time()
            rivals[i]()
            best[i] = min(best[i], time.process_time() - began)
        order.reverse()
        repeat += 1
    return [1e3 * seconds for seconds in best]


def attention_rows(scale: Scale) -> list[Row]:
    """Batch x prefix x suffix."""
    rows: list[Row] = []
    for size in scale.batches:
        for prefix in scale.prefixes:
            for suffix in scale.suffixes:
                batch = Batch.of([(1, prefix), (size, 0)] if prefix else [(size, 0)], suffix)
                prefixes = SharedPrefixes(8 * HEADS * HEAD_DIM)

                def shared(batch: Batch = batch, prefixes: SharedPrefixes = prefixes) -> torch.Tensor:
                    return batch.with_segments(prefixes.of(batch.block_tables))

                torch.testing.assert_close(shared(), batch.one_by_one(), rtol=0, atol=1e-4)
                apart, together = least(scale.repeats, batch.one_by_one, shared)
                floors = batch.floor_bytes
                rows.append(
                    {
                        "batch": size,
                        "prefix": prefix,
                        "suffix": suffix,
                        "segments": len(prefixes.of(batch.block_tables).segments),
                        "apart_ms": apart,
                        "segments_ms": together,
                        "gain": apart / together,
                        "bytes_gain": floors[0] / floors[1],
                    }
                )
    return rows


def level_rows(scale: Scale) -> list[Row]:
    """Hydragen §4.4: a few-shot prompt for all, a problem for some, samples of each: sharing found on no, one and both
    levels."""
    rows: list[Row] = []
    for few_shot, problem in ((1024, 256), (1024, 512), (2048, 512)):
        batch = Batch.of([(1, few_shot), (4, problem), (8, 0)], 64)
        both = Sharing.of(batch.block_tables, 8 * HEADS * HEAD_DIM)
        top = tuple(s for s in both.segments if s.stop - s.first == len(batch.block_tables))
        one = replace(both, segments=top, private=(top[0].tokens.stop,) * len(batch.block_tables))
        times = least(
            scale.repeats,
            batch.one_by_one,
            lambda batch=batch, one=one: batch.with_segments(one),  # type: ignore[misc]
            lambda batch=batch, both=both: batch.with_segments(both),  # type: ignore[misc]
        )
        rows.append(
            {"few_shot": few_shot, "problem": problem, "none_ms": times[0], "one_ms": times[1], "both_ms": times[2]}
            | {"one_gain": times[0] / times[1], "both_gain": times[0] / times[2], "saved": 1 - times[2] / times[1]}
        )
    return rows


def attention_report(scale: Scale) -> Report:
    """The table of issue E."""
    columns = (
        Column("batch", "batch"),
        Column("prefix", "prefix", ",d"),
        Column("suffix", "suffix", ",d"),
        Column("segments", "segments"),
        Column("one by one, ms", "apart_ms", ".2f"),
        Column("segments, ms", "segments_ms", ".2f"),
        Column("gain", "gain", ".2f"),
        Column("gain in bytes", "bytes_gain", ".2f"),
    )
    notes = (
        "Gain: times over times. Gain in bytes: what one sequence after the other reads over what has to be read, the "
        "most that any kernel could gain where reading is all there is. Both sides read the same pool; nothing is "
        "stored twice. Where no segment pays, both sides run the same code, and the gain is the measurement's noise.",
    )
    about = about_machine(scale) | {"layer": f"{HEADS} heads of {HEAD_DIM}, float32, one KV head a query head"}
    title = "Attention of a decode step: shared prefixes as segments"
    return Report("sharing_attention", title, about, columns, attention_rows(scale), notes)


def level_report(scale: Scale) -> Report:
    """Two levels of sharing against one."""
    columns = (
        Column("few-shot prompt", "few_shot", ",d"),
        Column("problem", "problem", ",d"),
        Column("no level, ms", "none_ms", ".2f"),
        Column("one level, ms", "one_ms", ".2f"),
        Column("two levels, ms", "both_ms", ".2f"),
        Column("gain, one", "one_gain", ".2f"),
        Column("gain, two", "both_gain", ".2f"),
        Column("two against one", "saved", ".0%"),
    )
    about = about_machine(scale) | {"batch": "4 problems x 8 samples, 64 tokens of their own each"}
    title = "Attention with two levels of sharing (Hydragen, section 4.4)"
    return Report("sharing_levels", title, about, columns, level_rows(scale))


def about_machine(scale: Scale) -> dict[str, Any]:
    """What holds for all tables."""
    least_of = f"the least of {scale.repeats} repeats or {LEAST_SECONDS} s of repeats, whichever is more"
    return {"clock": f"CPU time, one thread, {least_of}, one after another"}


REPORTS: dict[str, Callable[[Scale], Report]] = {
    "attention": attention_report,
    "levels": level_report,
    "steps": steps_report,
    "workload": workload_report,
    "fragmentation": fragmentation_report,
    "questions": questions_report,
    "poisson": poisson_load_report,
}


def run_sharing(names: Sequence[str], repeats: int, out: Path, *, small: bool = False) -> Iterator[Report]:
    """Measures the tables `names` (of REPORTS) on one thread; each is written to `out` as soon as it is there, and
    yielded. `small` takes tiny sizes, which measure nothing. Raises ConfigError for an unknown table or no repeats."""
    if repeats < 1:
        raise ConfigError(f"--repeats {repeats} must be at least 1")
    for name in names:
        check_choice("table", name, REPORTS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            report = REPORTS[name](SMALL if small else replace(Scale(), repeats=repeats))
            report.write(out)
            if name == "fragmentation":
                draw_fragmentation(report.rows, out / "sharing_waste_by_kind.png")
            yield report
    finally:
        torch.set_num_threads(threads)
