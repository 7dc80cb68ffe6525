"""Compare InfiniGen's selection with a reference implementation that uses dense matrices and loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import examples
from support.select_models import CPU, artifact, as_sets, dequantise, geometry, no_keys, pass_keys, tokens

from offload_rt.core import ModelGeometry, VisibleTokens
from offload_rt.errors import ArtifactError, ConfigError
from offload_rt.kernels.selection import pack, quantise, unpack
from offload_rt.policies.infinigen.bases import Basis
from offload_rt.policies.infinigen.policy import InfiniGen, InfiniGenState
from offload_rt.policies.infinigen.scoring import Quantiser
from offload_rt.policies.options import InfiniGenOptions

PROMPT = 90
TOTAL = 110


def make_policy(
    shape: ModelGeometry, dtype: torch.dtype = torch.float64, device: torch.device = CPU, **options: object
) -> InfiniGen:
    """Return a policy with preset "rows", scorer "partial" and a small window."""
    defaults: dict[str, object] = {"scorer": "partial", "dense_layers": (), "sinks": 4, "recent": 8}
    parsed = InfiniGenOptions.preset("rows", **defaults | options)
    return InfiniGen(parsed, shape, artifact(shape), device, dtype)


def filled_state(policy: InfiniGen, q: torch.Tensor, k: torch.Tensor, prompt: int = PROMPT) -> InfiniGenState:
    """Return a state that has seen two prefill chunks, then single tokens up to the end of `k`."""
    state = policy.new_state(no_keys)
    for layer in range(len(k)):
        for start, stop in ((0, prompt // 3), (prompt // 3, prompt)):
            state.on_queries(layer, q[layer, :, start:stop], k[layer, :, :prompt], start)
        pass_keys(state, layer, k[layer, :, :prompt], 0)
        for token in range(prompt, k.shape[2]):
            pass_keys(state, layer, k[layer, :, token : token + 1], token)
    state.check_integrity()
    return state


def reference_scores(
    policy: InfiniGen, layer: int, query: torch.Tensor, k: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Return the scores `[H, N]` of a query `[H, d]`, computed only from the columns `[Hkv, r]` of the skewed keys."""
    shape, basis = policy.geometry, artifact(policy.geometry)
    out = torch.empty(shape.heads, k.shape[2], dtype=torch.float64)
    for head in range(shape.heads):
        kv = head // shape.group
        skewed_query = (query[head] @ basis.query[layer, kv].double())[columns[kv]]
        skewed_keys = (k[layer, kv] @ basis.key[layer, kv].double())[:, columns[kv]]
        out[head] = skewed_keys @ skewed_query * shape.scales[layer]
    return out


