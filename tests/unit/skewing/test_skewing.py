"""Test skewing: bases, and calibration."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import NAMES, VOCAB, tiny_model, tiny_prompt
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload_rt.errors import InputError, ModelError
from offload_rt.models.adapter import ModelAdapter
from offload_rt.models.loading import LoadedModel, load_model
from offload_rt.models.registry import adapter_for
from offload_rt.skewing import calibrate as calibrate_module
from offload_rt.skewing.calibrate import calibrate, default_tokens, measure, text_tokens
from offload_rt.skewing.rotation import (
    BASES,
    Moments,
    SkewBasis,
    balanced_basis,
    kept_energy,
    plain_basis,
    svd_basis,
)

DATA = Path(os.environ.get("OFFLOAD_RT_DATA", Path(__file__).parents[4] / "shared" / "data"))
NOVELS, BOOK = DATA / "models" / "novels", DATA / "books" / "war_and_peace.txt"
needs_novels = pytest.mark.skipif(
    not (NOVELS.is_dir() and BOOK.is_file()), reason=f"no test model and book under {DATA} (OFFLOAD_RT_DATA)"
)
METHODS = tuple(BASES)


# --- bases -----------------------------------------------------------------------------------------------------------


def random_queries_and_keys(tokens: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Q and K `[tokens, d]` in float64. They are not centred, and their principal axes are unrelated."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def rows() -> torch.Tensor:
        spectrum = torch.logspace(0, -2, d, dtype=torch.float64)
        return (draw(tokens, d) * spectrum) @ torch.linalg.qr(draw(d, d)).Q + 0.3 * draw(d)

    return rows(), rows()


def moments_of(Q: torch.Tensor, K: torch.Tensor) -> Moments:
    return Moments(Q.T @ Q / len(Q), K.T @ K / len(K), K.mean(0))


def score_error(Q: torch.Tensor, K: torch.Tensor, basis: SkewBasis, r: int) -> float:
    """Return the squared error of scores computed from r columns, ignoring constants that do not affect the softmax."""
    centred = K - K.mean(0)
    kept = (Q @ basis.query)[:, :r] @ (centred @ basis.key)[:, :r].T
    return float((Q @ centred.T - kept).square().sum())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 300])  # fewer or more than d = 16
def test_scores_are_exact_with_all_columns(method: str, tokens: int) -> None:
    basis = BASES[method](moments_of(*random_queries_and_keys(tokens, 16, seed=1)))
    Q, K = random_queries_and_keys(50, 16, seed=2)
    exact = Q @ K.T
    # The ridge bounds the condition number of B_q, so float64 rounding of 1e-16 grows to at most 1e-10.
    torch.testing.assert_close((Q @ basis.query) @ (K @ basis.key).T, exact, rtol=0, atol=1e-10 * exact.abs().max())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [0.0, 100.0])
def test_bases_of_degenerate_heads_are_inverse(method: str, size: float) -> None:
    for seed in range(5):
        Q, K = random_queries_and_keys(50, 6, seed)
        # The covariance of equal keys is rounding error, which is often indefinite.
        moments = moments_of(size * Q, size * K[:1].expand(7, 6))
        basis = BASES[method](moments)
        torch.testing.assert_close(basis.query @ basis.key.T, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-8)


def test_svd_basis_equals_the_paper() -> None:
    Q, K = random_queries_and_keys(200, 8, seed=3)
    basis = svd_basis(moments_of(Q, K))
    assert torch.equal(basis.key, basis.query)
    torch.testing.assert_close(basis.query.T @ basis.query, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-12)
    match = (torch.linalg.svd(Q).Vh @ basis.query).abs()  # a signed permutation
    torch.testing.assert_close(match.sort(0).values[-1], torch.ones(8, dtype=torch.float64), rtol=0, atol=1e-9)
    largest = basis.query.gather(0, basis.query.abs().argmax(0, keepdim=True))
    assert (largest > 0).all(), "the largest entry of each column is positive"


def test_first_svd_columns_are_the_best_subset() -> None:
    Q, K = random_queries_and_keys(200, 6, seed=4)
    basis = svd_basis(moments_of(Q, K))
    for r in range(1, 6):
        errors = [
            score_error(Q, K, SkewBasis(basis.query[:, c], basis.key[:, c]), r)
            for c in map(list, combinations(range(6), r))
        ]
        assert score_error(Q, K, basis, r) == pytest.approx(min(errors), rel=1e-9)
        assert min(errors) < 0.9 * sorted(errors)[1], "the data do not distinguish subsets"


def test_balanced_moments_are_equal_and_diagonal() -> None:
    moments = moments_of(*random_queries_and_keys(300, 12, seed=5))
    skewed = moments.skewed(balanced_basis(moments, ridge=0.0))
    torch.testing.assert_close(skewed.query, skewed.key_covariance, rtol=0, atol=1e-12)
    diagonal = skewed.query.diagonal()
    torch.testing.assert_close(skewed.query, diagonal.diag(), rtol=0, atol=1e-12)
    assert (diagonal.diff() <= 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_balanced_error_is_minimal_and_svd_is_better_than_plain(seed: int) -> None:
    Q, K = random_queries_and_keys(300, 12, seed=10 + seed)
    moments = moments_of(Q, K)
    singular = torch.linalg.svdvals(Q @ (K - K.mean(0)).T)[:12].square()
    for r in range(1, 12):
        plain, svd, balanced = (
            score_error(Q, K, compute_basis(moments), r) for compute_basis in (plain_basis, svd_basis, balanced_basis)
        )
        minimum = float(singular[r:].sum())
        # Eckart-Young. The ridge (1e-6) has only a second-order effect.
        assert minimum * (1 - 1e-9) <= balanced <= minimum * (1 + 1e-4)
        assert balanced <= svd <= plain


def test_kept_energy_equals_the_error_of_all_scores() -> None:
    Q, K = random_queries_and_keys(300, 12, seed=6)
    moments = moments_of(Q, K)
    total = float((Q @ (K - K.mean(0)).T).square().sum())
    for compute_basis in (plain_basis, svd_basis, balanced_basis):
        for r in (0, 3, 12):
            expected = 1 - score_error(Q, K, compute_basis(moments), r) / total
            assert float(kept_energy(moments, compute_basis(moments), r)) == pytest.approx(expected, abs=1e-10)


def test_batched_bases_equal_those_of_each_head() -> None:
    heads = [moments_of(*random_queries_and_keys(100, 8, seed=s)) for s in range(3)]
    batch = Moments(*(torch.stack([getattr(m, name) for m in heads]) for name in ("query", "key", "key_mean")))
    for method, compute_basis in BASES.items():
        batched = compute_basis(batch)
        for i, head in enumerate(heads):
            torch.testing.assert_close(batched.query[i], compute_basis(head).query, msg=method)
            torch.testing.assert_close(batched.key[i], compute_basis(head).key, msg=method)


# --- calibration -----------------------------------------------------------------------------------------------------


@pytest.fixture
def captured_qk() -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Capture unscaled q `[H, T, d]` and k `[Hkv, T, d]` in each of transformers' attention calls."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def capture(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        prescaled = module.scaling if type(module).__name__ == "OPTAttention" else 1.0
        calls.append((query[0] / prescaled, key[0]))
        return sdpa(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = capture
    yield calls
    del ALL_ATTENTION_FUNCTIONS["sdpa"]  # removes the override
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa


def with_max_positions(adapter: ModelAdapter, most: int) -> ModelAdapter:
    changed = copy(adapter)
    changed.geometry = replace(adapter.geometry, max_positions=most)
    return changed


@pytest.mark.parametrize("name", NAMES)
def test_moments_equal_transformers(name: str, captured_qk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "SLICE", 32)
    model = tiny_model(name, dtype=torch.float64)
    ids = tiny_prompt(260)
    moments, _ = measure(with_max_positions(adapter_for(model), 130), ids)
    for segment in (ids[:130], ids[130:]):
        model(torch.tensor([segment]), use_cache=False)
    layers = model.config.num_hidden_layers
    for layer in range(layers):
        parts = [captured_qk[layer], captured_qk[layers + layer]]
        k = torch.cat([k for _, k in parts], dim=1)
        q = torch.cat([q for q, _ in parts], dim=1).reshape(len(k), -1, k.shape[-1])
        # float64, but transformers computes RMSNorm and RoPE in float32
        for actual, expected in (
            (moments.query[layer], q.mT @ q / q.shape[1]),
            (moments.key[layer], k.mT @ k / k.shape[1]),
            (moments.key_mean[layer], k.mean(1)),
        ):
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * expected.abs().max())


def test_spread_positions_only_rotate_queries_and_keys() -> None:
    """RoPE does not change the lengths of vectors, so the trace of a layer's moments must stay the same."""
    adapter, ids = adapter_for(tiny_model("llama", dtype=torch.float64)), tiny_prompt(130)
    natural, spread = (measure(with_max_positions(adapter, most), ids)[0] for most in (130, 4096))
    for name in ("query", "key"):
        natural_moments, spread_moments = getattr(natural, name), getattr(spread, name)
        torch.testing.assert_close(
            *(m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (natural_moments, spread_moments)), rtol=1e-5, atol=0
        )
        assert (natural_moments - spread_moments).abs().max() > 0.05 * natural_moments.abs().max()


