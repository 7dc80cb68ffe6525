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
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from ...llm import LLM
from ...sampling_params import SamplingParams
from ..speed import kernels, session_ttft
from ..speed.baselines import SHAPES
from ..speed.bench import BenchConfig, run_bench
from ..speed.kernels import KernelSize
from . import programs
from .programs import CLI, ROOT, TOLD

LIMIT = 570
"""Timeout of the programs of a part in seconds."""

LEAN = {"OFFLOAD_RT_LEAN": "1"}
"""Environment variable that allows the tests to run without the packages of the extras."""

Results = dict[str, Any]


DECODE = BenchConfig(
    ("llama-8b",),
    contexts=(8_192, 32_768, 131_072),
    baselines=(
        "static", "dynamic", "offloaded", "quantized", "full", "infinigen", "infinigen-residual", "infinigen-tail4",
        "floor", "floor-ours",
    ),
    repeats=5,
    threads=os.cpu_count() or 1,
)  # fmt: skip
"""Decode steps of an 8B shape compared with transformers' caches."""


@dataclass(frozen=True)
class GpuSize:
    """Sizes of all parts.

    Attributes:
        tests: Paths passed to pytest; empty for all tests.
        decode: Settings of the part "decode"; its shape is also used by the parts "prefill" and "sessions".
        host_memory: Host memory limit of prefills and sessions; None takes half of the free memory.
        policies: Flags of `eval perplexity` and `eval retrieval` in the part "accuracy".
    """

    tests: tuple[str, ...] = ()
    kernels: KernelSize = KernelSize()  # noqa: RUF009 - frozen
    decode: BenchConfig = DECODE
    prompts: tuple[int, ...] = (8_192, 32_768, 65_536, 131_072)
    histories: tuple[int, ...] = (1_024, 8_192, 32_768)
    turns: int = 3
    host_memory: str | None = "24GiB"
    models: tuple[Path, ...] = tuple(ROOT / "offload_rt" / "reference" / name for name in ("llama", "opt"))
    policies: tuple[str, ...] = ("--policies", "full,infinigen,h2o,quest,streaming", "--budgets", "0.05,0.1")
    perplexity: tuple[str, ...] = ("--context", "1024")
    needles: tuple[str, ...] = ("--lengths", "1k")


SMALL = GpuSize(
    tests=("tests/unit/transfer/test_gpu_streams.py",),
    kernels=kernels.SMALL,
    decode=replace(DECODE, shape=("small",), layers=1, contexts=(512,), repeats=1, threads=1),
    prompts=(256, 512),
    histories=(128,),
    turns=1,
    host_memory="256MiB",
    models=GpuSize.models[:1],
    policies=(),
    perplexity=("--context", "256", "--windows", "1"),
    needles=("--lengths", "256", "--passages", "1"),
)
"""Tiny sizes for a machine without a GPU; the numbers are meaningless."""


@dataclass(frozen=True)
class GpuJob:
    """Device, sizes and output folder of a run."""

    device: torch.device
    size: GpuSize
    out: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.type == "cuda"


def run_tests(job: GpuJob) -> Iterator[Results]:
    """Run every test marked gpu, then compute-sanitizer on the kernels with data-dependent indices."""
    beside = ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    results: Results = {"marked gpu": programs.run_tests([*job.size.tests, "-m", "gpu", *beside], LIMIT // 2, **LEAN)}
    yield results
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not job.cuda:
        yield results | {"compute-sanitizer": "skipped: not there" if job.cuda else "skipped: no CUDA device"}
        return
    told_where = [f"tests/unit/kernels/test_triton_{name}.py" for name in ("gather", "attention", "segments")]
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
    rates = kernels.bandwidth(job.device, size.copied, size.repeats)
    floors = {"device": rates["device"], "link": rates["host_to_device"]}
    yield {"size": asdict(size), "rows": kernels.measure(job.device, size, floors)}


def run_decode(job: GpuJob) -> Iterator[Results]:
    """Compare the decode step with transformers' caches: 8B shape, planted tokens, 5 % selected."""
    rows: list[Any] = []
    for context in job.size.decode.contexts:
        config = replace(job.size.decode, contexts=(context,), device=job.device.type)
        report = run_bench(config, job.out / f"decode_{context}", lambda line: print(line, file=sys.stderr))
        rows += report.rows
        yield {"about": report.about, "rows": rows}


def run_prefill(job: GpuJob) -> Iterator[Results]:
    """Measure time and peak device memory of the prefill of an 8B shape with `full`, 8k to 128k tokens."""
    shape, lengths = SHAPES[job.size.decode.shape[0]], job.size.prompts
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
        found[folder.name] = {"exit_code": code, **tables} | ({} if code == 0 else {"output": output[-TOLD:]})
        yield found


def run_sessions(job: GpuJob) -> Iterator[Results]:
    """Measure the time to the first token of the next turn of a session: recomputed, from host memory, from disk."""
    model, rows = SHAPES[job.size.decode.shape[0]].model(1 << 16, job.device), list[Any]()

    def make() -> LLM:
        return LLM(model, policy="full", host_memory=job.size.host_memory)

    with tempfile.TemporaryDirectory() as folder:
        for history in job.size.histories:
            rows += session_ttft.measure(make, history, job.size.turns, Path(folder) / str(history))
            yield {"rows": rows}


@dataclass(frozen=True)
class Part:
    """A part, and its estimated duration in minutes at full size on a current data-center GPU."""

    run: Callable[[GpuJob], Iterator[Results]]
    minutes: float


PARTS: dict[str, Part] = {
    "tests": Part(run_tests, 9),
    "kernels": Part(run_kernels, 2),
    "decode": Part(run_decode, 8),
    "prefill": Part(run_prefill, 4),
    "accuracy": Part(run_accuracy, 9),
    "sessions": Part(run_sessions, 3),
}
"""Parts in execution order."""
