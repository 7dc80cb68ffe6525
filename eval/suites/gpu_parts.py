"""The parts of `make gpu`.

Each part yields its accumulated results repeatedly, and each time they are written, so that an interrupted part keeps
its results. An `exit_code` other than 0 in the results is a failure, except for a timeout.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...llm import LLM
from ...sampling_params import SamplingParams
from ..speed import hardware, kernels, session_ttft
from ..speed.baselines import SHAPES
from ..speed.bench import BenchConfig, run_bench
from . import programs
from .gpu_job import ROOT, GpuJob
from .programs import CLI, STOPPED, TOLD

LIMIT = 570
"""Timeout of the programs of a part in seconds."""

RUNS = ROOT / "runs" / "llama-16k"
"""Output folder of the training, which resumes from its saved state."""

LEAN = {"OFFLOAD_RT_LEAN": "1"}
"""Environment variable that allows the tests to run without the packages of the extras."""

Results = dict[str, Any]


def run_device(job: GpuJob) -> Iterator[Results]:
    """Measure bandwidths, launch costs, overlap of transfer and compute, graph capture, and page-locking."""
    found: Results = {"size": asdict(job.size.hardware)}
    for name, facts in hardware.measure(job.device, job.size.hardware):
        found[name] = facts
        yield found


def run_tests(job: GpuJob) -> Iterator[Results]:
    """Run every test marked gpu, then compute-sanitizer on the kernels with data-dependent indices."""
    beside = ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    results: Results = {"marked gpu": programs.run_tests([*job.size.tests, "-m", "gpu", *beside], LIMIT // 2, **LEAN)}
    yield results
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not job.cuda:
        yield results | {"compute-sanitizer": "skipped: not there" if job.cuda else "skipped: no CUDA device"}
        return
    told_where = [f"tests/test_triton_{name}.py" for name in ("gather", "attention", "segments")]
    for tool in ("memcheck", "racecheck"):
        prefix = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        # Without the caching allocator, an access past a tensor is also an access past its allocation.
        results[tool] = programs.run_tests(
            [*told_where, "-m", "gpu", "-x"], LIMIT // 4, prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1", **LEAN
        )
        yield results


def run_kernels(job: GpuJob) -> Iterator[Results]:
    """Compare every operation with its lower time bound and with float64."""
    size = job.size.kernels
    rates = hardware.bandwidth(job.device, job.size.hardware.copied, size.repeats)
    floors = {"device": rates["device"], "link": rates["host_to_device"]}
    yield {"size": asdict(size), "rows": kernels.measure(job.device, size, floors)}


def run_decode(job: GpuJob) -> Iterator[Results]:
    """Compare the decode step with transformers' caches: 8B shape, planted tokens, 5 % selected."""
    found: Results = {}
    for context in job.size.contexts:
        config = BenchConfig(
            shape=job.size.shape,
            layers=job.size.layers,
            contexts=(context,),
            baselines=job.size.baselines,
            repeats=job.size.repeats,
            threads=os.cpu_count() or 1 if job.cuda else 1,
            device=job.device.type,
        )
        folder = job.out / f"decode_{context}"
        run_bench(config, folder, Console(stderr=True))
        report: Results = json.loads((folder / "decode_step.json").read_text("utf-8"))
        found = report | {"timings": [*found.get("timings", []), *report["timings"]]}
        found["skipped"] = list(dict.fromkeys([*found.get("skipped", []), *report["skipped"]]))
        yield found


def run_prefill(job: GpuJob) -> Iterator[Results]:
    """Measure time and peak device memory of the prefill of an 8B shape with `full`, 8k to 128k tokens."""
    shape, lengths = SHAPES[job.size.shape], job.size.prompts
    model = shape.model(max(lengths) + 64, job.device)
    rows = []
    for length in lengths:
        llm = LLM(model, policy="full", host_memory=job.size.host_memory, enable_prefix_caching=False)
        prompt = torch.randint(1, shape.vocab, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        llm.generate(prompt[:64], SamplingParams(max_tokens=1, temperature=0))  # warm-up
        if job.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        [output] = llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0))
        seconds = time.perf_counter() - began
        stats = output.outputs[0].stats
        assert stats is not None
        rows.append(
            {"tokens": length, "seconds": seconds, "tokens_per_second": length / seconds}
            | {"peak_device_bytes": stats.peak_device_bytes, "weight_bytes": stats.weight_bytes}
            | {"d2h_bytes": stats.d2h_bytes}
        )
        del llm
        yield {"shape": asdict(shape) | {"dtype": str(shape.dtype)}, "rows": rows}


def run_accuracy(job: GpuJob) -> Iterator[Results]:
    """Measure perplexity and needles of the packaged reference models in bf16 under each policy."""
    book = next(iter(_data().glob("books/war_and_peace.txt")), None)
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
        found[folder.name] = {"exit_code": code, **tables} | ({} if code == 0 else {"output": output[-TOLD:]})
        yield found


def run_sessions(job: GpuJob) -> Iterator[Results]:
    """Measure the time to the first token of the next turn of a session: recomputed, from host memory, from disk."""
    name, memory = job.size.shape, job.size.host_memory
    model = SHAPES[name].model(1 << 16, job.device)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for history in job.size.histories:
            timed = session_ttft.TimedModel(name, lambda: LLM(model, policy="full", host_memory=memory), (history,))
            rows += session_ttft.measure(timed, job.size.turns, Path(folder))
            yield {"rows": rows}


def run_train(job: GpuJob) -> Iterator[Results]:
    """Train the larger reference model. At the time limit the state is saved, and the next run resumes."""
    script = [sys.executable, "scripts/reference/train.py"]
    if job.size.train is None:
        code, output = programs.run_program([*script, "--help"], 120)
        yield {"exit_code": code} | ({} if code == 0 else {"output": output[-TOLD:]})
        return
    books = _data() / "books"
    if not books.is_dir():
        yield {"skipped": f"no books in {books}: set OFFLOAD_RT_DATA"}
        return
    command = [*script, *job.size.train, "--data", str(books), "--out", str(RUNS)]
    code, output = programs.run_program(command, LIMIT)
    log = RUNS / "log.jsonl"
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    more = {} if code in (0, STOPPED) else {"output": output[-TOLD:]}
    finished = (RUNS / "checkpoint").is_dir()
    yield {"exit_code": code, "finished": finished, "log": [json.loads(line) for line in lines[-3:]]} | more


def _data() -> Path:
    return Path(os.environ.get("OFFLOAD_RT_DATA", ROOT.parent / "shared" / "data"))


@dataclass(frozen=True)
class Part:
    """A part, and its estimated duration in minutes at full size on a current data-center GPU."""

    run: Callable[[GpuJob], Iterator[Results]]
    minutes: float


PARTS: dict[str, Part] = {
    "device": Part(run_device, 1),
    "tests": Part(run_tests, 9),
    "kernels": Part(run_kernels, 2),
    "decode": Part(run_decode, 8),
    "prefill": Part(run_prefill, 4),
    "accuracy": Part(run_accuracy, 9),
    "sessions": Part(run_sessions, 3),
    "train": Part(run_train, 9.5),
}
"""Parts in execution order."""
