"""Test the parts of `make gpu` in toy size on a simulated device, and the advice given for parts that fail."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.cuda_simulator import Late, simulated
from support.tiny_models import tiny_checkpoint

from offload_rt.cli import main
from offload_rt.errors import MemoryLimitError
from offload_rt.eval import cli as measures
from offload_rt.eval.speed import bench, kernels
from offload_rt.eval.suites import gpu, gpu_parts, gpu_trace, gpu_trained, programs
from offload_rt.eval.suites.gpu_job import SMALL, GpuJob, GpuSize, PrefillPoint, TracePoint
from offload_rt.models import loading

CPU = torch.device("cpu")
ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
pytestmark = pytest.mark.slow

TINY = replace(
    SMALL,
    kernels=kernels.KernelSize(1 << 12, 64, 0.05, 2, 32, 16, 1, programs=(8,), outs=16),
    decode=replace(SMALL.decode, shape=("tiny",), layers=None if ALL else 1, contexts=(128, 192) if ALL else (128,)),
    prefills=(PrefillPoint("tiny", 64, ("transformers", "full", "infinigen"), 1),),
    traced=(TracePoint(128, 1, 0.1, ("infinigen-default", "resident", "full-device")),),
    trained_prompts=(16,),
    trained_tokens=2,
    histories=(80,),
    policies=("--policies", "infinigen,h2o,quest,streaming" if ALL else "infinigen", "--budgets", "0.2"),
    perplexity=("--context", "12", "--windows", "1", "--set", "sinks=1", "--set", "recent=2"),
    needles=("--lengths", "160", "--passages", "1", "--kinds", "single"),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_all_parts_are_skipped_without_a_cuda_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["eval", "gpu", "--out", str(tmp_path / "gpu")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(gpu_parts.PARTS) and all(
        "skipped" in line for line in lines
    )
    assert not (tmp_path / "gpu").exists()
    assert main(["eval", "gpu", "--device", "cpu"]) == 2


# ------------------------------------------------------------------------------------------------- all parts, simulated


def run_in_this_process(command: Sequence[str], limit: float, **variables: str) -> tuple[int, str]:
    """Replacement for `run_program` that runs evaluations in this process, where the device is simulated.

    For pytest and for some evaluations, it only writes result files.
    """
    assert limit <= gpu_parts.LIMIT
    name, *flags = command[len(programs.CLI) + 1 :]
    if "/trained_" in command[-1] or (name == "retrieval" and not ALL):
        parser = argparse.ArgumentParser()
        measures.MEASURES[name].add_flags(parser)
        out = Path(parser.parse_args(flags).out)
        out.mkdir(exist_ok=True)
        (out / f"{name}.json").write_text('{"rows": []}')
        return 0, ""
    if tuple(command[: len(programs.CLI)]) == programs.CLI:
        return main(list(command[len(programs.CLI) :])), ""
    assert all((programs.ROOT / word).exists() for word in command if word.startswith("tests/"))
    [report] = [word.removeprefix("--junitxml=") for word in command if word.startswith("--junitxml=")]
    wrong = int("racecheck" in command)
    Path(report).write_text(f'<r><testsuite tests="3" failures="{wrong}" errors="0" skipped="1"/></r>')
    return wrong, "seen"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all parts once, and return the folder with their results. Only racecheck fails."""
    if os.environ.get("PYTEST_XDIST_WORKER") is None:
        return run_all_parts(tmp_path_factory.mktemp("gpu"), tmp_path_factory.mktemp("data"))
    # with pytest-xdist, the first worker creates the results for all workers
    shared = tmp_path_factory.getbasetemp().parent / "gpu_results"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            made = run_all_parts(tmp_path_factory.mktemp("gpu"), tmp_path_factory.mktemp("data"))
            shutil.copytree(made, shared)
    return shared


