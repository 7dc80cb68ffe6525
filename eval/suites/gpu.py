"""Everything that only a CUDA machine can show, in parts of under ten minutes, each a JSON file: `make gpu PART=...`.

    offload-rt eval gpu                                  # all parts in turn, each in a process of its own
    offload-rt eval gpu --part kernels
    offload-rt eval gpu --device cpu --small             # no GPU: shows that all of it runs

Without a CUDA device every part says that it was skipped, and nothing is written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ...config import SamplingParams
from ...errors import ConfigError
from ...llm import LLM
from ..core.report import environment, write_atomic
from ..speed import kernels, session_ttft
from ..speed.baselines import SHAPES
from ..speed.bench import BenchConfig, run_bench

ROOT = Path(__file__).resolve().parents[2]
"""Of the repository: tests and scripts are run from there."""

LIMIT = 570
"""Seconds after which a part's own programs are stopped."""

CLI = (sys.executable, "-P", "-m", "offload_rt")
"""The command line, wherever its script was installed."""

QUERY = ("name", "driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
         "pcie.link.width.max", "memory.total", "clocks.max.sm")  # fmt: skip


Results = dict[str, Any]
"""What a part has found so far: parts yield it again and again, and each time it is written, so that one that is cut
off has not run in vain."""

BASELINES = (
    "static", "dynamic", "offloaded", "accelerate", "quantized", "full", "infinigen", "ideal", "floor", "floor-ours",
)  # fmt: skip


@dataclass(frozen=True)
class GpuJob:
    """Where and how large. `small` is for a machine without a GPU; its numbers say nothing."""

    device: torch.device
    small: bool
    out: Path

    @property
    def cuda(self) -> bool:
        """Whether there is anything to measure."""
        return self.device.type == "cuda"


# --------------------------------------------------------------------------------------------------- the machine


def machine(device: torch.device) -> dict[str, Any]:
    """GPU, PCIe, driver, versions, commit, and the bandwidths that floors are made from, measured now."""
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    about = environment() | {"commit": commit.stdout.strip() or "not from a repository", "cores": os.cpu_count()}
    about["bandwidth"] = bandwidth(device, 1 << 28 if device.type == "cuda" else 1 << 22)
    if device.type == "cuda":
        about["gpu"] = _nvidia_smi()
        about["cuda"], about["capability"] = torch.version.cuda, torch.cuda.get_device_capability(device)
        about["device_memory"] = torch.cuda.get_device_properties(device).total_memory
    return about


def _nvidia_smi() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {"name": torch.cuda.get_device_name()}
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "-i", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip().splitlines()
    return dict(zip(QUERY, (word.strip() for word in found[0].split(",")), strict=True)) if found else {}


def bandwidth(device: torch.device, size: int) -> dict[str, float]:
    """Bytes a second: host to device and back through pinned memory, and of device memory (a copy reads and writes: its
    bytes count twice). On a CPU all three are copies in memory."""
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    other = torch.zeros_like(there)

    def rate(into: torch.Tensor, source: torch.Tensor, count: int) -> float:
        _, least = kernels.milliseconds(lambda: into.copy_(source, non_blocking=True), device)
        return 1e3 * count / least

    return {
        "host_to_device": rate(there, pinned, size),
        "device_to_host": rate(pinned, there, size),
        "device": rate(other, there, 2 * size),
    }


# --------------------------------------------------------------------------------------------------------- parts


