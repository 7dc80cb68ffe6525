"""Compare attention in prefill chunks, and attention to several parts of KV, with a softmax in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cuda_simulator import Lazy, simulated

from offload_rt.core import KVPart
from offload_rt.kernels import causal_cpu, decode_attention, team
from offload_rt.kernels.causal import attend_causal
from offload_rt.kernels.causal_blocks import BlockedAttention
from offload_rt.kernels.decode_attention import attend, group_weights, scores_lse


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask: torch.Tensor,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention in float64 for q `[H, m, d]`, k and v `[Hkv, n, d]`, and mask `[m, n]`."""
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0).double() for x in (k, v))
    scores = q.double() @ k.mT * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, q.shape[1], 1)), -1)
    return scores.softmax(-1)[:, :, : k.shape[1]] @ v


def random_qkv(seed: int, heads: int, group: int, m: int, n: int, d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads * group, m, d), (heads, n, d), (heads, n, d)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


ERRORS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
"""Error bounds: a few units in the last place of values up to about 3, from sums of n products of rounded numbers."""


BOUNDS = {torch.bfloat16: 2e-2, torch.float32: 5e-6}
"""Error bounds of the C code. In bfloat16, outputs and weights are rounded to 8 bits."""


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("window", [None, 5, 33, 500])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 90), (16, 16), (16, 90), (64, 70)])
@pytest.mark.parametrize("group", [1, 4])
def test_causal_prefill_chunks(
    device: torch.device, dtype: torch.dtype, window: int | None, m: int, n: int, group: int
) -> None:
    q, k, v = random_qkv(m * n, 2, group, m, n, 32, dtype)
    distance = torch.arange(n - m, n)[:, None] - torch.arange(n)
    mask = (distance >= 0) & (distance < (window or n))
    out = attend_causal(q.to(device), k.to(device), v.to(device), 0.3, window)
    assert out.dtype == dtype and out.shape == q.shape
    assert (out.cpu().double() - reference_attention(q, k, v, 0.3, mask)).abs().max() < ERRORS[dtype]


@pytest.mark.parametrize(("dtype", "launches"), [(torch.bfloat16, 1), (torch.float32, 4)], ids=str)
def test_gpu_reads_keys_once_per_kv_head_in_half_precision(dtype: torch.dtype, launches: int) -> None:
    for m, n in ((64, 90), (90, 90)):  # a prefill chunk after 26 earlier tokens, and the first chunk of a prompt
        q, k, v = random_qkv(3, 2, 4, m, n, 32, dtype)
        mask = torch.arange(n - m, n)[:, None] >= torch.arange(n)
        with simulated(Lazy()) as sim:
            out = attend_causal(q.to("cuda"), k.to("cuda"), v.to("cuda"), 0.3, None)
            assert sim.launched["attention"] == launches
            assert (out.cpu().double() - reference_attention(q, k, v, 0.3, mask)).abs().max() < ERRORS[dtype]


@pytest.mark.sampled(5)  # coprime to the number of values of each parameter, so that all pairs of values occur
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("d", "m", "n"), [(64, 70, 333), (64, 4, 200), (96, 40, 129)])
@pytest.mark.parametrize(("window", "cap", "with_sinks"), [(None, None, False), (70, 2.0, True), (3, None, True)])
def test_causal_attention_in_c_and_torch_equals_float64(
    level: str,
    d: int,
    m: int,
    n: int,
    window: int | None,
    cap: float | None,
    with_sinks: bool,
    threads: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = (x[:, ::2] for x in random_qkv(n, 2, 3, 2 * m, 2 * n, d, dtype))  # not contiguous
    monkeypatch.setattr(causal_cpu, "MIN_THREADED_WORK", 0)
    monkeypatch.setattr(team, "threads", lambda: threads)
    sinks = torch.linspace(-1, 3, 6) if with_sinks else None
    distance = torch.arange(n - m, n)[:, None] - torch.arange(n)
    expected = reference_attention(q, k, v, 0.3, (distance >= 0) & (distance < (window or n)), cap, sinks)
    outputs = [attend_causal(q, k, v, 0.3, window, cap, sinks)]
    if causal_cpu.library_for(q) is not None:
        monkeypatch.setattr(causal_cpu, "library_for", lambda q: None)
        outputs.append(attend_causal(q, k, v, 0.3, window, cap, sinks))
    for out in outputs:
        assert out.dtype == dtype and out.shape == q.shape
        assert (out.double() - expected).abs().max() < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("d", "m", "edges"), [(64, 70, (0, 100, 101, 333)), (96, 40, (0, 129)), (32, 1, (0, 64, 90))])
def test_attention_to_blocks_in_c_and_torch_equals_float64(
    level: str,
    d: int,
    m: int,
    edges: tuple[int, ...],
    cap: float | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n = edges[-1] + 7 + m  # blocks, 7 earlier tokens, and the tokens of the queries
    q, k, v = random_qkv(n, 2, 3, m, n, d, dtype)
    # The first block gets nearly all attention weight from some queries, and almost none from others.
    q = q * torch.linspace(0.1, 4, m).to(q.dtype).view(1, m, 1)
    sinks, outputs = torch.linspace(-1, 9, 6), []
    expected = reference_attention(q, k, v, 0.3, torch.arange(n - m, n)[:, None] >= torch.arange(n), cap, sinks)
    for uses_c_code in (True, False):
        if not uses_c_code:
            monkeypatch.setattr(causal_cpu, "library_for", lambda q: None)
        elif causal_cpu.library_for(q) is None:
            continue
        attention = BlockedAttention(q, 2, 0.3, cap)
        for first, stop in itertools.pairwise(edges):
            attention.add(k[:, first:stop], v[:, first:stop])
        attention.add_causal(k[:, edges[-1] :], v[:, edges[-1] :])
        outputs.append(attention.result(sinks))
    for out in outputs:
        assert out.dtype == dtype and out.shape == q.shape
        # Scores of 45 in float32 have rounding errors of 2e-6.
        assert (out.double() - expected).abs().max() < (2e-2 if dtype == torch.bfloat16 else 5e-5)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 50), max_size=4), group=st.sampled_from([1, 2, 7]), seed=st.integers(0, 99))
