"""Perplexity, its bootstrap and its report: through the decode path, resumable, and able to tell policies apart."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.architectures import VOCAB, architecture
from support.tiny_models import tiny_model
from transformers import PreTrainedModel

from offload_rt import LLM
from offload_rt.errors import ConfigError, InputError, PoolFullError
from offload_rt.eval.core.model_under_test import (
    ModelUnderTest,
    Scored,
    Text,
    Variant,
    encode_text,
    grid,
    pool_settings,
)
from offload_rt.eval.core.report import Column, Report, RowStore
from offload_rt.eval.core.stats import Interval, paired_bootstrap, perplexity_change, ratio_error, share_error
from offload_rt.eval.core.teacher_forced import LayerView, score_layerwise
from offload_rt.eval.quality.perplexity import CHUNK, PerplexityConfig, _chunks, costs, cut_windows, run_perplexity
from offload_rt.models.loading import load_model
from offload_rt.policies.options import InfiniGenOptions
from offload_rt.policies.registry import make_policy
from offload_rt.skewing.calibrate import cached_artifact

BOOK = Path(__file__).parents[3] / "offload_rt" / "data" / "black_arrow.txt"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "default": ("infinigen", {"recent": 8, "max_fraction": 0.3}),
    "paper": ("infinigen", {"preset": "paper"}),
    "normed": ("infinigen", {"source": "normed_input", "recent": 4, "sinks": 1, "dense_layers": ()}),
    "repair": (
        "infinigen",
        {"preset": "rows", "scorer": "int4", "recent": 4, "budget": 0.1, "max_fraction": 0.6, "max_missed_mass": 0.05},
    ),
    "oracle": ("oracle", {"budget": 0.25, "recent": 8}),
    "streaming": ("streaming", {"budget": 0.25, "recent": 8}),
    "h2o": ("h2o", {"budget": 0.25, "recent": 8}),
    "quest": ("quest", {"budget": 0.25, "recent": 8}),
}


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(1, 199, size=count)]


def by_layer(
    model: PreTrainedModel,
    policy: str,
    options: dict[str, Any],
    ids: Sequence[int],
    start: int,
    engine: dict[str, Any] | None = None,
) -> Any:
    loaded = load_model(model)
    adapter = loaded.adapter
    made = make_policy(
        policy,
        options,
        geometry=adapter.geometry,
        device=adapter.device,
        dtype=adapter.dtype,
        artifact=lambda method: cached_artifact(loaded, method),
    )
    return score_layerwise(adapter, made, ids, start, start + 1, pool=pool_settings(engine or {}))


ARCHITECTURES = ("llama", "mistral", "qwen3", "opt", "gpt2")
CELLS = [
    (name, architecture)
    for i, name in enumerate(VARIANTS)
    for j, architecture in enumerate(ARCHITECTURES)
    if "OFFLOAD_RT_STRESS" in os.environ or j == 0 or (i + j) % 3 == 0
]
"""All of them in `make stress PART=composition`."""


@pytest.mark.parametrize(("name", "architecture"), CELLS)
def test_layer_by_layer_equals_step_by_step(architecture: str, name: str) -> None:
    """In float64 only rounding differs, and never a choice: 1e-9 is far below what one other token would change."""
    policy, options = VARIANTS[name]
    model = tiny_model(architecture).double()
    ids, start = tokens(130), 105
    steps = LLM(model, policy=policy, policy_options=options).score([ids[: start + 1]], [ids[start + 1 :]])[0]
    layers = by_layer(model, policy, options, ids, start)
    assert layers.logprobs == pytest.approx(steps.logprobs, abs=1e-9)
    assert layers.is_greedy == steps.is_greedy
    stats = steps.stats
    shares = layers.fractions
    assert shares.link == pytest.approx(stats.fetched_fraction, abs=1e-12)
    assert shares.attended == pytest.approx(stats.exact_fraction, abs=1e-12)
    assert shares.sparse_link == pytest.approx(stats.sparse_fetched_fraction, abs=1e-12)
    assert shares.sparse_attended == pytest.approx(stats.sparse_exact_fraction, abs=1e-12)
    sampled = [masses for step, masses in layers.trace.missed if step % 16 == 0]
    for (_, theirs), ours in zip(stats.missed_by_step, sampled, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)


@pytest.mark.parametrize("name", ["full", "default"])
def test_chunks_are_those_of_the_steps(name: str) -> None:
    """Layers whose windows stand (Llama 4), past several of them; its norms compute in float32."""
    policy, options = VARIANTS[name]
    model = architecture("llama4").double()
    ids, start = [token % VOCAB for token in tokens(70)], 40
    steps = LLM(model, policy=policy, policy_options=options).score([ids[: start + 1]], [ids[start + 1 :]])[0]
    layers = by_layer(model, policy, options, ids, start)
    assert layers.logprobs == pytest.approx(steps.logprobs, abs=1e-6)
    assert layers.fractions.attended == pytest.approx(steps.stats.exact_fraction, abs=1e-12)


CHUNK_BYTES = 2 * 3 * 2 * 16 * 64 * 8
"""Of the tiny Llama and GPT-2 in float64."""

FIFO = {"policy": "fifo", "protect": "none"}

BOUNDED: list[tuple[str, Any, int, dict[str, Any]]] = [
    *((name, "counter", 90, {}) for name in ("full", "default", "paper", "oracle", "repair")),
    ("default", "lru", 90, {}),
    ("default", FIFO, 90, {}),
    ("default", "counter", 1, {}),
    ("default", "lru", 90, {"kv_cache_dtype": "int8"}),
    ("default", FIFO, 90, {"kv_cache_dtype": "int8"}),
]
"""Variant, eviction, tokens prefilled, more settings of the pool."""


@pytest.mark.parametrize("name", ["full", "default", "paper", "oracle", "h2o", "repair"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "int2"])
def test_rounded_rows_layer_by_layer(name: str, kv_cache_dtype: str) -> None:
    """As above, rows rounded where they are not resident."""
    (policy, options), model = VARIANTS[name], tiny_model("llama").double()
    ids, start, engine = tokens(140), 110, {"kv_cache_dtype": kv_cache_dtype}
    steps = LLM(model, policy=policy, policy_options=options, **engine).score([ids[: start + 1]], [ids[start + 1 :]])[0]
    layers = by_layer(model, policy, options, ids, start, engine)
    assert layers.logprobs == pytest.approx(steps.logprobs, abs=1e-9)
    assert layers.fractions.link == pytest.approx(steps.stats.fetched_fraction, abs=1e-12)


@pytest.mark.parametrize(("name", "eviction", "start", "more"), BOUNDED)
def test_a_bounded_pool_layer_by_layer(name: str, eviction: Any, start: int, more: dict[str, Any]) -> None:
    """As above in two chunks, from the 129th token on over victims."""
    (policy, options), model = VARIANTS[name], tiny_model("llama").double()
    ids = tokens(160)
    limit = 2 * CHUNK_BYTES if not more else 2 * 2 * 3 * 2 * 64 * (16 + 4)
    engine = {"host_memory": limit, "eviction": eviction, **more}
    llm = LLM(model, policy=policy, policy_options=options, **engine)
    steps = llm.score([ids[: start + 1]], [ids[start + 1 :]], start)[0]
    layers = by_layer(model, policy, options, ids, start, engine)
    assert layers.logprobs == pytest.approx(steps.logprobs, abs=1e-9)
    assert layers.fractions.attended == pytest.approx(steps.stats.exact_fraction, abs=1e-12)
    assert steps.stats.kv_bytes_host == limit
    free = by_layer(model, policy, options, ids, start, more)
    room = 128 - start  # the token at 128 is the first to overwrite, and predicts the next one
    assert layers.logprobs[: room - 1] == free.logprobs[: room - 1]
    assert layers.logprobs[room:] != free.logprobs[room:]


def test_a_pool_that_is_too_small_is_an_error_on_both_paths() -> None:
    model, ids = tiny_model("llama").double(), tokens(150)
    with pytest.raises(PoolFullError, match="raise host_memory"):
        by_layer(model, "full", {}, ids, 90, {"host_memory": 2 * CHUNK_BYTES})
    with pytest.raises(PoolFullError, match="raise host_memory"):
        by_layer(model, "full", {}, ids, 140, {"host_memory": 2 * CHUNK_BYTES, "eviction": "lru"})


def test_nothing_prefilled_is_the_paper_s_simulation() -> None:
    """With decode_from 0 and 1 every position goes through the policy, in both paths."""
    model = tiny_model("llama").double()
    ids = tokens(100)
    for start in (0, 1):
        steps = LLM(model, policy="infinigen", policy_options={"recent": 4}).score([ids[:2]], [ids[2:]], start)[0]
        layers = by_layer(model, "infinigen", {"recent": 4}, ids, start)
        assert layers.logprobs[1 - start :] == pytest.approx(steps.logprobs, abs=1e-9)


def test_layer_by_layer_full_is_transformers() -> None:
    model = tiny_model("llama").double()
    ids = tokens(120)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    wanted = [float(expected[i, ids[i + 1]]) for i in range(60, 119)]
    assert by_layer(model, "full", {}, ids, 60).logprobs == pytest.approx(wanted, abs=1e-9)


def test_observer_sees_what_was_attended() -> None:
    loaded = load_model(tiny_model("llama"))
    options = {"budget": 0.25, "recent": 8, "sinks": 2}
    adapter = loaded.adapter
    policy = make_policy(
        "oracle",
        options,
        geometry=adapter.geometry,
        device=adapter.device,
        dtype=adapter.dtype,
        artifact=lambda method: cached_artifact(loaded, method),
    )
    seen: list[LayerView] = []
    score_layerwise(adapter, policy, tokens(80), 60, 61, observe=seen.append)
    assert [view.layer for view in seen] == list(range(adapter.geometry.layers))
    assert torch.equal(seen[0].attended, seen[0].causal.expand_as(seen[0].attended))
    for view in seen[1:]:
        assert view.guess is not None
        for t in range(19):
            length = 60 + t + 1
            assert view.attended[:, t].sum(1).tolist() == [length // 4] * 2
            assert view.attended[:, t, :2].all()
            assert view.attended[:, t, length - 8 : length].all()
            assert not view.attended[:, t, length:].any()


def test_bootstrap_interval_covers_and_pairs() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(300, 40, size=60)
    weights = np.full(60, 100.0)
    worse = base + rng.normal(2, 1, size=60)
    interval = paired_bootstrap(worse, base, weights, change=perplexity_change)
    true = math.expm1((worse - base).mean() / 100)
    assert interval.value == pytest.approx(true, rel=1e-12)
    assert interval.low < true < interval.high
    assert interval.excludes_zero  # unpaired windows differ twenty times more than the policies do
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.01 / math.sqrt(60), rel=0.25)
    again = paired_bootstrap(worse, base, weights, change=perplexity_change)
    assert again == interval
    assert paired_bootstrap(base, base, weights) == Interval(0.0, 0.0, 0.0)
    alone = paired_bootstrap([3.0], [1.0], [2.0])
    assert alone == Interval(1.0, 1.0, 1.0)


def test_decoding_chunks_are_means_of_whole_chunks() -> None:
    assert _chunks([1.0, 3.0] * (CHUNK // 2) + [5.0] * CHUNK + [9.0] * 10) == [2.0, 5.0]
    assert _chunks([2.0, 4.0]) == [3.0]


def test_costs_are_means_over_texts_of_what_was_measured() -> None:
    dense = Scored([1.0], [True], 1.0, 0.9, 0.0, 0.0, None, None)
    sparse = [Scored([1.0], [True], 0.2, 0.1, 0.15, 0.05, m, 2 * m, 3 * m, 4 * m) for m in (0.1, 0.2)]
    found = costs([dense, *sparse])
    assert (found["missed"], found["missed_worst"]) == pytest.approx((0.15, 0.3))
    assert (found["output_error"], found["output_error_worst"]) == pytest.approx((0.45, 0.6))
    assert (found["attended"], found["link"]) == pytest.approx((1.4 / 3, 1.1 / 3))
    assert (found["sparse_attended"], found["sparse_link"]) == pytest.approx((0.1, 0.1 / 3))
    assert costs([dense])["missed"] is None


def test_standard_errors() -> None:
    values = np.random.default_rng(0).normal(5, 2, size=400)
    assert ratio_error(values, np.ones(400)) == pytest.approx(values.std(ddof=1) / 20, rel=1e-9)
    assert ratio_error([3.0], [1.0]) == 0.0
    assert share_error(50, 100) == pytest.approx(0.05)
    assert 0 < share_error(100, 100) < 0.01
    assert share_error(0, 0) == 0.0


def test_grid_begins_with_full() -> None:
    made = grid(["full", "infinigen", "h2o"], [0.05, 0.1], {"recent": 8})
    assert [v.label for v in made] == [
        "full",
        "infinigen recent=8 budget=0.05",
        "infinigen recent=8 budget=0.1",
        "h2o recent=8 budget=0.05",
        "h2o recent=8 budget=0.1",
    ]
    assert [v.label for v in grid(["infinigen"], [])] == ["full", "infinigen"]


def test_windows_are_even_pieces_with_their_bytes() -> None:
    tested = ModelUnderTest("reference")
    text = "“Naïve — café”, said he. " * 80
    config = PerplexityConfig(context=64, windows=3, decode_from=40, margin=0)
    windows = cut_windows(tested, text, config)
    ids, ends, lead = encode_text(tested, text)
    assert ends[-1] == len(text.encode())
    assert lead == ()
    assert windows[0].text == Text(tuple(ids[:64]), 40, 41)
    assert windows[-1].text.tokens == tuple(ids[-64:])
    assert windows[0].bytes == ends[63] - ends[40]
    assert windows[-1].bytes == ends[-1] - ends[len(ids) - 64 + 40]


def test_windows_leave_the_margins_out() -> None:
    tested, text = ModelUnderTest("reference"), "“Naïve — café”, said he. " * 80
    ids = encode_text(tested, text)[0]
    edge = int(0.1 * len(ids))
    windows = cut_windows(tested, text, PerplexityConfig(context=64, windows=3, decode_from=40, margin=0.1))
    assert windows[0].text.tokens == tuple(ids[edge : edge + 64])
    assert windows[-1].text.tokens == tuple(ids[len(ids) - edge - 64 : len(ids) - edge])
    whole = PerplexityConfig(context=len(ids) - 1, windows=3, decode_from=40, margin=0.1)
    assert cut_windows(tested, text, whole)[0].text.tokens == tuple(ids[:-1])


def test_text_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="fewer than one window of 64"):
        cut_windows(ModelUnderTest("reference"), "short", PerplexityConfig(context=64, windows=1))


@pytest.mark.parametrize("wrong", [{"context": 1}, {"windows": 0}, {"context": 10, "decode_from": 9}, {"margin": 0.5}])
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(reversed(wrong)))):
        PerplexityConfig(**wrong)


def test_report_has_everything_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BOOK.read_text(encoding="utf-8")[:20_000]
    config = PerplexityConfig(context=128, windows=3, decode_from=96)
    variants = grid(["infinigen", "streaming"], [0.2], {"recent": 8, "dense_layers": [0]})
    monkeypatch.setattr("sys.argv", ["/bin/eval", "--text", str(BOOK), "--windows", "3"])
    report = run_perplexity(ModelUnderTest("reference"), text, "arrow", variants, config, tmp_path)
    record = json.loads((tmp_path / "perplexity.json").read_text())
    assert record["rows"] == json.loads(json.dumps(report.rows))
    assert record["about"]["fingerprint"] == load_model("reference").fingerprint
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["environment"]["command"] == f"eval --text {BOOK.name} --windows 3"
    full, ours, streaming = record["rows"]
    assert full["sparse_attended"] == 0
    assert full["attended"] == 1
    assert ours["sparse_attended"] == pytest.approx(0.2, abs=0.01)
    assert (
        ours["against_full_perplexity_low"] <= ours["against_full_perplexity"] <= ours["against_full_perplexity_high"]
    )
    assert streaming["against_infinigen_perplexity"] == pytest.approx(
        (1 + streaming["against_full_perplexity"]) / (1 + ours["against_full_perplexity"]) - 1
    )
    with (tmp_path / "perplexity.csv").open() as file:
        assert [row["policy"] for row in csv.DictReader(file)] == ["full", "infinigen", "streaming"]
    assert "streaming recent=8 dense_layers=0 budget=0.2" in (tmp_path / "perplexity.md").read_text()
    assert (tmp_path / "perplexity_by_attended_share.png").read_bytes()[:4] == b"\x89PNG"

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(ModelUnderTest, "score", forbidden)
    again = run_perplexity(ModelUnderTest("reference"), text, "arrow", variants, config, tmp_path)
    assert again.rows == report.rows
    with pytest.raises(AssertionError, match="measured again"):
        run_perplexity(ModelUnderTest("reference"), text + "x", "arrow", variants, config, tmp_path)


def test_a_row_is_known_by_what_its_options_mean() -> None:
    """Rows measured with other defaults must not be taken for today's."""
    tested = ModelUnderTest("reference")
    plain, recent = (tested.key(Variant("infinigen", options)) for options in ({}, {"recent": 5}))
    named = tested.key(Variant("infinigen", {"recent": InfiniGenOptions().recent}))
    assert plain["lineage"] == named["lineage"] != recent["lineage"]
    assert tested.key(Variant("full"))["lineage"] == "exact"


