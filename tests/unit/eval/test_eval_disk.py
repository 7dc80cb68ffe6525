"""`offload-rt eval disk` and `disk-layout`: what they count, on a context and a recording that were made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_checkpoint, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.engine.recording import Recording, RunInfo, RunWriter
from offload_rt.errors import InputError
from offload_rt.eval.simulate.key_clusters import places_by_cluster, recorded_places
from offload_rt.eval.speed import disk_tier
from offload_rt.kv_cache.disk.requests import BLOCK


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """30 steps of two layers and two heads over 2,000 tokens: the same 16 neighbours, and one other token each time."""
    info = RunInfo(
        "folder/m", "f", "infinigen", {}, 2, 2, 64, (0, 1), 4, 64, prompt_tokens=2000, tokens=tuple(range(2000))
    )
    writer = RunWriter(tmp_path / "run", info)
    for step in range(30):
        for layer in range(2):
            one = torch.cat((torch.arange(160, 176), torch.tensor([200 + 50 * step + layer])))
            writer.selected(2000 + step, layer, torch.stack((one, one + 10)))
    writer.close(list(range(2030)), None)
    return tmp_path / "run"


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def test_a_layout_is_counted_in_blocks_and_requests(run: Path, tmp_path: Path) -> None:
    """Rows of 256 bytes: 16 tokens a block. A gap of 0 bytes: blocks that touch share a request."""
    flags = ["--kept", "0,0.5", "--seek", "0", "--rate", "1000", "--out", str(tmp_path)]
    assert main(["eval", "disk-layout", str(run), *flags]) == 0
    alone, _, kept, together = rows_of(tmp_path / "disk_layout.json")
    whole = 2000 * 2 * 2 * 256
    assert (alone["layout"], alone["model"], alone["hit_rate"]) == ("by head", "m", 0)
    assert alone["wanted"] == pytest.approx(17 * 2 * 2 * 256 / whole)
    assert kept["missed"] == pytest.approx(1 * 2 * 2 * 256 / whole) and kept["requests"] == 4
    assert kept["blocks"] == kept["read"] == pytest.approx(4 * BLOCK / whole) == kept["time"]
    assert together["requests"] <= 4 and together["read"] >= kept["missed"]


def test_tokens_with_like_keys_lie_together() -> None:
    """Of three kinds of keys that take turns: most neighbours are of one kind, and each is there once."""
    kind, noise = torch.arange(60) % 3, torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(0))
    keys = torch.stack((torch.eye(8)[kind], -9 * torch.eye(8)[kind])) + noise / 100
    for own in places_by_cluster(keys, 5):
        assert sorted(own.tolist()) == list(range(60))
        assert (np.diff(kind.numpy()[np.argsort(own)]) != 0).sum() < 12


def test_a_recording_is_laid_out_by_clusters_of_its_models_keys(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2)
    with LLM(model, policy_options={"budget": 0.1, "recent": 8}) as llm:
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        list(llm.stream(tiny_prompt(700, seed=1), params, str(tmp_path / "run")))
    flags = ["--kept", "0", "--clusters", "16", "--seek", "0", "--out", str(tmp_path)]
    assert main(["eval", "disk-layout", str(tmp_path / "run"), *flags]) == 0
    by_head, _, clustered = rows_of(tmp_path / "disk_layout.json")
    assert (by_head["layout"], clustered["layout"]) == ("by head", "by clusters")
    assert clustered["missed"] == by_head["missed"] > 0 and clustered["blocks"] != by_head["blocks"]
    tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=3)
    with pytest.raises(InputError, match="its weights differ"):
        recorded_places(Recording.open(tmp_path / "run"), 16)


def test_drawn_selections_have_the_shape_that_was_asked_for() -> None:
    case = disk_tier.DiskCase(2, 2, 16, 4096, fraction=0.1, neighbours=3.0, stay=0.75)
    steps = [[one.numpy() for one in step] for step in disk_tier.drawn_steps(case, 12)]
    own = [step[1][0] for step in steps]
    assert all(step[0].shape == (2, 403) for step in steps) and all((np.diff(row) > 0).all() for row in own)
    assert all(row.min() >= disk_tier.SINKS and row.max() < 4096 - disk_tier.RECENT for row in own)
    again = [len(np.intersect1d(a, b)) / 403 for a, b in pairwise(own)]
    assert 0.7 < np.mean(again) < 0.85
    assert 2.5 < np.mean([403 / (1 + (np.diff(row) > 1).sum()) for row in own]) < 4


def test_steps_of_a_recording_and_of_a_drawn_context(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drawn one in the stress alone."""
    cases = [("a", ["--record", str(run)]), ("b", ["--contexts", "4k", "--steps", "4", "--fraction", "0.02"])]
    monkeypatch.setattr(disk_tier, "SPEED_BYTES", 4 << 20)
    flags = ["--disk", str(tmp_path / "rows"), "--host", "1.8", "--full-steps", "2", "--shape", "tiny"]
    for out, more in cases if "OFFLOAD_RT_STRESS" in os.environ else cases[:1]:
        assert main(["eval", "disk", *flags, *more, "--out", str(tmp_path / out)]) == 0
        full, selected = rows_of(tmp_path / out / "disk_steps.json")
        assert full["wanted_bytes"] == full["kv_bytes"] and full["read_bytes"] >= 0.9 * full["kv_bytes"]
        assert selected["wanted_bytes"] < 0.05 * full["wanted_bytes"] and selected["read_bytes"] < full["read_bytes"]
        assert selected["step_ms"] > 0 < selected["wanted_ms"] and selected["times_full"] > 0
        assert len(rows_of(tmp_path / out / "disk_speed.json")) == 8
    _, replayed = rows_of(tmp_path / "a" / "disk_steps.json")
    assert replayed["hit_rate"] > 0.8, "the sixteen that come again"
    assert list((tmp_path / "rows").iterdir()) == []