def test_attention_to_parts_equals_attention_to_all_rows(cuts: list[int], group: int, seed: int) -> None:
    q, k, v = random_qkv(seed, 3, group, 1, 50, 16, torch.float64)
    edges = [0, *sorted(cuts), 50]
    parts = [KVPart(k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(edges)]
    out, lse = attend(q[:, 0], parts, 0.5)
    expected = reference_attention(q, k, v, 0.5, torch.ones(1, 50, dtype=torch.bool))[:, 0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, scores_lse(q[:, 0], k, 0.5), rtol=0, atol=1e-12)
    weights = group_weights(q[:, 0], parts, 0.5, lse)
    scores = q.view(3, group, 16) @ k.transpose(1, 2) * 0.5
    torch.testing.assert_close(weights, torch.softmax(scores, -1).sum(1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize(("group", "n"), [(1, 1), (7, 130), (120, 64)])
def test_bfloat16_attention_in_torch_equals_float64(
    group: int, n: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "library", lambda *_: None)
    q, k, v = random_qkv(n, 2, group, 1, n, 64, torch.bfloat16)
    scores = q.double().view(2, group, 64) @ k.double().mT * 0.3
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    out, lse = attend(q[:, 0], [KVPart(k, v)], 0.3, cap)
    torch.testing.assert_close(lse.view(2, group), scores.logsumexp(-1).float(), rtol=0, atol=1e-5)
    error = (out.view(2, group, 64).double() - scores.softmax(-1) @ v.double()).abs().max()
    assert out.dtype == torch.float32 and error < ERRORS[torch.bfloat16] / 2


def test_large_score_differences_do_not_overflow() -> None:
    q = torch.full((1, 4), 100.0)
    k = torch.stack([torch.full((4,), 100.0), torch.full((4,), -100.0)])[None]
    out, lse = attend(q, [KVPart(k[:, :1], k[:, :1]), KVPart(k[:, 1:], k[:, 1:])], 1.0)
    assert torch.equal(out, torch.full((1, 4), 100.0)) and lse.item() == 40000


@pytest.mark.parametrize("group", [1, 4, 9])
def test_scores_do_not_depend_on_the_size_of_the_cpu_cache(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload_rt.kernels import reference

    q, k = torch.randn(2, group, 32), torch.randn(2, 100, 40)[:, :, :32]
    expected = (q.double() @ k.double().mT).float()
    for cache_bytes in (0, 1 << 30):  # each uses a different order of the product
        monkeypatch.setattr(reference, "CACHE_BYTES", cache_bytes)
        scores = reference.scaled_scores(q, k, 1.0)
        assert scores.is_contiguous()
        # rounding of 32 products of unit normals
        torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
        wider = torch.zeros(2, group, 103)
        reference.scaled_scores(q, k, 1.0, out=wider[:, :, 3:])
        assert torch.equal(wider[:, :, 3:], scores) and not wider[:, :, :3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_half_precision_rows_are_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload_rt.kernels import reference

    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, 32) * 8).to(dtype), torch.randn(2, 100, 32).to(dtype)
    expected = q.double() @ k.double().mT * 0.5
    monkeypatch.setattr(reference, "WIDENED_BYTES", 32 * 2 * 32)  # several blocks of rows, the last one shorter
    scores = reference.scaled_scores(q, k, 0.5)
    assert scores.dtype == torch.float32 and expected.abs().max() > 20
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-4)  # bfloat16 would have errors up to 0.06
    out, lse = reference.attend_part(q, k, k, 0.5)
    torch.testing.assert_close(lse.double(), expected.logsumexp(-1), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.double(), torch.softmax(expected, -1) @ k.double(), rtol=0, atol=2.0**-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_capped_scores_of_half_precision_rows_are_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_cpu, "library_for", lambda q: None)  # torch's path, which GPUs use too
    q, k, v = random_qkv(0, 2, 2, 40, 100, 64, dtype)
    q *= 4
    out = attend_causal(q, k, v, 0.125, None, softcap=30.0)
    expected = attend_causal(q.double(), k.double(), v.double(), 0.125, None, softcap=30.0)
    # Only rounding of outputs and weights may add errors.
    assert (out.double() - expected).abs().max() < 2 * torch.finfo(dtype).eps


def test_part_without_valid_entries_is_ignored() -> None:
    q, k, v = random_qkv(1, 2, 2, 1, 30, 16, torch.float32)
    empty = KVPart(k * math.nan, v, torch.zeros(2, dtype=torch.int32))
    for cap in (None, 2.0):
        with_empty, without_empty = (
            attend(q[:, 0], parts, 0.3, cap) for parts in ([KVPart(k, v), empty], [KVPart(k, v)])
        )
        torch.testing.assert_close(with_empty, without_empty)
