"""Test that sessions and calibrations work on other processors. Lower instruction set levels simulate these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compilers import unoptimised_compiler
from support.levels import unload
from support.tiny_models import tiny_checkpoint

from offload_rt import LLM, SamplingParams
from offload_rt.utils.native_code import LEVEL_VARIABLE, available_levels, find_compiler, processor_level
from offload_rt.utils.native_libraries import native_status


def take_turn(folder: str) -> dict[str, Any]:
    llm = LLM(f"{folder}/model", policy="infinigen", dtype="bfloat16", host_memory="4MiB")
    with llm.session("book", f"{folder}/store") as session:
        before = session.tokens
        prompt = "And then? " if before else "The night was dark, and the wind was cold. " * 10
        new = [event.token_id for event in session.send(prompt, SamplingParams(max_tokens=8, temperature=0))]
        return {
            "level": native_status().level, "loaded": session.loaded_tokens, "before": before,
            "tokens": session.tokens, "new": new, "lineage": llm.runner.policy.provenance_key,
        }  # fmt: skip


SCRIPT = "import json, runpy, sys; print(json.dumps(runpy.run_path(sys.argv[1])['take_turn'](sys.argv[2])))"


def take_turn_in_subprocess(folder: Path, level: str) -> dict[str, Any]:
    """Run a turn in a new process in which C code and torch use at most the instruction set level `level`."""
    limits = {LEVEL_VARIABLE: level, "ATEN_CPU_CAPABILITY": "default" if level == "scalar" else level}
    environment = os.environ | limits | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = (sys.executable, "-c", SCRIPT, __file__, str(folder))
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def assert_turns_continue(turns: list[dict[str, Any]]) -> None:
    for earlier, later in pairwise(turns):
        assert later["before"] == earlier["tokens"] and later["lineage"] == earlier["lineage"]
        assert later["loaded"] == len(earlier["tokens"]) - 1 and len(later["new"]) == 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2, dtype=torch.bfloat16)
    return tmp_path


@pytest.fixture
def lower_level() -> str:
    below = available_levels()[: available_levels().index(processor_level())]
    if not below:
        pytest.skip("no level is lower than that of this process")
    return "avx2" if "avx2" in below else below[0]


def test_session_continues_with_c_code_of_another_level(
    folder: Path, lower_level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = []
    for level in (processor_level(), lower_level, processor_level()):
        monkeypatch.setenv(LEVEL_VARIABLE, level)
        unload()
        turns.append(take_turn(str(folder)))
        assert turns[-1]["level"] == level
    unload()
    assert_turns_continue(turns)


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="needs a process: make stress PART=sessions")
def test_session_continues_at_lower_and_higher_instruction_set_level(
    folder: Path, lower_level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(folder / "cache"))
    if (compiler := find_compiler()) is not None:
        monkeypatch.setenv("CC", str(unoptimised_compiler(compiler, folder / "quick")))
    highest = processor_level()
    run_high, run_low = partial(take_turn, str(folder)), partial(take_turn_in_subprocess, folder, lower_level)
    turns = [run_high(), run_low(), run_high()]
    assert [turn["level"] for turn in turns] == [highest, lower_level, highest]
    [artifact] = (folder / "cache").rglob("*.safetensors")
    assert artifact.parent.name == "skew"
    assert_turns_continue(turns)