def reference_selection(
    scores: torch.Tensor, candidates: range, group: int, alpha: float, max_fraction: float
) -> list[set[int]]:
    """Select candidates from scores `[H, N]` by threshold and top-n (paper, §4.3)."""
    if not candidates:
        return [set() for _ in range(len(scores) // group)]
    masked = torch.full_like(scores, -math.inf)
    masked[:, candidates.start : candidates.stop] = scores[:, candidates.start : candidates.stop]
    passing = [{t for t in candidates if row[t] >= row.max() - alpha} for row in masked]
    mean = math.ceil(sum(len(p) for p in passing) / len(passing))
    n = max(1, min(mean, math.floor(max_fraction * len(candidates))))
    union = set().union(*passing)
    probabilities = masked.softmax(-1)
    chosen = []
    for first in range(0, len(scores), group):
        ranked = sorted(union, key=lambda t: (-float(probabilities[first : first + group, t].max()), t))
        chosen.append(set(ranked[:n]))
    return chosen


def calibrated_columns(policy: InfiniGen) -> torch.Tensor:
    count = max(1, math.floor(policy.options.partial_ratio * policy.geometry.head_dim))
    return torch.arange(count).expand(policy.geometry.kv_heads, count)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("resident", [(4, 8), (0, 1), (3, 200)])
@pytest.mark.parametrize("alpha_and_fraction", [(5.0, 0.2), (1.0, 0.9), (0.0, 1.0), (math.inf, 0.3)])
def test_selection_equals_the_reference(
    group: int,
    resident: tuple[int, int],
    alpha_and_fraction: tuple[float, float],
    device: torch.device,
) -> None:
    shape = geometry(group=group)
    alpha, fraction = alpha_and_fraction
    policy = make_policy(
        shape, device=device, alpha=alpha, max_fraction=fraction, sinks=resident[0], recent=resident[1]
    )
    q, k = tokens(shape, TOTAL)
    state = filled_state(policy, q.to(device), k.to(device))
    visible = VisibleTokens.of(TOTAL, sinks=resident[0], recent=resident[1], window=None)
    for layer in range(shape.layers):
        query = q[layer, :, -1]
        scores = reference_scores(policy, layer, query, k, calibrated_columns(policy))
        expected = reference_selection(scores, visible.candidates, group, alpha, fraction)
        assert as_sets(state.select(layer, query.to(device), visible).known().tokens) == expected


@pytest.mark.parametrize("group", [1, 4])
def test_paper_preset_chooses_columns_from_the_prompt(group: int, device: torch.device) -> None:
    shape = geometry(group=group, layers=3)
    options = InfiniGenOptions.preset("paper")
    policy = InfiniGen(options, shape, artifact(shape), device, torch.float64)
    assert (policy.query_source, policy.sinks, policy.recent, policy.dense_layers) == ("attention_input", 0, 1, {0})
    q, k = tokens(shape, TOTAL)
    q[:, :, :, 3] *= 5  # different magnitudes, so that the prompt selects different columns than calibration
    state = filled_state(policy, q.to(device), k.to(device))
    visible = VisibleTokens.of(TOTAL, sinks=0, recent=1, window=None)
    basis = artifact(shape)
    for layer in (1, 2):
        columns = []
        for kv in range(shape.kv_heads):
            sums = (k[layer, kv, :PROMPT] @ basis.key[layer, kv].double()).abs().sum(0)
            for head in range(kv * group, (kv + 1) * group):
                sums += (q[layer, head, :PROMPT] @ basis.query[layer, kv].double()).abs().sum(0)
            columns.append(sums.topk(4).indices)  # 30 % of 16
        assert any(set(row.tolist()) != {0, 1, 2, 3} for row in columns)
        query = q[layer, :, -1]
        scores = reference_scores(policy, layer, query, k, torch.stack(columns))
        expected = reference_selection(scores, visible.candidates, group, 5.0, 0.2)
        assert as_sets(state.select(layer, query.to(device), visible).known().tokens) == expected


@pytest.mark.parametrize("scorer", ["partial", "int8", "int4", "int2"])
@pytest.mark.parametrize("group", [1, 4])
def test_alpha_inf_and_full_fraction_select_every_candidate(scorer: str, group: int, device: torch.device) -> None:
    shape = geometry(group=group)
    policy = make_policy(shape, torch.float32, device, scorer=scorer, alpha=math.inf, max_fraction=1.0)
    q, k = (x.to(device) for x in tokens(shape, TOTAL))
    visible = VisibleTokens.of(TOTAL, sinks=4, recent=8, window=None)
    selected = filled_state(policy, q, k).select(1, q[1, :, -1].float(), visible).tokens
    assert as_sets(selected) == [set(visible.candidates)] * shape.kv_heads


@pytest.mark.parametrize("share", [0.05, 0.15, 0.5, 1.0])
def test_budget_determines_the_attended_fraction(share: float) -> None:
    shape = geometry(group=2)
    policy = make_policy(shape, budget=share)
    q, k = tokens(shape, TOTAL)
    visible = VisibleTokens.of(TOTAL, sinks=4, recent=8, window=None)
    count = filled_state(policy, q, k).select(0, q[0, :, -1], visible).count
    assert count == max(0, math.floor(share * TOTAL) - visible.resident)


@pytest.mark.parametrize("scorer", ["partial", "int8", "int4", "int2"])
def test_incremental_keys_equal_bulk_keys(scorer: str) -> None:
    shape = geometry(group=2)
    policy = make_policy(shape, torch.float64, scorer=scorer)
    q, k = tokens(shape, 80)
    bulk, single = policy.new_state(no_keys), policy.new_state(no_keys)
    pass_keys(bulk, 0, k[0], 0)
    for start, stop in ((0, 1), (1, 2), (2, 7), (7, 66), (66, 80)):
        pass_keys(single, 0, k[0, :, start:stop], start)
    for wanted in (range(80), range(5, 71), range(78, 79)):
        a, b = (state._keys.scores(0, q[0, :, 3], wanted) for state in (bulk, single))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)  # products of other shapes may round differently


@pytest.mark.parametrize(
    "options", [{}, {"columns": "prompt"}, {"scorer": "int8"}, {"scorer": "int4"}, {"scorer": "int2"}]
)
def test_forks_are_independent(options: dict[str, str]) -> None:
    shape = geometry()
    q, k = tokens(shape, TOTAL)
    state = filled_state(make_policy(shape, **options), q[:, :, :PROMPT], k[:, :, :PROMPT])
    visible = VisibleTokens.of(PROMPT, sinks=4, recent=8, window=None)
    before = state._keys.scores(0, q[0, :, 0], visible.all).clone()
    fork = state.fork(no_keys)
    for token in range(PROMPT, TOTAL):
        pass_keys(state, 0, k[0, :, token : token + 1], token)
        pass_keys(fork, 0, -k[0, :, token : token + 1], token)
    assert torch.equal(fork._keys.scores(0, q[0, :, 0], visible.all), before)
    new = range(PROMPT, TOTAL)
    assert not torch.allclose(fork._keys.scores(0, q[0, :, 0], new), state._keys.scores(0, q[0, :, 0], new))
    state.check_integrity()
    fork.check_integrity()


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"partial_ratio": 0.3}, 0.15),
        ({"partial_ratio": 1.0}, 0.5),
        ({"scorer": "int8"}, 32 / 256),  # 19 columns, padded to a multiple of 16 bytes
        ({"scorer": "int4"}, 0.125),
        ({"scorer": "int2"}, 0.0625),
    ],
)
def test_device_bytes_of_scoring_keys(options: dict[str, object], share: float) -> None:
    shape = geometry(layers=1, head_dim=64)
    state = make_policy(shape, torch.bfloat16, **options).new_state(no_keys)
    _, k = tokens(shape, 2048)
    pass_keys(state, 0, k[0].bfloat16(), 0)
    exact = share if "partial_ratio" not in options else math.floor(float(options["partial_ratio"]) * 64) / 128  # type: ignore[arg-type]
    kv_bytes = shape.kv_bytes(2048, torch.bfloat16)
    # Room to grow is one sixteenth, rounded up to 64 slots.
    assert exact <= state.device_bytes / kv_bytes <= exact * (17 / 16 + 0.13)
    assert abs(exact - share) < 0.01


