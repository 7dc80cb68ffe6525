"""Test that a batch on two Ray Data engines answers each request once.

An engine and then the whole command are killed during the run. Needs OFFLOAD_RT_STRESS and ray.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.tiny_models import tiny_checkpoint, tiny_prompt

from offload_rt.cli import main

if not os.environ.get("OFFLOAD_RT_STRESS"):
    pytest.skip("a cluster, for minutes: make stress PART=ray", allow_module_level=True)
pytest.importorskip("ray.data", reason="ray is not installed: pip install '.[ray]'")

FAMILIES, EACH = 8, 4


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def begin(model: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a slow batch command with two engines, each with four concurrent requests."""
    flags = ["--policy", "full", "--device", "cpu", "--max-new-tokens", "300", "--temperature", "0", "--at-once", "4"]
    arguments = ["batch", model, str(folder / "in"), str(folder / "out"), "--ray", "2", *flags]
    return subprocess.Popen([sys.executable, "-m", "offload_rt", *arguments])


def wait_for(process: subprocess.Popen[bytes], path: Path, count: int) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or len(lines(path)) < count:
        assert process.poll() is None and time.monotonic() < deadline, "it ended, or stands still"
        time.sleep(0.05)


def engines(parent: int) -> list[psutil.Process]:
    """Return the actor processes of the command's cluster."""
    below = psutil.Process(parent).children(recursive=True)
    return [one for one in below if " ".join(one.cmdline()).startswith("ray::MapWorker")]


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2, max_position_embeddings=4096)
    beginnings = [tiny_prompt(150, seed=i) for i in range(FAMILIES)]
    requests = [
        {"id": f"{i} {j}", "prompt": beginning + tiny_prompt(9, seed=100 + j), "ignore_eos": True}
        for j in range(EACH)
        for i, beginning in enumerate(beginnings)
    ]
    (tmp_path / "in").write_text("".join(json.dumps(each) + "\n" for each in requests), encoding="utf-8")
    out = tmp_path / "out"
    command = begin(model, tmp_path)
    wait_for(command, out, EACH)
    working = engines(command.pid)
    assert len(working) == 2
    working[0].send_signal(signal.SIGKILL)
    wait_for(command, out, len(lines(out)) + 2 * EACH)
    assert len(engines(command.pid)) == 2, "another in its place"
    command.kill()
    command.wait()
    done = lines(out)
    assert EACH < len(done) < len(requests)
    assert begin(model, tmp_path).wait(300) == 0
    found = lines(out)
    assert found[: len(done)] == done and sorted(each["id"] for each in found) == sorted(r["id"] for r in requests)
    order = [each["id"].split()[0] for each in found]
    assert all(len(set(order[i : i + EACH])) == 1 for i in range(0, len(order), EACH)), "alike together"
    alone = tmp_path / "alone"
    flags = ["--policy", "full", "--max-new-tokens", "300", "--temperature", "0"]
    assert main(["batch", model, str(tmp_path / "in"), str(alone), *flags]) == 0
    assert {each["id"]: each for each in lines(alone)} == {each["id"]: each for each in found}
