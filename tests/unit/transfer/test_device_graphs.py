"""Test captured steps that read copies of KV blocks in place, on the simulated device."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.cuda_cells import (
    BLOCK_BYTES,
    GRAPHS,
    LATENT,
    LOW_BITS,
    SCHEDULES,
    SPARSE,
    USES_EARLIER_KV,
    Cell,
    joining,
    padded_states,
    replayed,
    sliding_replayed,
)
from support.cuda_simulator import simulated

MANY, FEW = 60 * BLOCK_BYTES, 2 * BLOCK_BYTES
CELLS = [
    Cell("full", "full", replayed, daily="late write-back"),
    Cell("batch sizes", "full", joining),
    Cell("a window", "full", sliding_replayed, model="qwen2", daily="seed 0"),
    Cell("gpt-oss", "full", sliding_replayed, model="gpt_oss"),
    Cell("hybrid", "full", padded_states, model="qwen3_5"),
    Cell("latent", "full", replayed, model=LATENT, daily="late prefetch and write-back"),
    Cell("earlier kv", "full", sliding_replayed, model=USES_EARLIER_KV),
    Cell("dense layer", "infinigen", replayed, SPARSE | {"dense_layers": (0,)}),
    Cell("dense layer, default", "infinigen", replayed, LOW_BITS | {"dense_layers": (1,)}, daily="late compute"),
]
ALL = os.environ.get("OFFLOAD_RT_SCHEDULES") == "all"
RUNS = [(one, name) for one in CELLS for name in (SCHEDULES if ALL else filter(None, [one.daily]))]


@pytest.mark.parametrize(("cell", "schedule"), RUNS, ids=str)
def test_captured_steps_with_copies_generate_the_tokens_of_a_cpu(cell: Cell, schedule: str, tmp_path: Path) -> None:
    expected = cell.run("cpu", tmp_path)
    with simulated(SCHEDULES[schedule]()):
        found = replace(cell, settings=GRAPHS | {"device_kv_memory": MANY}).run("cuda", tmp_path)
    assert [tokens for *tokens, _ in found] == [tokens for *tokens, _ in expected]
    assert cell.policy != "full" or [transferred for *_, transferred in found] == [0] * len(found)