def test_half_precision_keys_are_scored_in_float32() -> None:
    shape = geometry(group=2, head_dim=64)
    q, k = tokens(shape, 64)
    policy = make_policy(shape, torch.bfloat16, partial_ratio=1.0)
    state = policy.new_state(no_keys)
    pass_keys(state, 0, k[0].bfloat16(), 0)
    scores = state._keys.scores(0, q[0, :, -1].bfloat16(), range(64))
    exact = reference_scores(policy, 0, q[0, :, -1], k, calibrated_columns(policy)).view(2, 2, 64)
    assert scores.dtype == torch.float32
    # Queries and keys are rounded to 8-bit mantissas: an error of about 2^-9 in a sum of 64 products near 16.
    assert (scores - exact).abs().max() < 0.03


@given(st.integers(1, 9), st.sampled_from([2, 4]), st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_packing_is_reversible(rows: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (2, rows * (8 // bits), 12), generator=generator, dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


@pytest.mark.parametrize(("bits", "gaussian_error"), [(4, 0.01154), (2, 0.1188)])
def test_quantiser_error(bits: int, gaussian_error: float) -> None:
    """Within the levels' range, errors are at most half a step. For Gaussian columns, see Max (1960), table II."""
    generator = torch.Generator().manual_seed(0)
    std = torch.tensor([[1.0, 0.1, 10.0], [3.0, 2.0, 0.01]])
    mean = torch.tensor([[0.0, 5.0, -1.0], [1.0, 0.0, 0.5]])
    x = mean.unsqueeze(1) + std.unsqueeze(1) * torch.randn(2, 40000, 3, generator=generator)
    quantiser = Quantiser.fit(Basis(x, x, 1.0), mean, std, bits)
    restored = dequantise(quantise(x, mean, quantiser.step, bits), mean, quantiser.step, bits)
    error = (restored - x) / std.unsqueeze(1)
    steps = (x - mean.unsqueeze(1)).abs() / quantiser.step.unsqueeze(1)
    inside = steps <= (1 << bits) / 2
    assert (error.abs() * (std / quantiser.step).unsqueeze(1))[inside].max() <= 0.5 + 1e-3
    assert error.square().mean((0, 1)).sub(gaussian_error).abs().max() < 0.05 * gaussian_error


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("group", [1, 4])
def test_quantised_scores_equal_scores_of_dequantised_keys(bits: int, group: int, device: torch.device) -> None:
    shape = geometry(group=group, head_dim=20)
    policy = make_policy(shape, torch.float64, device, scorer=f"int{bits}")
    q, k = tokens(shape, 50)
    state = filled_state(policy, q.to(device), k.to(device), 41)
    data, layer = artifact(shape), 1
    quantiser = Quantiser.fit(
        Basis(data.query[layer].double(), data.key[layer].double(), shape.scales[layer]),
        data.key_mean[layer].double(),
        data.key_std[layer].double(),
        bits,
    )
    skewed = k[layer] @ data.key[layer].double()
    restored = dequantise(quantise(skewed, quantiser.mean, quantiser.step, bits), quantiser.mean, quantiser.step, bits)
    query = quantiser.basis.skew_query(q[layer, :, -1])
    exact = query @ restored.transpose(1, 2)
    scores = state._keys.scores(layer, q[layer, :, -1].to(device), range(3, 50)).cpu()
    # The error of the int8 query is at most 1/254 of its largest weight per column. This error is multiplied by the
    # distance between the code and the middle level.
    weights = (query * quantiser.step.unsqueeze(1)).abs().amax(-1, keepdim=True)
    bound = weights / 254 * 20 * ((1 << bits) - 1) / 2
    assert ((scores - exact[:, :, 3:]).abs() <= bound).all()
    assert (scores - exact[:, :, 3:]).abs().mean() < 0.02 * exact.std()


def attention_mass_outside(
    policy: InfiniGen, layer: int, query: torch.Tensor, k: torch.Tensor, attended: list[set[int]]
) -> float:
    """Return the attention mass outside `attended`, computed from scoring keys and averaged over query heads."""
    scores, cap, group = (
        reference_scores(policy, layer, query, k, calibrated_columns(policy)),
        policy.geometry.softcap,
        policy.geometry.group,
    )
    weights = (scores if cap is None else cap * (scores / cap).tanh()).softmax(-1)
    outside = [1 - sum(float(row[t]) for t in attended[head // group]) for head, row in enumerate(weights)]
    return sum(outside) / len(outside)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("limit", "softcap"), [(0.02, None), (0.1, None), (0.3, None), (0.1, 1.5)])
def test_repair_reduces_the_missed_mass_with_the_fewest_tokens(
    group: int, limit: float, softcap: float | None, device: torch.device
) -> None:
    shape = replace(geometry(group=group), softcap=softcap)
    policy = make_policy(shape, device=device, max_missed_mass=limit, alpha=0.5, max_fraction=1.0)
    q, k = tokens(shape, TOTAL)
    state = filled_state(policy, q.to(device), k.to(device))
    visible = VisibleTokens.of(TOTAL, sinks=4, recent=8, window=None)
    selection = state.select(1, q[1, :, 0].to(device), visible).known()
    query = q[1, :, -1]
    extra = state.repair(1, query.to(device), visible, selection)
    assert extra is not None
    resident = set(visible.sinks) | set(visible.recent)
    first = [resident | row for row in as_sets(selection.tokens)]
    assert attention_mass_outside(policy, 1, query, k, first) > limit
    for count, reached in ((extra.count, True), (extra.count - 1, False)):
        rows = as_sets(extra.tokens[:, :count])
        assert not any(a & b for a, b in zip(first, rows, strict=True))
        assert all(row <= set(visible.candidates) for row in rows)
        attended = [a | b for a, b in zip(first, rows, strict=True)]
        assert (attention_mass_outside(policy, 1, query, k, attended) <= limit) == reached


def test_repair_adds_only_needed_tokens_within_the_cap() -> None:
    shape = geometry()
    q, k = tokens(shape, TOTAL)
    visible = VisibleTokens.of(TOTAL, sinks=4, recent=8, window=None)
    cap = math.floor(0.2 * len(visible.candidates))
    capped = make_policy(shape, max_missed_mass=1e-6, alpha=0.5, max_fraction=0.2)
    state = filled_state(capped, q, k)
    selection = state.select(0, q[0, :, 0], visible)
    extra = state.repair(0, q[0, :, -1], visible, selection)
    assert extra is not None and selection.count + extra.count == cap
    for policy in (make_policy(shape), make_policy(shape, max_missed_mass=0.999)):
        assert filled_state(policy, q, k).repair(0, q[0, :, -1], visible, selection) is None


def test_dense_layers_store_no_scoring_keys() -> None:
    shape = geometry(layers=3)
    q, k = tokens(shape, TOTAL)
    all_sparse, one_dense = (filled_state(make_policy(shape, dense_layers=dense), q, k) for dense in ((), (1,)))
    assert one_dense.device_bytes * 3 == all_sparse.device_bytes * 2


def test_options_that_do_not_fit_the_model_are_errors() -> None:
    with pytest.raises(ConfigError, match="layers 0 to 1"):
        make_policy(geometry(), dense_layers=(2,))
    other = artifact(geometry(head_dim=32))
    with pytest.raises(ArtifactError, match="offload-rt skew"):
        InfiniGen(InfiniGenOptions(), geometry(), other, CPU, torch.float32)


def test_provenance_key_depends_on_options_that_change_tokens() -> None:
    shape = geometry()
    provenance_keys = {
        make_policy(shape, **options).provenance_key
        for options in ({}, {"alpha": 4.0}, {"scorer": "int4"}, {"source": "normed_input"}, {"recent": 16})
    }
    provenance_keys.add(
        InfiniGen(make_policy(shape).options, shape, artifact(shape, 9), CPU, torch.float64).provenance_key
    )
    assert len(provenance_keys) == 6
    assert make_policy(shape).provenance_key == make_policy(shape, alpha=5.0).provenance_key, "the default"
