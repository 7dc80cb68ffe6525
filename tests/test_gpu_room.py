"""What `make gpu` runs, where there is no GPU: parts are skipped and say so; in small, on the CPU, they run; README's
section is made from their files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_rt.cli import main
from offload_rt.errors import InputError
from offload_rt.eval.speed import kernels
from offload_rt.eval.suites import gpu, gpu_readme

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_every_part_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["eval", "gpu", "--out", str(tmp_path / "gpu")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == list(gpu.PARTS) and all("skipped" in line for line in said)
    assert not (tmp_path / "gpu").exists()
    assert main(["eval", "gpu", "--device", "cpu"]) == 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "REPEATS", 1)
        for part in ("kernels", "decode", "prefill", "sessions"):
            assert main(["eval", "gpu", "--part", part, "--device", "cpu", "--small", "--out", str(out)]) == 0
    return out


def read(results: Path, part: str) -> Any:
    return json.loads((results / f"{part}.json").read_text())


def test_every_result_says_on_what_it_was_measured(results: Path) -> None:
    for part in ("kernels", "decode", "prefill", "sessions"):
        about = read(results, part)["machine"]
        assert {"host_to_device", "device_to_host", "device"} == set(about["bandwidth"])
        assert about["commit"] and about["versions"]["torch"] and about["finished"]


def test_kernels_are_within_their_bounds_and_have_floors(results: Path) -> None:
    rows = read(results, "kernels")["results"]["rows"]
    assert all(row["error"] <= 1 and row["ms"] > 0 and row["floor_ms"] > 0 for row in rows)
    assert {row["kernel"].partition(",")[0] for row in rows} == {
        "gather_rows", "partial_scores", "quantised_scores", "select_tokens", "attend_counted", "attend_runs",
        "append_partial",
    }  # fmt: skip


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernels.dispatch.attend_counted

    def wrong(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(q, *rest)
        return out + 1e-3, lse

    monkeypatch.setattr(kernels.dispatch, "attend_counted", wrong)
    [case] = kernels._attend(CPU, kernels.SMALL)
    assert case.error() > 1


def test_a_program_that_does_not_end_is_interrupted_and_one_that_fails_is_told(tmp_path: Path) -> None:
    interruptible = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler)"  # also behind nohup
    endless = f"{interruptible}; print('begun', flush=True); time.sleep(60)"
    code, output = gpu._run([sys.executable, "-c", endless], 2)
    assert code == 124 and "begun" in output and "KeyboardInterrupt" in output
    test = tmp_path / "test_one.py"
    test.write_text("def test_one():\n    assert False, 'seen'\n\n\ndef test_two():\n    pass\n")
    found = gpu._pytest([str(test), "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", "/dev/null"], 100)
    assert (found["exit_code"], found["tests"], found["failures"], found["passed"]) == (1, 2, 1, 1)
    assert "seen" in found["output"]


def test_the_section_is_made_from_the_files_alone(results: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{gpu_readme.BEGIN}\nwritten before\n{gpu_readme.END}\n\nafter\n")
    gpu_readme.write_readme(readme, folder)
    assert "nothing here has been measured" in readme.read_text()
    for path in results.glob("*.json"):
        (folder / path.name).write_text(path.read_text())
    gpu_readme.write_readme(readme, folder)
    text = readme.read_text()
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and "written before" not in text
    decode = read(results, "decode")["results"]["timings"]
    assert all(f"| {t['name']} | {t['median']:.1f} |" in text for t in decode)
    assert "**Kernels**" in text and "**Prefill**" in text and "Not run: tests, accuracy, train." in text
    assert f"![Time per token over context](results/{gpu_readme.PICTURE})" in text
    assert (folder / gpu_readme.PICTURE).stat().st_size > 5_000
    once = readme.read_bytes()
    gpu_readme.write_readme(readme, folder)
    assert readme.read_bytes() == once


def test_a_readme_without_marks_and_a_broken_file_are_refused(tmp_path: Path, capsys: Any) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing")
    assert main(["eval", "gpu-readme", "--page", str(readme), "--results", str(tmp_path)]) == 2
    assert "has no lines" in capsys.readouterr().err
    (tmp_path / "kernels.json").write_text("{}")
    with pytest.raises(InputError, match="no result of `make gpu`"):
        gpu_readme.load(tmp_path)


def test_the_measurements_page_has_the_marks_and_says_what_its_files_say() -> None:
    text = (gpu.ROOT / "docs" / "pages" / "measurements.md").read_text("utf-8")
    folder = gpu.ROOT / "eval" / "results" / "gpu"
    inside = text.partition(gpu_readme.BEGIN)[2].partition(gpu_readme.END)[0].strip()
    assert inside == gpu_readme.section(gpu_readme.load(folder), "../../eval/results/gpu").strip()
