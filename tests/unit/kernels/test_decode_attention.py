"""Decode attention in C equals a softmax in float64 at every instruction set level."""

from __future__ import annotations

import itertools

import pytest
import torch

from offload_rt.core import KVPart, PagedRows
from offload_rt.kernels import decode_attention, team
from offload_rt.model_runner.attention import attend

pytestmark = pytest.mark.skipif(decode_attention.takes(torch.zeros(1, 32)) is None, reason="there is no compiled code")

SHAPES = [(32, 1, 1), (64, 3, 130), (64, 7, 64), (96, 2, 63), (128, 4, 517), (256, 9, 40), (64, 120, 70)]
"""Head dimensions, queries of a KV head and tokens. A block has 64 tokens, and 4 queries are computed together."""


def inputs(group: int, n: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q `[2, G, d]` with scores far apart for later queries, and k, v `[2, n, d]` with gaps between rows."""
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(2, group, d, generator=generator) * torch.linspace(0.1, 4, group)[:, None]
    k, v = (torch.randn(2, 2 * n, d, generator=generator).to(dtype)[:, ::2] for _ in range(2))
    return q.to(dtype), k, v


def paged_rows(k: torch.Tensor, v: torch.Tensor) -> PagedRows:
    """Return k, v `[2, n, d]` as entries of a pool with blocks in another order, and NaN between them.

    The first tokens and the last two are resident, as far as they exist. The others are at random positions.
    """
    (heads, n, d), generator = k.shape, torch.Generator().manual_seed(0)
    first = 150 if n > 200 else min(3, n - 1)
    last = min(2, max(0, n - 4))
    middle, blocks = n - first - last, n // 32 + 2
    stop = blocks * 64 - 3
    resident = range(first), range(stop - last, stop)
    tokens = torch.stack([torch.randperm(stop - last - first, generator=generator)[:middle] for _ in range(heads)])
    block_rows = (torch.randperm(blocks, generator=generator) - torch.arange(blocks)) * 64
    keys, values = torch.full((2, 1 + heads * (blocks * 64 + 5), d), torch.nan, dtype=k.dtype)
    rows = PagedRows(keys, values, block_rows, 1, blocks * 64 + 5, resident, tokens + first)
    placed = [*range(first), *range(n - last, n), *range(first, n - last)]
    keys[rows.ids], values[rows.ids] = k[:, placed], v[:, placed]
    return rows


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.double() @ k.double().mT * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return (scores.softmax(-1) @ v.double()).float(), scores.logsumexp(-1).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(("d", "group", "n"), SHAPES)
def test_outputs_are_those_of_float64(
    d: int, group: int, n: int, cap: float | None, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For KV in order and in blocks of the pool, in one part and in several. Products of bfloat16 are exact in float32,
    so both types have the same bounds."""
    q, k, v = inputs(group, n, d, dtype)
    want = expected(q, k, v, 0.2, cap)
    code = decode_attention.takes(q)
    assert code is not None
    rows = paged_rows(k, v)
    for least in (1 << 20, 64):
        monkeypatch.setattr(decode_attention, "MIN_TOKENS", least)
        for got in (
            code.attend(q, k, v, 0.2, cap),
            code.attend_paged(q, rows, 0.2, cap),
        ):
            assert got[0].dtype == got[1].dtype == torch.float32
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_threads_and_other_queries_change_no_bit(
    dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "WORTH_THREADS", 0)
    monkeypatch.setattr(decode_attention, "MIN_TOKENS", 64)
    monkeypatch.setattr(team, "threads", lambda: threads)
    q, k, v = inputs(6, 1500, 64, dtype)
    code, found = decode_attention.takes(q), []
    assert code is not None
    for threads in (1, 3, 300):  # noqa: B007
        found.append(code.attend(q, k, v, 0.2, None)[0])
    fewer = [code.attend(q[:, :count], k, v, 0.2, None)[0] for count in range(1, 6)]
    assert all(found[0].equal(other) for other in found)
    assert all(found[0][:, : each.shape[1]].equal(each) for each in fewer)


def test_a_step_uses_it_for_each_part(level: str) -> None:
    """Empty parts are skipped; parts are merged by their log-sum-exps."""
    q, k, v = inputs(3, 200, 64, torch.float32)
    parts = [KVPart(k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise([0, 1, 1, 70, 200])]
    out, lse = attend(q.flatten(0, 1), parts, 0.2)
    want, want_lse = expected(q, k, v, 0.2, None)
    torch.testing.assert_close((out, lse), (want.flatten(0, 1), want_lse.flatten()), rtol=0, atol=1e-5)


def test_unsupported_inputs_are_left_to_torch() -> None:
    for q in (
        torch.zeros(1, 48),
        torch.zeros(1, 64).double(),
        torch.zeros(1, 64).half(),
        torch.zeros(1, 64).to("meta"),
    ):
        assert decode_attention.takes(q) is None
