"""Measure the time to first token (TTFT) of a session's next turn.

The KV of earlier turns is either recomputed, or read from host memory, the page cache (warm) or the disk (cold).
"""

from __future__ import annotations

import gc
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ...core import BLOCK_SIZE
from ...llm import LLM
from ...outputs import TokenOutput
from ...sampling_params import SamplingParams
from ..core.report import Row

TURN = 64
"""Number of tokens of the new turn."""

VOCABULARY = 2048
"""Token ids are drawn from the range below this number."""

SHORT = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
"""Generate two tokens, so that the time to the first token excludes the work at the end of a turn (saving the
history).
"""


def measure(make: Callable[[], LLM], history: int, repeats: int, store: Path) -> list[Row]:
    """Measure the time to the first token of a turn that follows `history` tokens, for each source of the history's KV.

    The sources take turns, and each is measured `repeats` times. Recomputation is measured only once.

    Args:
        make: Creates a runtime with an empty pool.
        store: Folder of the session store. Use a different folder for each history length, because equal texts share
            blocks.
    """
    llm, prompt = fresh(make, history), tokens(history, "history")
    recomputed = first_token(lambda: llm.stream([*prompt, *tokens(TURN, "recomputed")], SHORT))
    session = llm.session("s", store)
    list(session.send(prompt, SHORT))
    session.close()
    times: dict[str, list[float]] = {"recomputed": [recomputed], "host": [], "disk warm": [], "disk cold": []}
    for i in range(repeats):
        for source in ("host", "disk warm", "disk cold"):
            if source != "host":
                llm = fresh(make, history)
                (fill_cache if source == "disk warm" else drop_cache)(store)
            times[source].append(timed_fork(llm, store, f"{source} {i}"))
    medians = {source: statistics.median(found) for source, found in times.items()}
    return [
        {"history": history, "source": source, "seconds": seconds, "samples": times[source],
         "speedup": recomputed / seconds}
        for source, seconds in medians.items()
    ]  # fmt: skip


def fresh(make: Callable[[], LLM], history: int) -> LLM:
    """Create a runtime with an empty pool, and touch the pool memory that `history` tokens will use."""
    # Touch the pool memory for `history` tokens and one turn, as pinning would. On a busy machine, touching a page for
    # the first time can take longer than reading it from disk.
    llm = make()
    list(llm.stream(tokens(TURN, "warm up"), SHORT))
    pool, count = llm.runner.pool, history + TURN + BLOCK_SIZE
    blocks = pool.new_block_table(count)
    for layer in range(llm.geometry.layers):
        for part in pool.stored(blocks, layer, range(count)):
            part.k.zero_()
            part.v.zero_()
    pool.release(blocks)
    return llm


def tokens(count: int, name: str) -> list[int]:
    # Different names give different tokens, so that no turn is found in the prefix cache.
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    found: list[int] = torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()
    return found


def first_token(ask: Callable[[], Iterator[TokenOutput]]) -> float:
    gc.collect()  # free the memory of closed objects outside the timed section
    began = time.perf_counter()
    events = ask()
    next(events)
    seconds = time.perf_counter() - began
    list(events)
    return seconds


def timed_fork(llm: LLM, store: Path, name: str) -> float:
    """Return the time in seconds to the first token of a turn in a new fork called `name`.

    The session itself is not changed.
    """
    session = llm.session("s", store)
    fork = session.fork(name)
    seconds = first_token(lambda: fork.send(tokens(TURN, name), SHORT))
    session.close()
    fork.discard()
    return seconds


def fill_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        path.read_bytes()


def drop_cache(folder: Path) -> None:
    """Remove the files in `folder` from the page cache, so that they are read from the disk next time."""
    for path in folder.rglob("*.kv"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
