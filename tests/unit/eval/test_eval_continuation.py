"""The side-by-side table: its bytes are the statistics' own, and bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_rt import LLM
from offload_rt.cli import main
from offload_rt.eval.quality.continuation import ScoredPassage, compare

BOOK = Path(__file__).parents[3] / "offload_rt/data/black_arrow.txt"


def test_bytes_per_selecting_layer_add_up_to_the_link_s() -> None:
    llm = LLM("reference", policy="full", host_memory="64MiB")
    passage = ScoredPassage.of(llm, BOOK.read_text()[:40_000], 300, 8, 0.1)
    full, sparse = compare(
        "reference", passage, {"full": ("full", {}), "sparse": ("infinigen", {"recent": 8, "dense_layers": (0, 3)})}
    )
    layers = llm.geometry.layers
    pair = 2 * llm.geometry.head_dim * 4 * llm.geometry.kv_heads
    assert full["link_mb"] * 1e6 == pytest.approx(sum(range(291, 299)) / 8 * layers * pair)
    dense = sum(n - 4 - 7 for n in range(291, 299)) / 8 * 2 * pair
    assert sparse["link_mb"] * 1e6 - dense == pytest.approx(sparse["sparse_link_mb"] * 1e6 * (layers - 2), rel=0.01)
    assert sparse["sparse_share"] < 0.125 and sparse["dense_layers"] == [0, 3] and full["sparse_share"] is None


def test_command_writes_its_table_and_refuses_a_short_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(BOOK.read_text()[:3000])
    flags = [
        "eval",
        "continuation",
        "reference",
        "--text",
        str(text),
        "--out",
        str(tmp_path),
        "--context",
        "120",
        "--scored",
        "6",
        "--start",
        "0",
    ]
    assert main(flags) == 0
    assert "| infinigen, preset paper |" in capsys.readouterr().out
    rows = json.loads((tmp_path / "side_by_side.json").read_text())["rows"]
    presets = ("default", "preset rows", "preset paper")
    assert [row["policy"] for row in rows] == ["full", *(f"infinigen, {name}" for name in presets)]
    assert main([*flags, "--context", "90000"]) == 2
    assert "too few for 90000" in capsys.readouterr().err
    assert main(["eval", "continuation", "reference", "--text", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