def test_a_prompt_from_disk_beside_one_in_memory(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2, max_position_embeddings=4096)
    (tmp_path / "text").write_text("It was a dark night. " * 200, encoding="utf-8")
    flags = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--disk", str(tmp_path / "rows")]
    more = ["--context", "700", "--repeats", "1", "--host", "0.6", "--dtype", "float32"]
    assert main(["eval", "disk-prefill", model, *flags, *more]) == 0
    memory, disk = rows_of(tmp_path / "out" / "disk_prefill.json")
    assert memory["where"] == "memory" and memory["cpu_s"] > 0 < disk["cpu_s"]
    assert disk["least"] == disk["over"] == disk["most"] == disk["cpu_s"] / memory["cpu_s"]
    assert disk["mb_written"] > 0.2 and disk["same"] == 1


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="a GB to write: make stress PART=disk")
@pytest.mark.parametrize(("context", "layers"), [("1024k", 2), ("256k", 8)])
def test_resident_memory_stays_within_64_mib_of_the_limit(context: str, layers: int, tmp_path: Path) -> None:
    """In a process of its own, where no other test has left memory with the allocator."""
    flags = ["--shape", "qwen-0.5b", "--layers", str(layers), "--contexts", context, "--host", "0.25", "--steps", "24"]
    folders = ["--disk", str(tmp_path / "rows"), "--out", str(tmp_path), "--full-steps", "2"]
    subprocess.run([sys.executable, "-m", "offload_rt", "eval", "disk", *flags, *folders], check=True)
    for row in rows_of(tmp_path / "disk_steps.json"):
        print(context, row["what"], f"{row['over_limit_mb'] / 1.048576:.0f} MiB over the limit")
        assert row["over_limit_mb"] < 64 * 1.048576


def test_a_recording_without_steps_is_refused(tmp_path: Path) -> None:
    info = RunInfo("m", "f", "infinigen", {}, 1, 1, 64, (0,), 4, 64, prompt_tokens=2000, tokens=tuple(range(2000)))
    RunWriter(tmp_path / "run", info).close(list(range(2001)), None)
    with pytest.raises(InputError, match="record 5 new tokens"):
        disk_tier.recorded_case(Recording.open(tmp_path / "run"), 64)