def test_positions_are_spread_evenly() -> None:
    assert calibrate_module._spread(50, 50).tolist() == list(range(50))
    spread = calibrate_module._spread(100, 131072)
    share = 131072 / 100
    assert all(int(i * share) <= p <= (i + 1) * share for i, p in enumerate(spread.tolist()))
    assert len(set(spread.diff().tolist())) > 90, "equal steps may coincide with the period of a rotary plane"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_artifact_describes_the_skewed_keys(name: str, method: str) -> None:
    adapter = with_max_positions(adapter_for(tiny_model(name)), 100)
    geometry, ids = adapter.geometry, tiny_prompt(100)
    artifact = calibrate(adapter, ids, method=method, fingerprint="f", calibration="a text")
    assert artifact.query.shape == (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    assert re.fullmatch("a text at positions below 100, tokens [0-9a-f]{16}", artifact.calibration)
    identity = torch.eye(geometry.head_dim).expand_as(artifact.query)
    torch.testing.assert_close(artifact.query @ artifact.key.mT, identity, rtol=0, atol=2e-5)
    positions = torch.arange(100)
    x = adapter.attention_input(0, adapter.embed(torch.tensor(ids), positions))
    skewed = adapter.key_value(0, x, positions)[0] @ artifact.key[0]
    torch.testing.assert_close(skewed.mean(1), artifact.key_mean[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(skewed.std(1, correction=0), artifact.key_std[0], rtol=1e-3, atol=1e-4)


def test_calibration_reports_progress_and_repeats() -> None:
    adapter, calls = adapter_for(tiny_model("gpt2")), []
    artifacts = [
        calibrate(
            adapter,
            tiny_prompt(1100),
            method="svd",
            fingerprint="f",
            calibration="c",
            progress=lambda *at: calls.append(at),
        )
        for _ in range(2)
    ]
    assert calls == [(i, 6) for i in range(1, 7)] * 2, "two segments (1,024 positions) of three layers"
    assert torch.equal(artifacts[0].query, artifacts[1].query)


def test_invalid_calibration_input_is_an_error() -> None:
    adapter = adapter_for(tiny_model("opt"))
    for ids in ([], [VOCAB], [-1]):
        with pytest.raises(InputError, match=r"empty|vocabulary"):
            measure(adapter, ids)
    model = tiny_model("llama")
    model.model.embed_tokens.weight[3] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        measure(adapter_for(model), [1, 2, 3])


def test_default_tokens_without_a_tokenizer() -> None:
    ids, name = default_tokens(None, VOCAB, 300)
    assert len(ids) == 300
    assert 0 <= min(ids) < max(ids) < VOCAB
    assert "pseudo-random" in name
    assert ids == default_tokens(None, VOCAB, 300)[0]


# --- the trained test model ------------------------------------------------------------------------------------------


@cache
def novels() -> LoadedModel:
    return load_model(str(NOVELS), device="cpu", dtype="float32")


@cache
def novels_moments(text: str, positions: int) -> Moments:
    tokenizer = novels().tokenizer
    assert tokenizer is not None
    if text == "calibration":
        ids, _ = default_tokens(tokenizer, 2048, 2048)
    else:
        ids, _ = text_tokens(tokenizer, BOOK.read_text(encoding="utf-8")[40_000:60_000], 2048, "war_and_peace.txt")
    return measure(with_max_positions(novels().adapter, positions), ids)[0]


@needs_novels
def test_skewing_concentrates_a_trained_model() -> None:
    # With 19 of 64 columns, on a book that calibration did not use: 0.71 without skewing, 0.79 with SVD, 0.81 balanced.
    calibration, held_out = novels_moments("calibration", 2048), novels_moments("book", 2048)
    plain, svd, balanced = (
        float(kept_energy(held_out, make(calibration), 19).mean()) for make in (plain_basis, svd_basis, balanced_basis)
    )
    assert svd > plain + 0.05
    assert balanced > svd + 0.01


@needs_novels
@pytest.mark.parametrize("method", METHODS)
def test_basis_is_best_at_the_positions_of_its_calibration(method: str) -> None:
    """A basis calibrated on 2,048 positions keeps less energy at 32,768 positions: 0.63 instead of 0.71 (measured)."""
    held_out = novels_moments("book", 32768)
    near, far = (BASES[method](novels_moments("calibration", positions)) for positions in (2048, 32768))
    assert float(kept_energy(held_out, far, 19).mean()) > float(kept_energy(held_out, near, 19).mean()) + 0.05
