"""Test that sessions and calibrations from one processor work on another, emulated by its instruction set level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offload_rt.utils.native_code import LEVEL_VARIABLE, available_levels

TURN = """
import json, sys
from offload_rt import LLM, SamplingParams
from offload_rt.utils.native_libraries import native_status

store, dtype = sys.argv[1:]
llm = LLM("reference", policy="infinigen", dtype=dtype)
with llm.session("book", store) as session:
    before = session.tokens
    prompt = "And then? " if before else open("book.txt").read()
    new = [event.token_id for event in session.send(prompt, SamplingParams(max_tokens=16, temperature=0))]
    print(json.dumps({
        "level": native_status().level, "loaded": session.loaded_tokens, "before": before, "tokens": session.tokens,
        "new": new, "lineage": llm.runner.policy.provenance_key,
    }))
"""


def turn(folder: Path, level: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Take a turn of the session in a new process that uses at most instruction set level `level`."""
    done = process(folder, level, dtype)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["level"] == level
    return found


def process(folder: Path, level: str, dtype: str) -> subprocess.CompletedProcess[str]:
    torch_level = "default" if level == "scalar" else "avx2" if level == "avx2" else "avx512"
    forced = {LEVEL_VARIABLE: level, "ATEN_CPU_CAPABILITY": torch_level}
    environment = os.environ | forced | {"OFFLOAD_RT_CACHE": str(folder / "cache")}
    command = (sys.executable, "-c", TURN, str(folder / "store"), dtype)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text("The night was dark, and the wind was cold. " * 30)
    return tmp_path


@pytest.mark.parametrize("upwards", [False, True], ids=["to a lower level", "to a higher level"])
def test_a_session_continues_at_another_level(upwards: bool, folder: Path) -> None:
    """Reuse the KV and the calibration of a process at one level in a process at another level."""
    highest, lower = available_levels()[-1], available_levels()[0]
    if highest == lower:
        pytest.skip("this processor has one level")
    lower = "avx2" if "avx2" in available_levels()[:-1] else lower
    levels = (lower, highest) if upwards else (highest, lower)
    first, second = (turn(folder, level) for level in levels)
    [artifact] = (folder / "cache").rglob("*.safetensors")
    assert artifact.parent.name == "skew"
    assert second["before"] == first["tokens"] and second["lineage"] == first["lineage"]
    assert second["loaded"] == len(first["tokens"]) - 1 and len(second["new"]) == 16


def test_a_session_of_another_dtype_is_refused(folder: Path) -> None:
    level = available_levels()[-1]
    turn(folder, level)
    done = process(folder, level, "float32")
    assert done.returncode != 0 and "dtype='bfloat16'" in done.stderr, done.stderr
