"""Run all measurements that need a CUDA device: `make gpu PART=...`.

    offload-rt eval gpu                         # all parts in sequence, each in its own process
    offload-rt eval gpu --part kernels
    offload-rt eval gpu --device cpu --small    # without a GPU: checks that everything runs

Each part takes less than ten minutes and writes a JSON file. Without a CUDA device, parts are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import ConfigError, MemoryLimitError
from ..core.report import environment, write_text
from ..speed.kernels import bandwidth
from .gpu_job import SMALL, GpuJob, GpuSize, Results
from .gpu_parts import LIMIT, PARTS
from .programs import CLI, ROOT, TIMED_OUT, run_program

QUERY = ("name", "driver_version", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
         "pcie.link.width.max", "memory.total", "clocks.max.sm")  # fmt: skip


def machine(job: GpuJob) -> dict[str, Any]:
    about = environment() | {"cores": os.cpu_count()}
    about["bandwidth"] = bandwidth(job.device, job.size.kernels.copied, job.size.kernels.repeats)
    if job.cuda:
        about["gpu"] = _nvidia_smi()
        about["cuda"], about["capability"] = torch.version.cuda, torch.cuda.get_device_capability(job.device)
        about["device_memory"] = torch.cuda.get_device_properties(job.device).total_memory
    return about


def _nvidia_smi() -> dict[str, str]:
    """Return properties of the first GPU as reported by nvidia-smi, or only its name if nvidia-smi is missing or
    fails.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", "-i", "0"]
    if shutil.which("nvidia-smi") is not None:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip().splitlines()
        words = [word.strip() for word in found[0].split(",")] if found else []
        if len(words) == len(QUERY):
            return dict(zip(QUERY, words, strict=True))
    return {"name": torch.cuda.get_device_name()}


# ------------------------------------------------------------------------------------------------------- one part


def run_part(name: str, job: GpuJob) -> bool:
    """Run one part in this process. Return whether it succeeded.

    Results are written to `out`/name.json as they arrive. If the part fails, the error is also written, and advice is
    printed.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    path, began = job.out / f"{name}.json", time.perf_counter()
    try:
        about = machine(job)
    except Exception as error:
        print(f"{name}: the machine cannot be described: {type(error).__name__}: {error}\n{name}: {advice(error)}")
        return False

    def write(results: Results) -> None:
        seconds = time.perf_counter() - began
        record = {"part": name, "machine": about, "seconds": seconds, "results": results}
        write_text(path, json.dumps(record, indent=1, default=str) + "\n")
        print(f"{name}: {seconds:.0f} s, wrote {path}", flush=True)

    found: Results = {}
    try:
        for results in PARTS[name].run(job):
            found = dict(results)
            write(found)
    except Exception as error:
        told = traceback.format_exception(error)
        write(found | {"failed": f"{type(error).__name__}: {error}", "traceback": "".join(told)[-6000:]})
        print(f"{name}: {told[-1].strip().splitlines()[0]}\n{name}: {advice(error)}", flush=True)
        return False
    wrong = list(failures(found))
    for what in wrong:
        print(f"{name}: {what} failed; the end of its output is in {path}", flush=True)
    return not wrong


def failures(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of failed programs in the results `found` of a part. Timeouts do not count as failures."""
    if found.get("exit_code", 0) not in (0, TIMED_OUT):
        yield "its program"
    for name, own in found.items():
        if isinstance(own, Mapping) and own.get("exit_code", 0) not in (0, TIMED_OUT):
            yield name


def advice(error: Exception) -> str:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the device has too little free memory: stop other programs on it, and run this part again"
    if isinstance(error, MemoryLimitError):
        return "the host has too little free or page-lockable memory (ulimit -l): free some, and run this part again"
    if "C compiler" in text:
        return "Triton compiles its launchers with a C compiler: install gcc, or set CC, and run this part again"
    if "illegal memory access" in text or "device-side assert" in text:
        return (
            "a kernel accessed invalid memory: run this part again with CUDA_LAUNCH_BLOCKING=1, which names the "
            "launch, and send us its output with the file"
        )
    return "send us the file: it has the error, the machine and the earlier results"


# -------------------------------------------------------------------------------------------------------- command


def run_gpu(part: str | None, device: str, small: bool, out: Path | None) -> int:
    """Run one part, or all parts in sequence, each in its own process. Return 1 if a part failed, otherwise 0.

    Raises ConfigError if the device is a CPU and `small` is not set.
    """
    if device == "cuda" and not torch.cuda.is_available():
        for name in [part] if part else PARTS:
            print(f"{name}: skipped, no CUDA device was found (--device cpu --small checks that it runs)")
        return 0
    if device == "cpu" and not small:
        raise ConfigError("--device cpu does not measure a GPU: add --small to check that it runs")
    out = out or (ROOT / "out" / "gpu" if small else ROOT / "eval" / "results" / "gpu")
    if part:
        warnings.simplefilter("ignore")
        return 0 if run_part(part, GpuJob(torch.device(device), SMALL if small else GpuSize(), out)) else 1
    flags = ["--device", device, "--out", str(out), *(["--small"] if small else [])]
    return _run_all(flags, small)


def _run_all(flags: list[str], small: bool) -> int:
    """Run every part in its own process, so that one part's memory use and errors do not affect the next part."""
    failed = []
    for name, part in PARTS.items():
        if not small:
            print(f"{name}: about {part.minutes:g} minutes", flush=True)
        code, output = run_program([*CLI, "eval", "gpu", "--part", name, *flags], LIMIT + 60)
        print(output, end="", flush=True)
        if code == TIMED_OUT:
            print(f"{name}: stopped after {LIMIT + 60} s; results up to then are kept")
        elif code:
            failed.append(name)
    for name in failed:
        print(f"{name}: failed; make gpu PART={name} runs it again")
    return 1 if failed else 0
