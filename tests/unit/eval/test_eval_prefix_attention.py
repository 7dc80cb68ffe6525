"""The tables of shared prefixes: every one is written, and what it counts adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload_rt.cli import main
from offload_rt.eval.serving import fragmentation, prefix_attention
from offload_rt.eval.serving.fragmentation import KINDS, Contiguous, Job, Pool, jobs, wasted

SLOTS = 1 << 13


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_attention, "LEAST_SECONDS", 0.0)
        tables = ["attention", "steps", "workload", "fragmentation"]
        assert main(["eval", "sharing", "--small", "--only", ",".join(tables), "--out", str(out)]) == 0
    return out


def rows(out: Path, name: str) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((out / f"sharing_{name}.json").read_text())["rows"]
    return found


def test_only_cells_with_sharing_have_segments(written: Path) -> None:
    for row in rows(written, "attention"):
        assert bool(row["segments"]) == (row["batch"] > 1 and row["prefix"] > 0)


def test_the_workload_saves_all_of_the_shared_part(written: Path) -> None:
    apart, together, sparse_apart, sparse_together = rows(written, "workload")
    assert together["prefill_saved"] == pytest.approx(1) and together["kv_saved"] == pytest.approx(1)
    assert sparse_together["step_mib"] < sparse_apart["step_mib"] < apart["step_mib"] >= together["step_mib"]


def test_a_step_without_attention_is_the_quickest(written: Path) -> None:
    assert all(row["none"] > max(row["apart"], row["segments"]) for row in rows(written, "steps") if row["batch"] > 1)


def test_waste_is_drawn_with_its_numbers_beside_it(written: Path) -> None:
    assert (written / "sharing_waste_by_kind.png").stat().st_size > 5_000
    for row in rows(written, "waste"):
        assert sum(row[kind] for kind in KINDS) == pytest.approx(1)


def test_waste_by_kind_of_each_memory() -> None:
    shares = {how: wasted(Contiguous(SLOTS, how), jobs(100, 1), SLOTS) for how in ("longest", "power of two", "exact")}
    ours = wasted(Pool(SLOTS), jobs(100, 1), SLOTS)
    assert shares["exact"]["internal"] == 0 < shares["power of two"]["internal"] < shares["longest"]["internal"]
    assert ours["internal"] * SLOTS <= 63 * ours["batch"], "at most a chunk less one slot each"
    assert ours["used"] > shares["exact"]["used"] > shares["power of two"]["used"] > shares["longest"]["used"]


def test_a_gap_between_two_owners_is_used_again() -> None:
    memory = Contiguous(100, "exact")
    first, second, third = Job(10, 40), Job(10, 40), Job(10, 30)
    assert memory.admit(first) and memory.admit(second) and not memory.admit(third)
    memory.end(first)
    assert memory.admit(third) and memory.running == [third, second]
    assert fragmentation._kinds(memory, 100) == {"used": 20, "reserved": 50, "internal": 0, "external": 30}


def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "sharing", "--repeats", "0"]) == 2
    assert capsys.readouterr().err == "offload-rt: --repeats 0 must be at least 1\n"
