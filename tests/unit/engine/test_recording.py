"""Recordings: they hold what the policy selected, are whole however a run ends, and are refused if damaged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.engine import recording as recording_module
from offload_rt.engine.recording import Recording, RunInfo, RunWriter
from offload_rt.errors import InputError
from offload_rt.policies.infinigen.policy import InfiniGenState

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS = {"budget": 0.2, "sinks": 2, "recent": 8, "dense_layers": (0,)}


def info(**changes: object) -> RunInfo:
    known: dict[str, object] = {
        "model": "m", "fingerprint": "f", "policy": "infinigen", "options": {}, "layers": 3, "kv_heads": 2,
        "row_bytes": 64, "selecting": (1, 2), "sinks": 2, "recent": 4, "prompt_tokens": 20,
        "tokens": tuple(range(20)),
    }  # fmt: skip
    return RunInfo(**(known | changes))  # type: ignore[arg-type]


def made(folder: Path, steps: int = 30, seed: int = 0, **changes: object) -> Recording:
    """A recording of random selections."""
    drawn, about = random.Random(seed), info(**changes)
    writer = RunWriter(folder, about)
    for position in range(20, 20 + steps):
        for layer in about.selecting:
            count = drawn.randrange(0, 6)
            rows = [drawn.sample(range(2, position - 3), count) for _ in range(about.kv_heads)]
            writer.selected(position, layer, torch.tensor(rows, dtype=torch.int64).reshape(about.kv_heads, count))
    writer.close(range(20 + steps), None)
    return Recording.open(folder)


@pytest.mark.parametrize("policy", ["infinigen", "oracle", "quest"])
def test_a_recording_is_what_the_policy_selected(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny_model("llama"), tiny_prompt(150)
    monkeypatch.setattr(recording_module, "SHARD_BYTES", 600)  # several shards
    llm = LLM(model, policy=policy, policy_options=OPTIONS, enable_prefix_caching=False)
    plain = [event.token_id for event in llm.stream(prompt, GREEDY)]
    tokens = [event.token_id for event in llm.stream(prompt, GREEDY, tmp_path / "run")]
    assert tokens == plain
    run = Recording.open(tmp_path / "run")
    steps = list(run.steps())
    assert run.info.tokens == (*prompt, *tokens)
    assert run.info.selecting == (1, 2, 3)
    assert [position for position, _ in steps] == list(range(150, 161))
    assert len(list((tmp_path / "run").glob("*.safetensors"))) > 1
    assert llm.last_stats is not None
    rows = sum(rows.size for _, step in steps for rows in step)
    dense = sum(position + 1 - 10 for position, _ in steps) * run.info.kv_heads
    assert llm.last_stats.h2d_bytes == (rows + dense) * run.info.row_bytes
    for position, step in steps:
        for layer in step:
            assert (np.diff(layer, axis=1) > 0).all()
            assert layer.min() >= 2 and layer.max() <= position - 8


def test_repaired_rows_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[set[int]] = []
    repair = InfiniGenState.repair

    def spy(self: InfiniGenState, layer: int, q: torch.Tensor, visible: object, selection: object) -> object:
        extra = repair(self, layer, q, visible, selection)  # type: ignore[arg-type]
        both = selection.tokens if extra is None else torch.cat((selection.tokens, extra.tokens), 1)  # type: ignore
        chosen.append(set(both[0].tolist()))
        return extra

    monkeypatch.setattr(InfiniGenState, "repair", spy)
    options = {"alpha": 0.5, "max_fraction": 1.0, "max_missed_mass": 0.05, "recent": 8}
    llm = LLM(tiny_model("llama"), policy="infinigen", policy_options=options)
    list(llm.stream(tiny_prompt(120), GREEDY, tmp_path / "run"))
    steps = list(Recording.open(tmp_path / "run").steps())
    assert [set(rows[0].tolist()) for _, step in steps for rows in step] == chosen


def test_with_eviction_positions_are_recorded_not_slots(tmp_path: Path) -> None:
    options = {"budget": 0.3, "sinks": 2, "recent": 8}
    llm = LLM(tiny_model("llama"), policy="infinigen", policy_options=options, host_memory="256KiB", eviction="lru")
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    list(llm.stream(tiny_prompt(60), params, tmp_path / "run"))
    run = Recording.open(tmp_path / "run")
    assert llm.last_stats is not None and llm.last_stats.kv_bytes_host <= 256 << 10
    assert max(int(rows.max()) for _, step in run.steps() for rows in step) > 128 - 8


def test_a_recording_cut_short_is_whole(tmp_path: Path) -> None:
    llm = LLM(tiny_model("llama"), policy="infinigen", policy_options=OPTIONS)
    events: Iterator[object] = llm.stream(tiny_prompt(100), GREEDY, tmp_path / "run")
    for _ in range(5):
        next(events)
    events.close()  # type: ignore[attr-defined]
    run = Recording.open(tmp_path / "run")
    assert (len(run.info.tokens), len(list(run.steps()))) == (105, 4)


def test_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a recording"):
        Recording.open(tmp_path)
    run = made(tmp_path / "run")
    with pytest.raises(InputError, match="not empty"):
        RunWriter(tmp_path / "run", info())
    shard = next(run.folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(InputError, match="damaged"):
        list(run.steps())
    (run.folder / "run.json").write_text('{"format": "offload-rt recording", "version": 9}')
    with pytest.raises(InputError, match="version 9"):
        Recording.open(run.folder)


def test_the_command_records_beside_a_working_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book, run = tmp_path / "book.txt", str(tmp_path / "run")
    book.write_text("He said: </script><b>no</b> & so on. " * 12, encoding="utf-8")
    flags = ("--prompt-tokens", "150", "--max-new-tokens", "30", "--ignore-eos", "--recent", "8", "--record", run)
    kept = ("--working-set", "5", "--stats-json", str(tmp_path / "stats.json"))
    assert main(("generate", "reference", "--prompt-file", str(book), *flags, *kept)) == 0
    printed, stats = capsys.readouterr().err, json.loads((tmp_path / "stats.json").read_text())
    assert f"wrote {run}" in printed.replace("\n", "")
    assert stats["working_set_rows"] == 5 and stats["working_set_bytes"] > 0
    assert f"{stats['working_set_hit_rate']:.2%}" in printed and "hit rate of the selected" in printed
    pieces = json.loads((tmp_path / "run" / "run.json").read_text())["pieces"]
    assert "</script><b>no</b> & so on." in "".join(pieces)
    assert main(("generate", "reference", "--prompt-file", str(book), *flags)) == 2
    assert "it already exists" in capsys.readouterr().err