def run_all_parts(out: Path, data: Path) -> Path:
    text = Path(GpuSize.models[0].parents[1], "data", "black_arrow.txt").read_text("utf-8")
    (data / "books").mkdir()
    book = data / "books" / "war_and_peace.txt"
    book.write_text(text[:6000])
    names = ("llama", "opt") if ALL else ("llama",)
    models = tuple(Path(tiny_checkpoint(data / name, name, num_hidden_layers=1)) for name in names)
    size = replace(TINY, models=models, trained=models, text=book)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_RT_DATA", str(data))
        patch.setattr(gpu_trace, "WARM_UP", 1)
        patch.setattr(bench, "WARM_UP", 1)
        patch.setattr(kernels, "WARM_UP", 0)
        patch.setattr(kernels, "REPLAYED", 2 if ALL else 1)
        if not ALL:  # test_triton_packed.py multiplies weights of every format
            patch.setattr(kernels, "FORMATS", {"Q4_K": kernels.FORMATS["Q4_K"]})
        for name, value in {"KV_HEADS": 1, "GROUP": 2, "D": 32, "HIDDEN": 256}.items():
            patch.setattr(kernels, name, value)
        patch.setattr(programs, "run_program", run_in_this_process)
        if not ALL:
            compare = gpu_trained._beside_transformers
            patch.setattr(
                gpu_trained, "_beside_transformers", lambda *given: compare(*given) if torch.float32 in given else []
            )
        # test_verification.py tests the comparison with transformers when a model is loaded
        patch.setattr(loading, "verify_once", lambda *given: None)
        # The profiler sees no simulated device.
        patch.setattr(gpu_trace, "profile", lambda activities: nullcontext(SimpleNamespace(events=list)))
        # shutil itself is not patched, because the simulator's build would find a compiler wrapper that does not exist
        patch.setattr(gpu_parts, "shutil", SimpleNamespace(which=lambda name: name))
        patch.setattr(gpu, "_nvidia_smi", lambda: dict.fromkeys(gpu.QUERY, "1"))
        with simulated(Late((1,))):
            for part in gpu_parts.PARTS:
                went_well = gpu.run_part(part, GpuJob(torch.device("cuda"), size, out))
                assert went_well == (part != "tests"), part
    return out


def read(results: Path, part: str) -> Any:
    return json.loads((results / f"{part}.json").read_text())


def test_results_describe_the_machine(results: Path) -> None:
    for part in gpu_parts.PARTS:
        about = read(results, part)["machine"]
        assert {"host_to_device", "device_to_host", "both_ways", "device"} == set(about["bandwidth"])
        assert about["commit"] and about["versions"]["torch"] and about["finished"] and about["device_memory"]


def test_all_baselines_are_timed(results: Path) -> None:
    found = read(results, "decode")["results"]
    skipped = found["about"]["skipped"]
    assert {row["context"] for row in found["rows"]} == set(TINY.decode.contexts)
    assert len({row["name"] for row in found["rows"]}) + len(skipped) == len(TINY.decode.baselines)
    assert all("optimum-quanto" in line for line in skipped)


def test_steps_are_traced_with_all_kv_on_the_device(results: Path) -> None:
    rows = {row["baselines"]: row for row in read(results, "trace")["results"]["rows"]}
    assert list(rows) == list(TINY.traced[0].baselines) and all(row["median_ms"] > 0 for row in rows.values())
    assert rows["infinigen-default"]["h2d_bytes_per_token"] > rows["full-device"]["h2d_bytes_per_token"] == 0


def test_accuracy_is_measured_for_every_policy(results: Path) -> None:
    found = read(results, "accuracy")["results"]["llama"]
    for report in ("perplexity", *(["retrieval"] if ALL else [])):
        assert {row["policy"].split()[0] for row in found[report]["rows"]} >= {"full", "infinigen"}


def test_kernel_results_are_within_bounds_and_have_minimum_times(results: Path) -> None:
    rows = read(results, "kernels")["results"]["rows"]
    assert all(row["error"] <= 1 and row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert {row["kernel"].partition(",")[0] for row in rows} == {
        "gather_rows", "partial_scores", "quantised_scores", "select_tokens", "attend_counted", "attend_runs",
        "append_partial", "linear", "unpack",
    }  # fmt: skip


def test_bandwidth_is_positive_with_a_coarse_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.time, "process_time", lambda: 7.0)
    assert all(rate > 0 for rate in kernels.bandwidth(CPU, 1 << 12, 1).values())


