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


@pytest.mark.slow
def test_session_continues_at_lower_and_higher_instruction_set_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    if (compiler := find_compiler()) is not None:
        monkeypatch.setenv("CC", str(unoptimised_compiler(compiler, tmp_path / "quick")))
    highest = processor_level()
    below = available_levels()[: available_levels().index(highest)]
    if not below:
        pytest.skip("no level is lower than that of this process")
    lower = "avx2" if "avx2" in below else below[0]
    tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2, dtype=torch.bfloat16)
    run_high, run_low = partial(take_turn, str(tmp_path)), partial(take_turn_in_subprocess, tmp_path, lower)
    turns = [run_high(), run_low(), run_high()]
    assert [turn["level"] for turn in turns] == [highest, lower, highest]
    [artifact] = (tmp_path / "cache").rglob("*.safetensors")
    assert artifact.parent.name == "skew"
    for earlier, later in pairwise(turns):
        assert later["before"] == earlier["tokens"] and later["lineage"] == earlier["lineage"]
        assert later["loaded"] == len(earlier["tokens"]) - 1 and len(later["new"]) == 8