def run_tests(job: GpuJob) -> Iterator[Results]:
    """Every test marked gpu, then compute-sanitizer on the kernels that index memory by what they are told."""
    chosen = ["tests/test_gpu_streams.py"] if job.small else []
    results: Results = {"marked gpu": _pytest([*chosen, "-m", "gpu"], LIMIT // 2)}
    yield results
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or not job.cuda:
        yield results | {"compute-sanitizer": "skipped: not there" if job.cuda else "skipped: no CUDA device"}
        return
    kernels = [f"tests/test_triton_{name}.py" for name in ("gather", "attention", "segments")]
    for tool in ("memcheck", "racecheck"):
        prefix = [sanitizer, "--tool", tool, "--error-exitcode", "9"]
        # without the allocator's cache an access behind a tensor is one behind an allocation
        results[tool] = _pytest([*kernels, "-m", "gpu", "-x"], LIMIT // 4, prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        yield results


def _pytest(arguments: Sequence[str], limit: float, prefix: Sequence[str] = (), **variables: str) -> dict[str, Any]:
    """Counts, and the end of the output where something failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*prefix, sys.executable, "-P", "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        code, output = _run(command, limit, **variables)
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
    counts = {} if suite is None else {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    passed = counts.get("tests", 0) - sum(counts.get(k, 0) for k in ("failures", "errors", "skipped"))
    return {"exit_code": code, "passed": passed, **counts} | ({} if code in (0, 5) else {"output": output[-6000:]})


def _run(command: Sequence[str], limit: float, **variables: str) -> tuple[int, str]:
    """Exit code and output of a program in the repository's folder; 124 where it was stopped after `limit` seconds. It
    may end by itself for a while, as one does that saves its work."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **variables})
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(25)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            code = 124
        log.seek(0)
        return code, log.read()


def run_kernels(job: GpuJob) -> Iterator[Results]:
    """Every operation against its floor and float64."""
    rates = bandwidth(job.device, 1 << 28 if job.cuda else 1 << 22)
    size = kernels.SMALL if job.small else kernels.KernelSize()
    floors = {"device": rates["device"], "link": rates["host_to_device"]}
    yield {"size": asdict(size), "rows": kernels.measure(job.device, size, floors)}


def run_decode(job: GpuJob) -> Iterator[Results]:
    """The decode step against transformers' caches (issue D): 8B shape, planted tokens, 5 % selected."""
    found: Results = {}
    for context in (512,) if job.small else (8_192, 32_768, 131_072):
        config = BenchConfig(
            shape="small" if job.small else "llama-8b",
            layers=1 if job.small else None,
            contexts=(context,),
            baselines=BASELINES,
            repeats=1 if job.small else 5,
            threads=1 if job.small else os.cpu_count() or 1,
            device=job.device.type,
        )
        folder = job.out / f"decode_{context}"
        run_bench(config, folder, Console(stderr=True))
        report: Results = json.loads((folder / "decode_step.json").read_text("utf-8"))
        found = report | {"timings": [*found.get("timings", []), *report["timings"]]}
        yield found


def run_prefill(job: GpuJob) -> Iterator[Results]:
    """Seconds and peak device memory of the prefill of an 8B shape, `full`, 8k to 128k tokens."""
    shape = SHAPES["small" if job.small else "llama-8b"]
    lengths = [256, 512] if job.small else [8_192, 32_768, 65_536, 131_072]
    model = shape.model(max(lengths) + 64, job.device)
    rows = []
    for length in lengths:
        llm = LLM(model, policy="full", host_memory=None if job.cuda else "256MiB", prefix_sharing=False)
        prompt = torch.randint(1, shape.vocab, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        llm.generate(prompt[:64], SamplingParams(max_new_tokens=1, temperature=0))  # what only the first call pays
        if job.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        [done] = llm.generate(prompt, SamplingParams(max_new_tokens=1, temperature=0))
        seconds = time.perf_counter() - began
        rows.append(
            {"tokens": length, "seconds": seconds, "tokens_per_second": length / seconds}
            | {"peak_device_bytes": done.stats.peak_device_bytes, "weight_bytes": done.stats.weight_bytes}
            | {"link_bytes_to_host": done.stats.link_bytes_to_host}
        )
        del llm
        yield {"shape": asdict(shape) | {"dtype": str(shape.dtype)}, "rows": rows}


def run_accuracy(job: GpuJob) -> Iterator[Results]:
    """The shipped reference models in bf16: perplexity and retrieval under each policy, as issue C's tables."""
    book = next(iter(_data().glob("books/war_and_peace.txt")), None)
    text = str(book or files("offload_rt").joinpath("data", "black_arrow.txt"))
    found: Results = {"text": Path(text).name}
    for name in ("llama",) if job.small else ("llama", "opt"):
        folder, out = ROOT / "offload_rt" / "reference" / name, job.out / f"accuracy_{name}"
        shared = ["--text", text, "--device", job.device.type, "--dtype", "bfloat16", "--quiet", "--out", str(out)]
        shared += [] if job.small else ["--policies", "full,infinigen,h2o,quest,streaming", "--budgets", "0.05,0.1"]
        context, windows = ("256", ["--windows", "1"]) if job.small else ("1024", [])
        needles = ["--lengths", "256", "--passages", "1"] if job.small else ["--lengths", "1k"]
        runs = (["perplexity", str(folder), "--context", context, *windows], ["retrieval", str(folder), *needles])
        ended = [_run([*CLI, "eval", *words, *shared], LIMIT // 4) for words in runs]
        code, output = max(code for code, _ in ended), "".join(output for _, output in ended)
        tables = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(out.glob("*.json"))}
        found[name] = {"exit_code": code, **tables} | ({} if code == 0 else {"output": output[-6000:]})
        yield found


def run_sessions(job: GpuJob) -> Iterator[Results]:
    """Time to the first token of a session's next turn: recomputed, from host memory, from disk (over PCIe)."""
    name = "small" if job.small else "llama-8b"
    model = SHAPES[name].model(1 << 16, job.device)
    memory = "64MiB" if job.small else "24GiB"
    histories = (128,) if job.small else (1_024, 8_192, 32_768)
    timed = session_ttft.TimedModel(name, lambda: LLM(model, policy="full", host_memory=memory), histories)
    with tempfile.TemporaryDirectory() as folder:
        yield {"rows": session_ttft.measure(timed, 1 if job.small else 3, Path(folder))}


def run_train(job: GpuJob) -> Iterator[Results]:
    """Training of the larger reference model; stopped after the limit it saves its state, and the next run goes on."""
    books, runs = _data() / "books", ROOT / "runs" / "llama-16k"
    if job.small:
        code, output = _run([sys.executable, "scripts/reference/train.py", "--help"], 120)
        yield {"exit_code": code, "output": "" if code == 0 else output[-6000:]}
        return
    if not books.is_dir():
        yield {"skipped": f"no books in {books}: set OFFLOAD_RT_DATA"}
        return
    command = [sys.executable, "scripts/reference/train.py", "cuda", "--data", str(books), "--out", str(runs)]
    code, output = _run(command, LIMIT)
    log = runs / "log.jsonl"
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    last = [json.loads(line) for line in lines[-3:]]
    finished = (runs / "checkpoint").is_dir()
    more = {} if code in (0, 124) else {"output": output[-6000:]}
    yield {"exit_code": code, "finished": finished, "log": last} | more


def _data() -> Path:
    return Path(os.environ.get("OFFLOAD_RT_DATA", ROOT.parent / "shared" / "data"))


PARTS: dict[str, Callable[[GpuJob], Iterator[Results]]] = {
    "tests": run_tests,
    "kernels": run_kernels,
    "decode": run_decode,
    "prefill": run_prefill,
    "accuracy": run_accuracy,
    "sessions": run_sessions,
    "train": run_train,
}


# ------------------------------------------------------------------------------------------------------- command


def run_part(name: str, job: GpuJob) -> Path:
    """Runs one part in this process and writes `out`/name.json, as far as it has come; where the device has no room for
    more, that is in it."""
    job.out.mkdir(parents=True, exist_ok=True)
    path, about, began = job.out / f"{name}.json", machine(job.device), time.perf_counter()

    def write(results: Results) -> None:
        seconds = time.perf_counter() - began
        record = {"part": name, "machine": about, "seconds": seconds, "results": results}
        write_atomic(path, json.dumps(record, indent=1, default=str) + "\n")
        print(f"{name}: {seconds:.0f} s, wrote {path}", flush=True)

    found: Results = {}
    try:
        for results in PARTS[name](job):
            found = dict(results)
            write(found)
    except torch.OutOfMemoryError as error:
        write(found | {"out of memory": str(error).splitlines()[0]})
        print(f"{name}: the device has no room for the rest: end what else runs on it, and run this part again")
    return path


def run_gpu(part: str | None, device: str, small: bool, out: Path | None) -> int:
    """One part, or all in turn, each in a process of its own; 1 where a part failed. Raises ConfigError for a CPU
    without `small`."""
    if device == "cuda" and not torch.cuda.is_available():
        for name in [part] if part else PARTS:
            print(f"{name}: skipped, there is no CUDA device here (--device cpu --small shows that it runs)")
        return 0
    if device == "cpu" and not small:
        raise ConfigError("--device cpu measures nothing of a GPU: add --small to see that it runs")
    out = out or (ROOT / "out" / "gpu" if small else ROOT / "eval" / "results" / "gpu")
    if part:
        warnings.simplefilter("ignore")
        run_part(part, GpuJob(torch.device(device), small, out))
        return 0
    flags = ["--device", device, "--out", str(out), *(["--small"] if small else [])]
    failed = []
    for name in PARTS:
        code, output = _run([*CLI, "eval", "gpu", "--part", name, *flags], LIMIT + 60)
        print(output, end="", flush=True)
        failed += [name] if code else []
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0
