"""Measure the wall time per token for different numbers of threads, on an idle machine and beside a busy process.

Idle and busy machines are each measured in a separate process that imports torch and transformers first, as most
programs do. Policies and numbers of threads take turns of three tokens each, because a machine's speed may change
within a minute.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError
from ...utils.config_fields import check_choice, option
from ...utils.openmp import WAIT_VARIABLES
from ..core.report import Column, Report, Row, Say

TURN = 3

WARM_UP = 4
"""Number of turns of each policy that are not timed at the start.

During these turns, `ThreadChoice` makes its measurements.
"""

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
    context: int = option(6_000, help="tokens of the prompt", metavar="N")
    tokens: int = option(48, help="tokens timed for each policy", metavar="N")
    threads: tuple[int, ...] = option((1, 2, 4), help="threads of torch", metavar="1,2,4")
    busy: tuple[float, ...] = option((0.0, 0.5, 1.0), help="fraction of a core that another process uses", metavar="F")
    policies: tuple[str, ...] = option(("full", "infinigen", "auto"), help="the first is the baseline", metavar="A,B")
    dtype: str = option("auto", help="data type", metavar="auto|bfloat16|float32")
    interface: str = option("llm", help="LLM, or a transformers model in `offload`", metavar="llm|offload")

    def __post_init__(self) -> None:
        check_choice("interface", self.interface, ("llm", "offload"))


@dataclass(frozen=True)
class _Case:
    model: str
    text: str
    config: ThreadsConfig


def run_threads(model: str, text: str, config: ThreadsConfig, say: Say) -> Report:
    """Measure every combination of `config`. Raise InputError if a case fails."""
    rows = list[Row]()
    for busy in config.busy:
        say(f"another process uses {busy:.0%} of a processor")
        with _busy_process(busy):
            rows += [{"busy": busy} | row for row in _in_a_process(_Case(model, text, config))]
    for row in rows:
        row["to_full"] = row["median"] / _median(rows, row, policy=config.policies[0])
        row["to_one"] = row["median"] / _median(rows, row, threads=config.threads[0])
    about = {"model": Path(model).name, "context": config.context, "timed_tokens": config.tokens, "dtype": config.dtype}
    about["interface"] = config.interface
    about |= {"processors": len(os.sched_getaffinity(0)), "load": f"{os.getloadavg()[0]:.1f} at the end"}
    return Report("threads", "Wall time of a token by number of threads", about, COLUMNS, rows)


def _median(rows: Sequence[Row], row: Row, **other: object) -> float:
    sought = {key: row[key] for key in ("busy", "threads", "policy")} | other
    return next(float(one["median"]) for one in rows if sought.items() <= one.items())


@contextmanager
def _busy_process(share: float) -> Iterator[None]:
    """Within the `with` block, run another process that uses the fraction `share` of a processor."""
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
        raise InputError(f"the measurement failed: {done.stderr.strip()[-2000:]}")
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def run_case() -> None:
    """Measure the case described on stdin, and print its rows as JSON."""
    given = json.load(sys.stdin)
    print(json.dumps(measure_case(_Case(**given | {"config": ThreadsConfig(**given["config"])}))))


def measure_case(case: _Case) -> list[Row]:
    config, rows, streams = case.config, list[Row](), list[Iterator[object]]()
    with ExitStack() as ends:
        for threads in config.threads:
            torch.set_num_threads(threads)
            start = ends.enter_context(_generation(case))
            for policy in config.policies:
                steps = start(policy)
                began = time.perf_counter()
                next(steps)
                streams.append(steps)
                rows.append({"threads": threads, "policy": policy, "first": time.perf_counter() - began})
        turns: list[list[float]] = [[] for _ in rows]
        for _ in range(WARM_UP + config.tokens // TURN):
            for row, steps, times in zip(rows, streams, turns, strict=True):
                torch.set_num_threads(row["threads"])
                times.append(_milliseconds_per_token(steps))
    for row, times in zip(rows, turns, strict=True):
        counted = times[WARM_UP:]
        row |= {"median": statistics.median(counted), "least": min(counted), "most": max(counted)}
    return rows


@contextmanager
def _generation(case: _Case) -> Iterator[Callable[[str], Iterator[object]]]:
    from transformers.models.auto import AutoModelForCausalLM

    from ...drop_in import OffloadedCache, offload
    from ...llm import LLM
    from ...models.source import find_source
    from ...sampling_params import SamplingParams

    config, (first, *_) = case.config, case.config.policies
    # Prefixes are not shared, so that each policy has its own contiguous KV, as if it ran alone.
    options: dict[str, Any] = {"policy": first, "missed_mass_every": 0, "enable_prefix_caching": False}
    with ExitStack() as ends:
        if config.interface == "offload":
            folder = find_source(case.model).name_or_path
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=config.dtype)
            llm = ends.enter_context(offload(model, tokenizer=folder, **options))
        else:
            llm = LLM(case.model, dtype=config.dtype, **options)
        prompt = llm.encode(case.text)[: config.context]
        if len(prompt) < config.context:
            raise InputError(
                f"the text has {len(prompt):,} tokens, and {config.context:,} are needed: give a longer one"
            )
        params = SamplingParams(max_tokens=config.tokens + WARM_UP * TURN + 1, temperature=0, ignore_eos=True)

        def start(policy: str) -> Iterator[object]:
            used = llm if policy == first else llm.under(policy)
            if config.interface == "offload":
                return _forward_steps(model, OffloadedCache(used), prompt)
            return iter(used.stream(list(prompt), params))

        yield start


@torch.inference_mode()
def _forward_steps(model: Any, cache: Any, prompt: Sequence[int]) -> Iterator[int]:
    given = torch.tensor([prompt])
    while True:
        logits = model(input_ids=given, past_key_values=cache, logits_to_keep=1).logits
        given = logits[:, -1:].argmax(-1)
        yield int(given)


def _milliseconds_per_token(steps: Iterator[object]) -> float:
    began = time.perf_counter()
    for _ in range(TURN):
        next(steps)
    return (time.perf_counter() - began) / TURN * 1e3