def test_inaccurate_kernel_exceeds_the_error_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kernels.dispatch.attend_counted

    def inaccurate(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = original(q, *rest)
        return out + 1e-3, lse

    monkeypatch.setattr(kernels.dispatch, "attend_counted", inaccurate)
    [case] = kernels._attend(CPU, kernels.SMALL)
    assert case.error() > 1


# ------------------------------------------------------------------------------------------------ programs, failures


def test_endless_programs_are_interrupted_and_failures_are_reported(tmp_path: Path) -> None:
    # nohup makes the process ignore SIGINT, so restore the handler
    interruptible = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"
    endless = f"{interruptible}; print('begun', flush=True); time.sleep(60)"
    code, output = programs.run_program([sys.executable, "-c", endless], 2)
    assert code == programs.TIMED_OUT and "begun" in output and "KeyboardInterrupt" in output
    test = tmp_path / "test_one.py"
    test.write_text("def test_one():\n    assert False, 'seen'\n\n\ndef test_two():\n    pass\n")
    found = programs.run_tests([str(test), "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"], 99)
    assert (found["exit_code"], found["tests"], found["failures"], found["passed"]) == (1, 2, 1, 1)
    assert "seen" in found["output"]


def test_race_found_by_racecheck_is_a_failure(results: Path) -> None:
    found = read(results, "tests")["results"]
    assert list(gpu.failures(found)) == ["racecheck"]
    assert found["marked gpu"]["passed"] == 2 and found["racecheck"]["output"] == "seen"


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "stop other programs on it"),
        (MemoryLimitError("cannot pin 2 GiB of host memory"), "ulimit -l"),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install gcc, or set CC"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "CUDA_LAUNCH_BLOCKING=1"),
        (KeyError("name"), "send us the file"),
    ],
)
def test_failed_part_prints_advice_and_keeps_its_results(
    error: Exception, advice: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(job: GpuJob) -> Iterator[dict[str, Any]]:
        yield {"first": 1}
        raise error

    monkeypatch.setitem(gpu_parts.PARTS, "kernels", gpu_parts.Part(part, 1))
    assert not gpu.run_part("kernels", GpuJob(CPU, TINY, tmp_path))
    output = capsys.readouterr().out
    assert advice in output and type(error).__name__ in output
    found = read(tmp_path, "kernels")["results"]
    assert found["first"] == 1 and type(error).__name__ in found["failed"] and "raise error" in found["traceback"]


def test_parts_run_in_separate_processes_and_failures_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    codes = {"kernels": 1, "tests": programs.TIMED_OUT}

    def report_exit(command: Sequence[str], limit: float) -> tuple[int, str]:
        part = command[command.index("--part") + 1]
        return codes.get(part, 0), f"{part}: output\n"

    monkeypatch.setattr(gpu, "run_program", report_exit)
    assert gpu.run_gpu(None, "cpu", True, tmp_path) == 1
    output = capsys.readouterr().out
    assert "kernels: failed; make gpu PART=kernels runs it again" in output and "tests: stopped after" in output
    assert all(f"{part}: output" in output for part in gpu_parts.PARTS) and output.count("failed") == 1


def test_nvidia_smi_is_used_with_torch_as_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'H100, 1, 5, 5, 16, 16, 80 MiB, 1980 MHz'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu._nvidia_smi()["name"] == "H100" and gpu._nvidia_smi()["pcie.link.width.max"] == "16"
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\n")
    with simulated(Late()):
        assert gpu._nvidia_smi() == {"name": "simulated"}


def test_kernels_part_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ALL:  # tests of models multiply weights of every format
        monkeypatch.setattr(kernels, "FORMATS", {"Q4_K": kernels.FORMATS["Q4_K"]})
        monkeypatch.setattr(kernels, "WARM_UP", 0)
    assert main(["eval", "gpu", "--part", "kernels", "--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    assert all(row["error"] <= 1 for row in read(tmp_path, "kernels")["results"]["rows"])
