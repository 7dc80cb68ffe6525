"""Test how the engine finds the longest context at which full attention is still as fast as selection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model

from offload_rt import LLM
from offload_rt.core import ModelGeometry
from offload_rt.engine import selection_cost
from offload_rt.engine.selection_cost import crossing, layer_seconds, measured_dense_until
from offload_rt.models.registry import adapter_for
from offload_rt.policies.options import AutoOptions
from offload_rt.utils.native_code import LEVEL_VARIABLE

NEVER = 1 << 40
GEOMETRY = adapter_for(tiny_model("llama")).geometry


def synthetic_geometry(layers: int) -> ModelGeometry:
    return selection_cost._synthetic(GEOMETRY, layers)


@pytest.mark.parametrize(
    ("short", "long", "expected"),
    [
        ((1.0, 2.0), (6.0, 5.0), 2048),  # equal times in the middle, at 2,176 tokens
        ((1.0, 4.0), (6.0, 5.0), 3072),
        ((1.0, 2.0), (5.0, 5.5), 8192),  # selection becomes faster beyond the measured lengths
        ((1.0, 2.0), (5.0, 6.0), NEVER),
        ((1.0, 2.0), (5.0, 9.0), NEVER),
        ((2.0, 1.0), (6.0, 4.0), 0),  # always faster
        ((2.0, 1.0), (6.0, 5.5), 0),  # always faster, with noise
    ],
)
def test_the_crossing_follows_from_two_lengths(
    short: tuple[float, float], long: tuple[float, float], expected: int
) -> None:
    assert crossing([(256, *short), (4096, *long)]) == expected


def fake_clock(durations: list[float]) -> Callable[[], float]:
    """Return a clock with which successive measurements take the given durations."""
    readings: Iterator[float] = iter([reading for duration in durations for reading in (0.0, duration)])
    return lambda: next(readings)


def test_the_time_of_a_layer_is_its_fastest_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    # Times of two layers with full attention, then of two layers with selection. The first repeat is a warm-up.
    repeats = [[1, 1, 1, 1], [5, 60, 3, 3], [70, 5, 40, 2], [6, 7, 30, 30]]
    clock = fake_clock([float(each) for repeat in repeats for each in repeat])
    monkeypatch.setattr(selection_cost, "perf_counter", clock)
    full, selecting = layer_seconds(AutoOptions(), synthetic_geometry(2), torch.float32, 256)
    assert (full, selecting) == (5.0, 2.5)
    with pytest.raises(StopIteration):  # every reading was used
        clock()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"approximate_kv": "off", "scorer": "int8"},
        {"source": "residual"},
        {"source": "attention_input", "dense_layers": (1, 29)},
        {"approximate_kv": "off", "scorer": "partial", "columns": "prompt"},
    ],
)
def test_steps_with_selection_attend_to_fewer_tokens(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []

    class RecordingRunner(selection_cost.Runner):
        def free(self, sequence: Any) -> None:
            sequence.trace.flush_pending()
            shares.extend(sum(step) / len(step) for step in sequence.trace.attended)
            super().free(sequence)

    monkeypatch.setattr(selection_cost, "Runner", RecordingRunner)
    layer_seconds(AutoOptions(**options), synthetic_geometry(2), torch.float32, 512)
    assert shares[::2] == [1.0] * selection_cost.REPEATS and max(shares[1::2]) < 0.3


def test_measuring_does_not_change_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    layer_seconds(AutoOptions(), synthetic_geometry(1), torch.float32, 256)
    assert torch.rand(1) == expected


@pytest.fixture
def measurement_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Replace the measurement with a function that returns 1,024. Return a list that records its calls."""
    calls: list[object] = []
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path))
    monkeypatch.setattr(selection_cost, "_measure", lambda *inputs: calls.append(inputs) or 1024)
    return calls


def test_each_configuration_is_measured_once(measurement_calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    options = AutoOptions()
    for _ in range(2):
        assert measured_dense_until(options, GEOMETRY, torch.float32) == 1024
    assert len(measurement_calls) == 1
    assert measured_dense_until(options, synthetic_geometry(1), torch.float32) == 1024
    assert len(measurement_calls) == 1
    measured_dense_until(options, GEOMETRY, torch.bfloat16)
    measured_dense_until(AutoOptions(max_fraction=0.1), GEOMETRY, torch.float32)
    measured_dense_until(AutoOptions(source="residual"), GEOMETRY, torch.float32)
    measured_dense_until(options, replace(GEOMETRY, head_dim=2 * GEOMETRY.head_dim), torch.float32)
    monkeypatch.setattr(selection_cost.team, "threads", lambda: 7)
    measured_dense_until(options, GEOMETRY, torch.float32)
    monkeypatch.setenv(LEVEL_VARIABLE, "scalar")
    measured_dense_until(options, GEOMETRY, torch.float32)
    monkeypatch.setattr(selection_cost, "processor_name", lambda: "another processor")
    measured_dense_until(options, GEOMETRY, torch.float32)
    assert len(measurement_calls) == 8


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"dense_until": -1}', '{"dense_until": "512"}', "{" * 2000])
def test_a_damaged_entry_is_measured_again(text: str, measurement_calls: list[object], tmp_path: Path) -> None:
    measured_dense_until(AutoOptions(), GEOMETRY, torch.float32)
    [entry] = (tmp_path / "selection").iterdir()
    entry.write_text(text)
    for _ in range(2):
        assert measured_dense_until(AutoOptions(), GEOMETRY, torch.float32) == 1024
    assert len(measurement_calls) == 2


def test_a_cache_that_cannot_be_written_is_reported(
    measurement_calls: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "selection").touch()
    assert measured_dense_until(AutoOptions(), GEOMETRY, torch.float32) is None
    assert "could not be stored, so `auto` uses a fixed length" in caplog.text


def test_all_processes_use_the_first_stored_value(
    measurement_calls: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*inputs: object) -> int:
        # Another process stores its value during this measurement.
        (tmp_path / "selection").mkdir()
        (tmp_path / "selection" / selection_cost._key(*inputs)).write_text('{"dense_until": 512}')  # type: ignore[arg-type]
        return 2048

    monkeypatch.setattr(selection_cost, "_measure", measure)
    for _ in range(2):
        assert measured_dense_until(AutoOptions(), GEOMETRY, torch.float32) == 512


def test_the_pool_is_locked_during_a_measurement(
    measurement_calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a running engine could execute steps, they would distort the measured times."""
    llm = LLM(tiny_model("llama"), host_memory="8MiB", policy="full", verify="off")
    entered: list[bool] = []

    def enter() -> None:
        entered.append(llm.runner.pool.lock._lock.acquire(blocking=False))

    def measure(*inputs: object) -> int:
        other = Thread(target=enter)
        other.start()
        other.join()
        return 1024

    monkeypatch.setattr(selection_cost, "_measure", measure)
    assert llm.under("auto").runner.policy.dense_until == 1024
    assert entered == [False]
