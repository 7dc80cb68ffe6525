"""The parts of `make gpu`.

After every measurement, a part yields all of its results so far, so that an interruption does not lose them. An
`exit_code` other than 0 counts as a failure, unless it is the result of a timeout.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...llm import LLM
from ..speed import kernels, session_ttft
from ..speed.baselines import SHAPES
from ..speed.bench import run_bench
from . import programs
from .gpu_job import GpuJob, Results
from .gpu_prefill import run_prefill
from .gpu_trace import run_trace
from .gpu_trained import run_trained
from .programs import CLI, KEPT_OUTPUT, ROOT

LIMIT = 570
"""Timeout in seconds of each program that a part runs."""

LEAN = {"OFFLOAD_RT_LEAN": "1"}
"""Environment variable that makes tests run without optional packages."""


def run_tests(job: GpuJob) -> Iterator[Results]:
    """Run all tests marked `gpu`. Then run compute-sanitizer on the kernels whose indices depend on data."""
    beside = ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    results: Results = {"marked gpu": programs.run_tests([*job.size.tests, "-m", "gpu", *beside], LIMIT // 2, **LEAN)}
    yield results
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not job.cuda:
        yield results | {"compute-sanitizer": "skipped: not there" if job.cuda else "skipped: no CUDA device"}
        return
    told_where = [f"tests/unit/kernels/test_triton_{name}.py" for name in ("gather", "attention", "kv_runs")]
    for tool in ("memcheck", "racecheck"):
        prefix = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        # The caching allocator is disabled, so that an access past the end of a tensor falls outside its allocation.
        results[tool] = programs.run_tests(
            [*told_where, "-m", "gpu", "-x"], LIMIT // 4, prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1", **LEAN
        )
        yield results


def run_kernels(job: GpuJob) -> Iterator[Results]:
    """Compare every operation's time with its lower bound, and its result with float64."""
    size = job.size.kernels
    rates = kernels.bandwidth(job.device, size.copied, size.repeats)
    floors = {"device": rates["device"], "pcie": rates["host_to_device"]}
    yield {"size": asdict(size), "rows": kernels.measure(job.device, size, floors)}


def run_decode(job: GpuJob) -> Iterator[Results]:
    """Compare a decode step with transformers' caches, for a model of 8B shape and a context with 5 % planted
    tokens.
    """
    rows: list[Any] = []
    for context in job.size.decode.contexts:
        config = replace(job.size.decode, contexts=(context,), device=job.device.type)
        report = run_bench(config, job.out / f"decode_{context}", lambda line: print(line, file=sys.stderr))
        rows += report.rows
        yield {"about": report.about, "rows": rows}


def run_accuracy(job: GpuJob) -> Iterator[Results]:
    """Measure perplexity and needle retrieval of the packaged reference models, in bf16 and under each policy."""
    data = Path(os.environ.get("OFFLOAD_RT_DATA", ROOT.parent / "shared" / "data"))
    book = next(iter(data.glob("books/war_and_peace.txt")), None)
    text = str(book or files("offload_rt").joinpath("data", "black_arrow.txt"))
    found: Results = {"text": Path(text).name}
    for folder in job.size.models:
        out = job.out / f"accuracy_{folder.name}"
        shared = ["--text", text, "--device", job.device.type, "--dtype", "bfloat16", "--quiet", "--out", str(out)]
        shared += job.size.policies
        runs = (["perplexity", str(folder), *job.size.perplexity], ["retrieval", str(folder), *job.size.needles])
        ended = [programs.run_program([*CLI, "eval", *words, *shared], LIMIT // 4) for words in runs]
        code, output = max(code for code, _ in ended), "".join(output for _, output in ended)
        tables = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(out.glob("*.json"))}
        found[folder.name] = {"exit_code": code, **tables} | ({} if code == 0 else {"output": output[-KEPT_OUTPUT:]})
        yield found


def run_sessions(job: GpuJob) -> Iterator[Results]:
    model, rows = SHAPES[job.size.decode.shape[0]].model(1 << 16, job.device), list[Any]()

    def make() -> LLM:
        return LLM(model, policy="full", host_memory=job.size.host_memory)

    with tempfile.TemporaryDirectory() as folder:
        for history in job.size.histories:
            rows += session_ttft.measure(make, history, job.size.turns, Path(folder) / str(history))
            yield {"rows": rows}


@dataclass(frozen=True)
class Part:
    run: Callable[[GpuJob], Iterator[Results]]
    minutes: float


PARTS: dict[str, Part] = {
    "trace": Part(run_trace, 4),
    "tests": Part(run_tests, 9),
    "kernels": Part(run_kernels, 2),
    "decode": Part(run_decode, 8),
    "prefill": Part(run_prefill, 4),
    "trained": Part(run_trained, 4),
    "accuracy": Part(run_accuracy, 9),
    "sessions": Part(run_sessions, 3),
}
"""The parts in the order of execution."""
