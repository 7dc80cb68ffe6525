"""Time to first token (TTFT) of the next turn of a session: recomputed, from host memory, from disk (warm and cold).

Also measures a reader throttled to a fixed bandwidth, with and without the read buffer (CachedAttention §3.2.1,
Figures 14 and 19).
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core import CHUNK
from ...llm import LLM
from ...outputs import TokenOutput
from ...sampling_params import SamplingParams
from ...storage.chunk_file import FileChunk
from ...storage.disk_store import DiskStore
from ..core.report import Column, Report, Row

TURN = 64
"""Number of tokens of the new turn."""
LONG_TURN = 512
"""Tokens of the turn in the read buffer comparison; computing them takes about as long as loading the history."""
EARLY = 0.5
"""Seconds between the prefetch request and the start of the turn."""
SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
"""Generates two tokens, so that the work at the end of a turn (saving the history) is not timed."""

COLUMNS = (
    Column("model", "model"), Column("history", "history", ",d"), Column("from", "source"),
    Column("TTFT s", "seconds", ".3f"), Column("spread s", "spread", ".3f"), Column("times faster", "speedup", ".1f"),
    Column("stalled s", "stall", ".3f"), Column("read buffer", "ahead"),
)  # fmt: skip


@dataclass(frozen=True)
class TimedModel:
    """A model to time. `make` creates an `LLM` with an empty pool."""

    name: str
    make: Callable[[], LLM]
    histories: Sequence[int]


def shape_model(layers: int = 12, hidden: int = 512, heads: int = 8, kv_heads: int = 4) -> Any:
    """Create a Llama with random weights; the time does not depend on their values."""
    from transformers import LlamaConfig
    from transformers.models.auto import AutoModelForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=1 << 16,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def fresh(timed: TimedModel, history: int) -> LLM:
    """Create a warmed-up runtime without the history."""
    # Touch the pool memory for `history` tokens and a turn, as for pinned memory. On a busy machine, the first touch
    # of a page can take longer than reading it from disk.
    llm = timed.make()
    list(llm.stream(tokens(TURN, "warm up"), SHORT))
    pool = llm.runner.pool
    count = history + LONG_TURN + CHUNK
    blocks = pool.new_block_table(count)
    for layer in range(llm.geometry.layers):
        for part in pool.stored(blocks, layer, range(count)):
            part.k.zero_()
            part.v.zero_()
    pool.release(blocks)
    return llm


def tokens(count: int, name: str) -> list[int]:
    """Draw uniform token ids, seeded by `name`."""
    # Different names give different tokens, so that a turn is not found in the prefix cache.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found: list[int] = torch.randint(1, 2048, (count,), generator=generator).tolist()
    return found


def first_token(ask: Callable[[], Iterator[TokenOutput]]) -> float:
    """Return the seconds from the request to the first event."""
    gc.collect()  # release the memory of closed objects outside the timed section
    began = time.perf_counter()
    events = ask()
    next(events)
    seconds = time.perf_counter() - began
    list(events)
    return seconds


def begin(timed: TimedModel, history: int, store: Path, turn: int) -> tuple[LLM, float]:
    """Store a session "s" of `history` tokens.

    Returns a runtime with the KV of the session in host memory, and the TTFT of history and turn as a plain prompt.
    """
    llm, prompt = fresh(timed, history), tokens(history, "history")
    seconds = first_token(lambda: llm.stream([*prompt, *tokens(turn, "recomputed")], SHORT))
    session = llm.session("s", store)
    list(session.send(prompt, SHORT))
    session.close()
    return llm, seconds


def measure(timed: TimedModel, repeats: int, folder: Path) -> list[Row]:
    """Measure every history from every source, `repeats` times, alternating between sources."""
    rows = []
    for history in timed.histories:
        store = folder / f"{history}"  # one store per history, because stores share the blocks of equal text
        llm, recomputed = begin(timed, history, store, TURN)
        times: dict[str, list[float]] = {"recomputed": [recomputed], "host": [], "disk warm": [], "disk cold": []}
        stalls: dict[str, list[float]] = {}
        for i in range(repeats):
            for source in ("host", "disk warm", "disk cold"):
                if source != "host":
                    llm = fresh(timed, history)
                if source == "disk warm":
                    fill_cache(store)
                if source == "disk cold":
                    drop_cache(store)
                seconds, stalled = timed_fork(llm, store, f"{source} {i}")
                times[source].append(seconds)
                stalls.setdefault(source, []).append(stalled)
        for source, found in times.items():
            rows.append(row(timed, history, source, found, recomputed, stalls.get(source, [0.0])))
    return rows


def timed_fork(
    llm: LLM, store: Path, name: str, bandwidth: float | None = None, ahead: int | None = None, turn: int = TURN
) -> tuple[float, float]:
    """Time a turn of a fork of the session; the session itself is unchanged.

    With `ahead`, a prefetch starts `EARLY` seconds before the turn, with a read buffer of `ahead` layers.

    Returns:
        Time to the first token and the part of it spent waiting for reads, in seconds.
    """
    session = llm.session("s", store)
    fork = session.fork(name)
    if bandwidth is not None:
        disk = fork.context.storage
        assert isinstance(disk, DiskStore)
        throttle(disk, bandwidth)
    if ahead is not None:
        fork.context.read_buffer = lambda loaded_bytes, new_tokens: ahead  # type: ignore[method-assign]
        fork.prefetch()
        time.sleep(EARLY)
    before = fork.host.stats.stall_seconds
    seconds = first_token(lambda: fork.send(tokens(turn, name), SHORT))
    stalled = fork.host.stats.stall_seconds - before
    session.close()
    fork.discard()
    return seconds, stalled


def throttle(disk: DiskStore, bandwidth: float) -> None:
    """Limit the reads of all stores to `bandwidth` bytes per second in total over all threads."""
    real, alone = FileChunk.read_layer, threading.Lock()

    def slow(chunk: FileChunk, layer: int, into: memoryview) -> bool:
        with alone:
            until = time.perf_counter() + len(into) / bandwidth
            whole = real(chunk, layer, into)
            time.sleep(max(0.0, until - time.perf_counter()))
        return whole

    FileChunk.read_layer = slow  # type: ignore[assignment,method-assign]


def buffers(timed: TimedModel, history: int, folder: Path, bandwidths: Sequence[float]) -> list[Row]:
    """Measure the stall at several bandwidths with read buffers of zero, one, half of all, and all layers.

    Without a buffer, a layer is read when it is needed.
    """
    store, found = folder / "buffers", []
    llm, whole = begin(timed, history, store, LONG_TURN)
    for bandwidth in bandwidths:
        for ahead in (0, 1, llm.geometry.layers // 2, llm.geometry.layers):
            runs = [
                timed_fork(fresh(timed, history), store, f"{bandwidth} {ahead} {i}", bandwidth, ahead, LONG_TURN)
                for i in range(3)
            ]
            source = f"disk at {bandwidth / 1e6:g} MB/s, turn of {LONG_TURN}"
            line = row(timed, history, source, [run[0] for run in runs], whole, [run[1] for run in runs])
            found.append(line | {"ahead": str(ahead)})
    return found


def row(timed: TimedModel, history: int, source: str, found: list[float], whole: float, stalls: list[float]) -> Row:
    """Return a row of the table."""
    seconds = statistics.median(found)
    return {
        "model": timed.name, "history": history, "source": source, "seconds": seconds, "samples": found,
        "spread": max(found) - min(found), "speedup": whole / seconds, "stall": statistics.median(stalls),
    }  # fmt: skip


def fill_cache(folder: Path) -> None:
    """Read the files into the page cache."""
    for path in folder.rglob("*.kv"):
        path.read_bytes()


def drop_cache(folder: Path) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk."""
    for path in folder.rglob("*.kv"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def break_even(rows: Sequence[Row]) -> tuple[str, ...]:
    """Describe, per model and source, the history length from which on loading is faster than recomputing.

    Times between the measured lengths are interpolated linearly.
    """
    notes = []
    for model, source in dict.fromkeys((row["model"], row["source"]) for row in rows if row["source"] != "recomputed"):
        here = {
            kind: {row["history"]: row["seconds"] for row in rows if row["model"] == model and row["source"] == kind}
            for kind in ("recomputed", source)
        }
        gains = [(n, here["recomputed"][n] - here[source][n]) for n in sorted(here[source])]
        notes.append(f"- {model}, {source}: {_crossing(gains)}.")
    return tuple(notes)


def _crossing(gains: Sequence[tuple[int, float]]) -> str:
    """Describe the break-even point of `gains`: (history, seconds saved), sorted by history."""
    worse = [i for i, (_, gain) in enumerate(gains) if gain <= 0]
    if not worse:
        return f"quicker at every history tried, from {gains[0][0]:,} tokens on"
    if worse[-1] == len(gains) - 1:
        return f"not quicker at the longest history tried, {gains[-1][0]:,} tokens"
    (left, lost), (right, won) = gains[worse[-1]], gains[worse[-1] + 1]
    return f"quicker from about {left + (right - left) * -lost / (won - lost):,.0f} tokens on"


def run_session_ttft(
    out: Path, histories: Sequence[int], reference: Sequence[int], buffer_history: int, repeats: int
) -> list[Report]:
    """Measure a random shape and the reference model; write resume and read_buffer .json, .csv and .md to `out`.

    Args:
        out: Folder of the results.
        histories: History lengths of the random shape in tokens.
        reference: History lengths of the reference model in tokens.
        buffer_history: History length of the read buffer comparison in tokens.
        repeats: Number of repeats of each source.
    """
    random = shape_model()
    shape = TimedModel(
        "random 12 layers, 8/4 heads of 64", lambda: LLM(random, policy="full", host_memory="3GiB"), histories
    )
    trained = TimedModel("reference", lambda: LLM("reference", policy="full", host_memory="1GiB"), reference)
    about = {"policy": "full", "threads": torch.get_num_threads(), "repeats": f"{repeats}, sources in turn"}
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(trained, repeats, Path(folder) / "reference")
        rows += measure(shape, repeats, Path(folder) / "shape")
        told = about | {
            "turn": f"{TURN} new tokens",
            "recomputed": "history and turn as a plain prompt, once; nothing is saved meanwhile",
            "host": "whole chunks in host memory; what fills none comes from disk",
            "disk warm": "the files were read just before",
            "disk cold": "the files' pages were given back to the kernel (posix_fadvise)",
        }
        title = "Time to first token of a resumed session"
        resumed = Report("resume", title, told, COLUMNS, rows, break_even(rows))
        resumed.write(out)
        rows = buffers(shape, buffer_history, Path(folder) / "shape", (50e6, 200e6, 800e6))
    told = about | {"turn": f"{LONG_TURN} new tokens, the session asked for {EARLY} s before", "repeats": "3"}
    buffered = Report("read_buffer", "Pre-loading with a read buffer, a throttled reader", told, COLUMNS, rows)
    buffered.write(out)
    return [resumed, buffered]
