"""Test the prediction of a decode step's time from bytes and instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support import predicted_step
from support.scripts import load_docs_script

CODE = """
    /*0000*/  MOV R1, c[0x0][0x28] ;
    /*0010*/  LDG.E R2, [R4.64] ;
    /*0020*/  FADD R2, R2, R3 ;
    /*0030*/  @P0 BRA 0x10 ;
    /*0040*/  @P1 BRA 0x0 ;
    /*0050*/  EXIT ;
"""
"""A loop of three instructions in a loop of five."""


@pytest.mark.parametrize(("trips", "count"), [((), 6), ((4,), 15), ((4, 2), 29), ((0,), 3)])
def test_instructions_of_loops_count_once_per_trip(trips: tuple[int, ...], count: int) -> None:
    assert predicted_step.executed(CODE, trips) == count


def test_prediction_is_a_lower_bound_of_each_measured_part() -> None:
    *rows, _ = [line.split("|") for line in load_docs_script("results").predicted().splitlines()[2:]]
    assert len(rows) == 8 and all(float(predicted) < float(measured) for *_, predicted, measured, _ in rows)
    names = [name for row in predicted_step.predict_parts() for name in row.traced]
    assert len(set(names)) == len(names)


def test_full_attention_with_kv_on_the_device_is_predicted_from_weights_and_kv() -> None:
    weights, _, attention, _ = predicted_step.predict_full_parts()
    assert weights.device_bytes == 2 * 7_504_658_432  # parameters of an 8B Llama without its input embeddings
    assert attention.device_bytes == 131_072 * 131_072  # tokens, bytes per token
    last = load_docs_script("results").predicted().splitlines()[-1].split("|")
    assert last[1].strip() == "step of `full`, KV on the device" and 11 < float(last[4]) < 13 and last[6].strip() == ""


@pytest.mark.slow
@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="compiles 25 kernels")
def test_recorded_counts_are_those_of_the_present_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-P", predicted_step.__file__, "--print"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=True)
    found, recorded = json.loads(done.stdout), json.loads(predicted_step.FILE.read_text("utf-8"))["results"]
    steps = [(found["rows"], recorded["rows"]), (found["full"]["rows"], recorded["full"]["rows"])]
    for now, then in (pair for rows in steps for pair in zip(*rows, strict=True)):
        assert now.pop("instructions") == pytest.approx(then.pop("instructions"), rel=0.03), now["name"]
    assert json.loads(json.dumps(found)) == recorded