def test_both_paths_give_one_row(tmp_path: Path) -> None:
    text = BOOK.read_text(encoding="utf-8")[:8_000]
    config = PerplexityConfig(context=96, windows=2, decode_from=64)
    rows = [
        run_perplexity(
            ModelUnderTest("reference", path=path), text, "t", [Variant("infinigen", {"recent": 8})], config, out
        )
        for path, out in (("layers", tmp_path / "a"), ("steps", tmp_path / "b"))
    ]
    ours, steps = rows[0].rows[0], rows[1].rows[0]
    for key in ("bits_per_byte", "attended", "link", "sparse_attended"):
        assert ours[key] == pytest.approx(steps[key], abs=2e-5)  # bfloat16-free float32 rounding over 62 tokens


def test_rows_are_whole_or_absent(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.put({"a": 1, "b": [1, 2]}, {"x": 0.5})
    assert store.get({"b": [1, 2], "a": 1}) == {"x": 0.5}
    assert store.get({"a": 1, "b": [1, 3]}) is None
    (path,) = (tmp_path / "rows").iterdir()
    path.write_text(path.read_text()[:20])
    assert store.get({"a": 1, "b": [1, 2]}) is None
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot use"):
        RowStore(tmp_path / "file")


def test_tables_show_what_is_missing(tmp_path: Path) -> None:
    report = Report("t", "T", {"seed": 1}, (Column("a", "a", ".1%"), Column("b", "b")), [{"a": 0.5}, {"b": []}])
    assert "| 50.0% | – |\n| – | none |" in report.markdown()
    assert [path.name for path in report.write(tmp_path)] == ["t.json", "t.csv", "t.md"]
