"""Measure the wall time per token by number of threads, on an idle machine and while another process is busy.

Each case runs in its own process, in the environment of a normal user: torch and transformers are imported before this
package, and no OpenMP variable is set. The policies of a case take turns, three tokens each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch

from ...errors import InputError
from ...utils.config_fields import option
from ...utils.openmp import WAIT_VARIABLES
from ..core.report import Column, Report, Row, Say

TURN = 3
"""Number of tokens that a policy decodes before the next policy takes its turn."""

WARM_UP = 4
"""Number of untimed first turns of each policy, in which `ThreadChoice` makes its measurements."""

_CASE = "import torch, transformers; from offload_rt.eval.speed import threads; threads.run_case()"

_BUSY = """
import time
while True:
    until = time.perf_counter() + 0.02 * {share}
    while time.perf_counter() < until:
        pass
    time.sleep(0.02 * (1 - {share}))
"""

COLUMNS = (
    Column("busy process", "busy", ".0%"),
    Column("threads", "threads"),
    Column("policy", "policy"),
    Column("median ms/token", "median", ".1f"),
    Column("fastest turn", "least", ".1f"),
    Column("slowest turn", "most", ".1f"),
    Column("ratio to full", "to_full", ".2f"),
    Column("ratio to 1 thread", "to_one", ".2f"),
    Column("first token s", "first", ".1f"),
)


@dataclass(frozen=True)
class ThreadsConfig:
    """Settings of the measurement of a token's time by number of threads."""

    context: int = option(6_000, help="tokens of the prompt", metavar="N")
    tokens: int = option(48, help="tokens timed for each policy", metavar="N")
    threads: tuple[int, ...] = option((1, 2, 4), help="threads of torch", metavar="1,2,4")
    busy: tuple[float, ...] = option((0.0, 0.5, 1.0), help="fraction of a core that another process uses", metavar="F")
    policies: tuple[str, ...] = option(("full", "infinigen", "auto"), help="the first is the baseline", metavar="A,B")
    dtype: str = option("auto", help="data type", metavar="auto|bfloat16|float32")


@dataclass(frozen=True)
class _Case:
    model: str
    text: str
    threads: int
    config: ThreadsConfig


def run_threads(model: str, text: str, config: ThreadsConfig, say: Say) -> Report:
    """Measure every combination of `config`. Raise InputError if a case fails."""
    rows = list[Row]()
    for busy, threads in product(config.busy, config.threads):
        say(f"{threads} threads, another process uses {busy:.0%} of a processor")
        with _busy_process(busy):
            found = _in_a_process(_Case(model, text, threads, config))
        rows += [{"busy": busy, "threads": threads} | row for row in found]
    for row in rows:
        row["to_full"] = row["median"] / _median(rows, row, policy=config.policies[0])
        row["to_one"] = row["median"] / _median(rows, row, threads=config.threads[0])
    about = {"model": Path(model).name, "context": config.context, "timed_tokens": config.tokens, "dtype": config.dtype}
    about |= {"processors": len(os.sched_getaffinity(0)), "load": f"{os.getloadavg()[0]:.1f} at the end"}
    return Report("threads", "Wall time of a token by number of threads", about, COLUMNS, rows)


def _median(rows: Sequence[Row], row: Row, **other: object) -> float:
    """Return the median time of the row that equals `row` in all settings except `other`."""
    sought = {key: row[key] for key in ("busy", "threads", "policy")} | other
    return next(float(one["median"]) for one in rows if sought.items() <= one.items())


@contextmanager
def _busy_process(share: float) -> Iterator[None]:
    """Run another process that uses the fraction `share` of a processor, during the `with` statement."""
    if not share:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", _BUSY.format(share=share)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _in_a_process(case: _Case) -> list[Row]:
    environment = {
        name: value for name, value in os.environ.items() if name not in {*WAIT_VARIABLES, "OMP_NUM_THREADS"}
    }
    done = subprocess.run(
        [sys.executable, "-c", _CASE], input=json.dumps(asdict(case)), env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise InputError(f"the measurement with {case.threads} threads failed: {done.stderr.strip()[-2000:]}")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def run_case() -> None:
    """Measure the case that is described on stdin, and print its rows as JSON."""
    given = json.load(sys.stdin)
    print(json.dumps(measure_case(_Case(**given | {"config": ThreadsConfig(**given["config"])}))))


def measure_case(case: _Case) -> list[Row]:
    """Measure one case in this process."""
    from ...llm import LLM
    from ...sampling_params import SamplingParams

    config = case.config
    torch.set_num_threads(case.threads)
    # Do not share prefixes, so that each policy has its own contiguous KV, as if it ran alone.
    llm = LLM(
        case.model, policy=config.policies[0], dtype=config.dtype, missed_mass_every=0, enable_prefix_caching=False
    )
    prompt = llm.encode(case.text)[: config.context]
    if len(prompt) < config.context:
        raise InputError(f"the text has {len(prompt):,} tokens, and {config.context:,} are needed: give a longer one")
    params = SamplingParams(max_tokens=config.tokens + WARM_UP * TURN + 1, temperature=0, ignore_eos=True)
    streams, rows = {}, list[Row]()
    for policy in config.policies:
        steps = iter((llm if policy == config.policies[0] else llm.under(policy)).stream(list(prompt), params))
        began = time.perf_counter()
        next(steps)
        streams[policy] = steps
        rows.append({"policy": policy, "first": time.perf_counter() - began})
    turns: dict[str, list[float]] = {policy: [] for policy in streams}
    for _ in range(WARM_UP + config.tokens // TURN):
        for policy, steps in streams.items():
            turns[policy].append(_turn(steps))
    for row in rows:
        counted = turns[row["policy"]][WARM_UP:]
        row |= {"median": statistics.median(counted), "least": min(counted), "most": max(counted)}
    return rows


def _turn(steps: Iterator[object]) -> float:
    """Run one turn of a policy and return the time per token in milliseconds."""
    began = time.perf_counter()
    for _ in range(TURN):
        next(steps)
    return (time.perf_counter() - began) / TURN * 1e3
