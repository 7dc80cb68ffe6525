"""Simulate a day of sessions with `make stress PART=day`. It takes `DAY_SECONDS` (default 600).

Requests arrive as in a recorded chat trace, or at random if there is no trace. Sessions in a store with a size limit
are continued, forked, truncated and deleted, while processes end or are killed.

Memory use and the number of files and threads must not grow, and the store must stay below its limit. A sample of the
answers must equal those computed afresh.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import assert_greedy, tiny_model, tiny_prompt

from offload_rt import LLM, OffloadError, SamplingParams

SECONDS = float(os.environ.get("DAY_SECONDS", "600"))
MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2, max_position_embeddings=512)
LIMIT = 24 << 20
OPTIONS: dict[str, Any] = {"limit": LIMIT, "ttl": 20.0}
SESSIONS, RATE, LIFE = 2000, 30.0, 15.0
"""Number of session names, arrivals per second, and lifetime of a process in seconds."""

TRACE = Path(os.environ.get("OFFLOAD_RT_DATA", "../shared/data")) / "traces" / "conversation_trace.jsonl"
SCALE = 200
"""Number of recorded tokens per simulated token, so that contexts fit into the tiny model's 512 positions."""


@dataclass(frozen=True)
class Arrival:
    """A request in a session. `interval` is the time since the previous request, in seconds."""

    interval: float
    name: str
    prompt: int
    answer: int


def arrivals(rng: random.Random) -> Iterator[Arrival]:
    """Yield requests endlessly.

    If there is a trace, start at a random request and use the trace's intervals and lengths. Requests with the same
    prefix belong to one session. Intervals are scaled to `RATE`.
    """
    if not TRACE.exists():
        while True:
            name = f"s{int(SESSIONS * rng.random() ** 3)}"
            yield Arrival(rng.expovariate(RATE), name, rng.randrange(1, 60), 4)
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()]
    pace = len(rows) / (rows[-1]["timestamp"] - rows[0]["timestamp"]) / RATE
    for before, row in itertools.pairwise(itertools.islice(itertools.cycle(rows), rng.randrange(len(rows)), None)):
        tokens = (-(-row[name] // SCALE) for name in ("input_length", "output_length"))
        name = f"s{row['hash_ids'][min(1, len(row['hash_ids']) - 1)] % SESSIONS}"
        yield Arrival(max(0, row["timestamp"] - before["timestamp"]) * pace, name, *(min(n, 60) for n in tokens))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class SimulatedProcess:
    def __init__(self, folder: Path, log: Path, seed: int) -> None:
        self.folder, self.log, self.rng = folder, log.open("a"), random.Random(seed)
        self.llm = LLM(MODEL, dtype="float32", host_memory="4MiB", policy="full")
        self.arrivals = arrivals(self.rng)
        self.names: set[str] = set()
        self.turns = self.checked = self.forks = self.cuts = self.forgotten = 0

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            self.answer_arrivals()
            self.change_session()
            self.log_resources()
        self.llm.close()
        self.log_resources(ended=True)

    def answer_arrivals(self) -> None:
        """Answer all requests of one second together."""
        queue, rng = self.llm.turns(self.folder, max_num_seqs=8, **OPTIONS), self.rng
        left, waiting = 1.0, []
        for arrival in self.arrivals:
            prompt = tiny_prompt(arrival.prompt, seed=rng.randrange(10**6))
            params = SamplingParams(max_tokens=arrival.answer, temperature=0)
            waiting.append((prompt, queue.add(arrival.name, prompt, params)))
            self.names.add(arrival.name)
            if (left := left - arrival.interval) < 0:
                break
        while not queue.idle:
            with suppress(OffloadError):
                queue.step()
        for prompt, queued in waiting:
            history = queued.session.history
            last = history.tokens[-len(queued.token_ids) - len(prompt) :] == [*prompt, *queued.token_ids]
            if queued.token_ids and last and not history.shift and rng.random() < 0.2:
                before = history.tokens[: -len(queued.token_ids)]
                assert_greedy(MODEL, before, queued.token_ids)
                self.checked += 1
            self.turns += 1
        queue.close()

    def change_session(self) -> None:
        name = self.rng.choice(sorted(self.names))
        with suppress(OffloadError), self.llm.session(name, self.folder, **OPTIONS) as session:
            choice = self.rng.random()
            if choice < 0.4:
                session.fork(f"s{self.rng.randrange(SESSIONS)}").close()
                self.forks += 1
            elif choice < 0.8:
                self.cuts += session.truncate(keep_last=self.rng.randrange(1, 200)) > 0
            else:
                session.discard()
                self.forgotten += 1

    def log_resources(self, ended: bool = False) -> None:
        stores = [path.stat().st_size for path in self.folder.rglob("*.*") if path.is_file()]
        held = {
            "process": os.getpid(), "rss": resident_bytes(), "files": len(stores), "bytes": sum(stores),
            "open": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "ended": ended,
            "pool": self.llm.runner.pool.sequence_bytes, "turns": self.turns, "checked": self.checked,
            "names": len(self.names), "forks": self.forks, "cuts": self.cuts, "forgotten": self.forgotten,
        }  # fmt: skip
        self.log.write(json.dumps(held) + "\n")
        self.log.flush()


def fork_process(folder: Path, log: Path, seed: int, until: float) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.fsync = lambda handle: None  # type: ignore[assignment]
        warnings.simplefilter("ignore")
        SimulatedProcess(folder, log, seed).run(until)
        code = 0
    except BaseException:
        import traceback

        (log.parent / f"failure{seed}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="takes minutes: make stress PART=day")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_day_of_sessions_leaks_no_resources(tmp_path: Path) -> None:
    folder, log, rng = tmp_path / "store", tmp_path / "log.jsonl", random.Random(1)
    end, seed, killed = time.monotonic() + SECONDS, 0, 0
    while (now := time.monotonic()) < end:
        seed += 1
        process = fork_process(folder, log, seed, min(end, now + LIFE))
        if rng.random() < 0.5:
            time.sleep(rng.uniform(2, LIFE))
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                killed += 1
        _, status = os.waitpid(process, 0)
        assert not (tmp_path / f"failure{seed}").exists(), (tmp_path / f"failure{seed}").read_text()
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    notes = [json.loads(line) for line in log.read_text().splitlines()]
    last = {note["process"]: note for note in notes}.values()
    total = {
        name: sum(note[name] for note in last) for name in ("turns", "checked", "names", "forks", "cuts", "forgotten")
    }
    largest = {name: max(note[name] for note in notes) for name in ("rss", "files", "bytes", "open", "threads")}
    print(json.dumps({"seconds": SECONDS, "processes": seed, "killed": killed, **total, "most": largest}))
    # Temporary files of killed processes and two generations of documents are included.
    assert largest["bytes"] <= LIMIT + (1 << 20)
    # Each name may have two generations, sinks and a damaged file. All other files are blocks.
    assert largest["files"] <= 4 * SESSIONS + LIMIT // 4096
    assert all(note["pool"] == 0 for note in notes if note["ended"])
    third = len(notes) // 3
    for name in ("rss", "open", "threads"):
        early, late = (max(note[name] for note in part) for part in (notes[: 2 * third], notes[2 * third :]))
        assert late <= 1.1 * early + 2, f"{name} grows: {early} in the first two thirds, {late} in the last"
