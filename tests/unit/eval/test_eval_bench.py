"""Test the speed benchmark, except its timing: planted tokens are selected, and all baselines use the same context."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import architecture
from support.cuda_simulator import Late, simulated

from offload_rt.cli import main
from offload_rt.core import VisibleTokens
from offload_rt.errors import ConfigError, InputError
from offload_rt.eval.core.report import say_nothing
from offload_rt.eval.speed import bench, cpu_kernels
from offload_rt.eval.speed.baselines import MAKERS, TOKEN, BenchInputs, OffloadBaseline, Shape, TransformersBaseline
from offload_rt.eval.speed.bench import BenchConfig, make_inputs, run_bench
from offload_rt.eval.speed.synthetic_kv import RESIDENT, SyntheticKV
from offload_rt.kernels import low_bit_sequence, native
from offload_rt.model_runner.cuda_graphs import GraphSteps
from offload_rt.models.registry import adapter_for
from offload_rt.utils.native_code import LEVEL_VARIABLE, available_levels

LENGTH, FRACTION = 2048, 0.05

SHAPES = {
    "mha": Shape(3, 64, 96, 4, 4, 16, 199, torch.float32),
    "gqa": Shape(3, 64, 96, 4, 2, 32, 199, torch.float32),
}


@pytest.fixture(params=SHAPES, scope="module")
def inputs(request: pytest.FixtureRequest) -> BenchInputs:
    model = SHAPES[request.param].model(LENGTH + 256, torch.device("cpu"))
    return make_inputs(model, LENGTH, LENGTH + 128, FRACTION)


@pytest.fixture(params=SHAPES, scope="module")
def uneven_inputs(request: pytest.FixtureRequest) -> BenchInputs:
    """Return inputs in which the number of planted tokens per head is 50 % to 150 % of the mean."""
    model = SHAPES[request.param].model(LENGTH + 256, torch.device("cpu"))
    return make_inputs(model, LENGTH, LENGTH + 128, FRACTION, spread=0.5, batch=2)


def test_contexts_of_sliding_windows_are_refused() -> None:
    with pytest.raises(AssertionError, match="outside a sliding window"):
        SyntheticKV.draw(adapter_for(architecture("gemma4")).geometry, LENGTH, FRACTION)


def make_filled(inputs: BenchInputs, name: str) -> Any:
    baseline = MAKERS[name](inputs)
    for layer, kv in enumerate(inputs.synthetic.layers()):
        baseline.fill(layer, kv)
    return baseline


def record_selections(ours: OffloadBaseline, steps: int) -> list[tuple[int, torch.Tensor]]:
    """Return (layer, tokens) for every selection."""
    found: list[tuple[int, torch.Tensor]] = []
    state: Any = ours._batch[0].state
    select = state.select

    def record(layer: int, q: torch.Tensor, visible: VisibleTokens) -> Any:
        selection = select(layer, q, visible)
        found.append((layer, selection.tokens))
        return selection

    state.select = record
    for _ in range(steps):
        ours.step()
    del state.select
    return found


@pytest.mark.parametrize("name", ["infinigen", "infinigen-paper"])
def test_only_planted_tokens_are_selected(inputs: BenchInputs, name: str) -> None:
    found = record_selections(make_filled(inputs, name), 3)
    assert len(found) == 3 * inputs.synthetic.geometry.layers
    for layer, tokens in found:
        share = tokens.shape[1] / (LENGTH - sum(RESIDENT))
        assert 0.9 * FRACTION <= share <= 1.1 * FRACTION
        assert torch.equal(tokens.sort(1).values, torch.stack(inputs.synthetic.tokens[layer])), f"layer {layer}"


@pytest.mark.parametrize("name", ["infinigen", "infinigen-paper", "infinigen-tail4"])
def test_the_largest_fraction_of_planted_tokens_is_selected(name: str) -> None:
    fraction = BenchConfig(fraction=0.2).fraction
    model = SHAPES["gqa"].model(1024, torch.device("cpu"))
    inputs = make_inputs(model, 640, 700, fraction)
    for layer, tokens in record_selections(make_filled(inputs, name), 2):
        assert torch.equal(tokens.sort(1).values, torch.stack(inputs.synthetic.tokens[layer])), f"layer {layer}"


def test_each_head_selects_its_planted_tokens_first(uneven_inputs: BenchInputs) -> None:
    """All heads of a layer select the same number of tokens, the mean number of planted tokens.

    A head with fewer planted tokens fills up with tokens planted for other heads.
    """
    for layer, tokens in record_selections(make_filled(uneven_inputs, "infinigen"), 2):
        planted = [set(rows.tolist()) for rows in uneven_inputs.synthetic.tokens[layer]]
        n = tokens.shape[1]
        assert n == -(-sum(map(len, planted)) // len(planted))
        for own, chosen in zip(planted, tokens, strict=True):
            selected = set(chosen.tolist())
            assert len(selected) == n and (
                selected <= own if len(own) >= n else own <= selected <= set().union(*planted)
            )


def test_counts_by_head_are_as_requested(uneven_inputs: BenchInputs) -> None:
    geometry = uneven_inputs.synthetic.geometry
    n = round(FRACTION * (LENGTH - sum(RESIDENT)))
    for heads in uneven_inputs.synthetic.tokens:
        counts = sorted(map(len, heads))
        assert sum(counts) == n * geometry.kv_heads
        assert counts[0] == round(n / 2) and abs(counts[-1] - 1.5 * n) <= 2


def test_planted_tokens_differ_between_heads_and_are_not_resident(inputs: BenchInputs) -> None:
    tokens = inputs.synthetic.tokens
    assert not torch.equal(tokens[0][0], tokens[0][1]) and not torch.equal(tokens[0][0], tokens[1][0])
    for row in (row for heads in tokens for row in heads):
        assert row.min() >= RESIDENT[0] and row.max() < LENGTH - RESIDENT[1]
        assert len(row.unique()) == len(row) == len(tokens[0][0])


def test_artifact_has_the_moments_of_the_planted_keys(inputs: BenchInputs) -> None:
    artifact = inputs.synthetic.artifact()
    for layer, kv in enumerate(inputs.synthetic.layers()):
        skewed = torch.bmm(kv.k, artifact.key[layer])
        # 2,048 samples of deviation 0.1: means within 5 * 0.1 / 45, deviations within 5 * 0.1 / 64
        torch.testing.assert_close(artifact.key_mean[layer], skewed.mean(1), rtol=0.01, atol=0.012)
        torch.testing.assert_close(artifact.key_std[layer], skewed.std(1), rtol=0.01, atol=0.008)
        identity = torch.eye(skewed.shape[-1]).expand_as(artifact.key[layer])
        torch.testing.assert_close(artifact.query[layer] @ artifact.key[layer].mT, identity, rtol=0, atol=1e-5)


def test_repeated_calls_give_the_same_rows(inputs: BenchInputs) -> None:
    for a, b in zip(inputs.synthetic.layers(), inputs.synthetic.layers(), strict=True):
        assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)


def decode_logits(ours: OffloadBaseline) -> torch.Tensor:
    return ours.runner.decode(ours._batch)


def test_full_logits_equal_transformers(inputs: BenchInputs) -> None:
    ours: Any = make_filled(inputs, "full")
    ours.runner.adapter = adapter_for(inputs.model)  # without the planted vector, which transformers' queries lack
    peer: Any = make_filled(inputs, "dynamic")
    with torch.inference_mode():
        expected = inputs.model(
            input_ids=torch.tensor([[TOKEN]]), position_ids=torch.tensor([[LENGTH]]), past_key_values=peer._cache
        ).logits[0, -1]
    difference = (decode_logits(ours)[0] - expected).abs().max() / expected.abs().max()
    assert difference < 2e-5  # the project's bound for logits of `full`


def test_batch_logits_equal_those_of_single_sequences(inputs: BenchInputs, uneven_inputs: BenchInputs) -> None:
    for name in ("full", "infinigen"):
        rows = decode_logits(make_filled(uneven_inputs, name))
        assert rows.shape[0] == 2
        # Matrix products sum in a different order for a batch than for one sequence.
        assert (rows[0] - rows[1]).abs().max() / rows.abs().max() < 1e-5
    peer: TransformersBaseline = make_filled(uneven_inputs, "static")
    peer.step()
    assert peer._tokens.shape == (2, 1)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_transformers_cache_grows_by_one_token_per_step(inputs: BenchInputs, name: str) -> None:
    peer: TransformersBaseline = make_filled(inputs, name)
    for steps in (1, 2):
        peer.step()
        assert int(peer._cache.get_seq_length()) == LENGTH + steps


def test_full_with_kv_on_the_device_replays_a_graph_and_transfers_nothing() -> None:
    with simulated(Late((1,))) as sim:
        model = SHAPES["gqa"].model(512, torch.device("cuda"))
        inputs = make_inputs(model, 192, 192 + 64, FRACTION, batch=2)
        logits, facts, before = {}, {}, sim.memory.usage.allocated
        for name in ("full", "full-device"):
            baseline = make_filled(inputs, name)
            for _ in range(3):
                baseline.step()
            replayed = sim.launched["graph"]
            logits[name], facts[name] = decode_logits(baseline).cpu(), baseline.facts()
        assert isinstance(baseline.runner.steps, GraphSteps) and sim.launched["graph"] == replayed + 1
        inputs.context.pool.check_integrity()
        baseline.runner.transfer.check_integrity()
        copied = baseline.runner.transfer.device_bytes
        del baseline
        assert sim.memory.usage.allocated < before + copied  # the next baseline can use the memory
    assert facts["full"]["h2d_bytes_per_token"] > facts["full-device"]["h2d_bytes_per_token"] == 0
    assert facts["full"]["exact_fraction"] == facts["full-device"]["exact_fraction"] == 1
    torch.testing.assert_close(logits["full-device"], logits["full"], rtol=1e-4, atol=1e-4)


def test_full_without_memory_for_copies_is_skipped_with_a_reason() -> None:
    said: list[str] = []
    skipped: list[str] = []
    config = BenchConfig(contexts=(192,), repeats=1, baselines=("full-device",))
    with simulated(Late(), limit=1 << 20):
        model = SHAPES["gqa"].model(192 + 4096, torch.device("cuda"))
        assert bench.measure(config, model, bench.Point("gqa", 6, 192), said.append, skipped) == []
    [line] = skipped
    assert line.startswith("full-device at gqa, 192 tokens, 6 sequences: the device has no room for it (device_kv_mem")


def test_baselines_on_one_pool_are_independent(inputs: BenchInputs) -> None:
    undisturbed, other = make_filled(inputs, "full"), make_filled(inputs, "full")
    expected = [decode_logits(undisturbed) for _ in range(3)]
    disturbed = make_filled(inputs, "full")
    for logits in expected:
        assert torch.equal(decode_logits(disturbed), logits)
        other.step()
    inputs.context.pool.check_integrity()


def test_floor_has_no_context(inputs: BenchInputs) -> None:
    for name in ("floor", "floor-ours"):
        baseline = make_filled(inputs, name)
        baseline.step()
        facts = baseline.facts()
        assert facts.get("h2d_bytes_per_token", 0) == 0


def test_unavailable_baselines_are_skipped_with_a_reason(inputs: BenchInputs) -> None:
    said: list[str] = []
    skipped: list[str] = []
    for _ in range(2):  # each reason is reported once
        made = bench._baselines(("static", "offloaded", "full-device"), inputs, said.append, skipped)
    assert [c.name for c in made] == ["StaticCache"]
    assert skipped == [
        "offloaded: it offloads from a CUDA device, and this is a CPU",
        "full-device: it keeps copies of KV on a CUDA device, and this is a CPU",
    ]
    assert said == [f"skipped {line}" for line in skipped]


# ------------------------------------------------------------------------------------------------------------- command


def test_run_writes_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SHAPES, "small", SHAPES["gqa"])
    names = ("static", "full", "infinigen", "floor", "offloaded")
    config = BenchConfig(contexts=(512, 1024), repeats=1, spread=0.0, baselines=names)
    threads = torch.get_num_threads()
    rows = run_bench(config, tmp_path / "new", say_nothing).rows
    assert torch.get_num_threads() == threads
    assert [(row["name"], row["context"]) for row in rows] == [
        (name, n) for n in (512, 1024) for name in ("StaticCache", "full", "infinigen", "floor: transformers")
    ]
    report = json.loads((tmp_path / "new" / "decode_step.json").read_text())
    about = report["about"]
    assert about["shapes"]["small"]["kv_heads"] == 2 and about["config"]["threads"] == 1 and report["rows"] == rows
    assert about["skipped"] == ["offloaded: it offloads from a CUDA device, and this is a CPU"]
    sparse = rows[-2]
    assert sparse["steps"] == bench.BURST and sparse["dense_layers"] == []
    assert sparse["lower"] <= sparse["median"] <= sparse["upper"]
    assert sparse["over_static"] == rows[-4]["median"] / sparse["median"] and sparse["over_dynamic"] is None
    resident, n = sum(RESIDENT), round(FRACTION * (1024 - sum(RESIDENT)))
    assert sparse["sparse_exact_fraction"] == pytest.approx((resident + n) / 1024, rel=0.01)
    assert sparse["h2d_bytes_per_token"] == 3 * 2 * n * 2 * 32 * 4  # layers, KV heads, rows, K and V, d, bytes
    assert "| StaticCache |" in (tmp_path / "new" / "decode_step.md").read_text()
    assert (tmp_path / "new" / "time_per_step.png").stat().st_size > 1000


def test_sweeps_over_batches_and_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.SHAPES, "small", SHAPES["mha"])
    monkeypatch.setitem(bench.SHAPES, "medium", SHAPES["gqa"])
    config = BenchConfig(("small", "medium"), contexts=(512,), batches=(1, 2), repeats=1, baselines=("static", "full"))
    report = run_bench(config, tmp_path, say_nothing)
    expected = [(shape, batch) for shape in ("small", "medium") for batch in (1, 2) for _ in range(2)]
    assert [(row["shape"], row["batch"]) for row in report.rows] == expected
    assert report.about["shapes"].keys() == {"small", "medium"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": ("lama-8b",)}, "did you mean 'llama-8b'"),
        ({"contexts": (100,)}, "multiple of 64"),
        ({"contexts": (64,)}, "at least 128"),
        ({"baselines": ("statik",)}, "did you mean 'static'"),
        ({"fraction": 0.0}, "fraction=0.0"),
        ({"fraction": 0.5}, "fraction=0.5"),
        ({"repeats": 0}, "repeats=0"),
        ({"spread": 1.0}, "spread=1.0"),
        ({"batches": (0,)}, "batches=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(**options)


def test_unwritable_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        run_bench(BenchConfig(), tmp_path / "file", say_nothing)


def test_command_reports_invalid_options_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--contexts", "100"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "offload-rt: contexts=100 must be a multiple of 64, at least 128\n"


def test_c_kernels_are_timed_at_each_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(cpu_kernels, "COLD", 1 << 20)  # the times themselves are not tested
    if low_bit_sequence.library(64, 4) is None:
        pytest.skip("no C compiler")
    assert main(["eval", "cpu-kernels", "--tokens", "512", "--repeats", "1", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "cpu_kernels.json").read_text())["rows"]
    dense = [
        f"{kernel}, {dtype}"
        for dtype in ("bfloat16", "float32")
        for kernel in ("decode attention", "prefill attention", "linear")
    ]
    expected = [(level, kernel) for level in available_levels() for kernel in ("score", "select", "mix", *dense)]
    if native.has_amx():  # torch's prefill is faster with AMX
        expected.remove(("avx512_bf16", "prefill attention, bfloat16"))
    assert sorted((row["level"], row["kernel"]) for row in rows) == sorted(expected)
    assert all(row["us"] > 0 and row["times_floor"] > 0 for row in rows)
    assert low_bit_sequence.library(64, 4) is not None and "OFFLOAD_RT_CPU_LEVEL" not in os.environ
