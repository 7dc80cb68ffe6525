"""Compare decode attention in C with a softmax in float64, at every instruction set level."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.kernel_calls import assert_in_place, count_kernels

from offload_rt.core import KVPart
from offload_rt.kernels import decode_attention, team
from offload_rt.kernels.decode_attention import PagedPart, attend, attend_in_c, library
from offload_rt.utils.native_code import available_levels

pytestmark = pytest.mark.skipif(library(32, torch.float32) is None, reason="there is no compiled code")

SHAPES = [(32, 1, 1), (64, 3, 130), (64, 7, 64), (96, 2, 63), (128, 4, 517), (256, 9, 40), (64, 120, 70)]
"""Head dimension, queries of a KV head, and tokens. A block has 64 tokens, and 4 queries are computed together.
Levels below the highest run only two head dimensions, because each needs its own compilation."""

LEVELS = available_levels()


def random_qkv(group: int, n: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q `[2, G, d]`, and non-contiguous k and v `[2, n, d]`. Later queries have larger scores."""
    generator = torch.Generator().manual_seed(n)
    q = torch.randn(2, group, d, generator=generator) * torch.linspace(0.1, 4, group)[:, None]
    k, v = (torch.randn(2, 2 * n, d, generator=generator).to(dtype)[:, ::2] for _ in range(2))
    return q.to(dtype), k, v


def paged_part(k: torch.Tensor, v: torch.Tensor) -> PagedPart:
    """Return k and v `[2, n, d]` as entries of a pool with shuffled blocks. Unused slots contain NaN.

    The first tokens and the last two are resident. All other tokens are at random positions.
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
    part = PagedPart((keys, values), block_rows, 1, blocks * 64 + 5, resident, tokens + first, no_gather)
    placed = [*range(first), *range(n - last, n), *range(first, n - last)]
    keys[part.ids], values[part.ids] = k[:, placed], v[:, placed]
    return part


def no_gather(plane: int, ids: torch.Tensor) -> torch.Tensor:
    raise AssertionError("KV is read in place")


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q.double() @ k.double().mT * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    return (scores.softmax(-1) @ v.double()).float(), scores.logsumexp(-1).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(
    ("level", "d", "group", "n"),
    [(level, *shape) for level in LEVELS for shape in SHAPES if level == LEVELS[-1] or shape[0] in (64, 96)],
    indirect=["level"],
)
def test_contiguous_and_paged_kv_equal_float64(
    d: int, group: int, n: int, cap: float | None, dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = random_qkv(group, n, d, dtype)
    expected = reference_attention(q, k, v, 0.2, cap)
    c_library = library(d, dtype)
    assert c_library is not None
    for min_tokens in (1 << 20, 64):  # computed at once, and in several parts
        monkeypatch.setattr(decode_attention, "MIN_TOKENS", min_tokens)
        for part in (KVPart(k, v), paged_part(k, v)):
            out, lse = attend_in_c(c_library, q.flatten(0, 1), part, 0.2, cap)
            assert out.dtype == lse.dtype == torch.float32
            # Products of bfloat16 are exact in float32, so both types have the same tolerance.
            torch.testing.assert_close((out.view_as(q), lse.view(2, -1)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_threads_and_number_of_queries_do_not_change_outputs(
    dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "MIN_THREADED_WORK", 0)
    monkeypatch.setattr(decode_attention, "MIN_TOKENS", 64)
    monkeypatch.setattr(team, "threads", lambda: threads)
    q, k, v = random_qkv(6, 1500, 64, dtype)
    c_library, outputs = library(64, dtype), []
    assert c_library is not None

    def attended(queries: torch.Tensor) -> torch.Tensor:
        return attend_in_c(c_library, queries.flatten(0, 1), KVPart(k, v), 0.2, None)[0].view_as(queries)

    for threads in (1, 3, 300):  # noqa: B007
        outputs.append(attended(q))
    fewer = [attended(q[:, :count]) for count in range(1, 6)]
    assert all(outputs[0].equal(other) for other in outputs)
    assert all(outputs[0][:, : output.shape[1]].equal(output) for output in fewer)


def test_parts_are_merged_and_empty_parts_are_skipped(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_kernels(monkeypatch)
    q, k, v = random_qkv(3, 200, 64, torch.float32)
    parts = [KVPart(k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise([0, 1, 1, 70, 200])]
    out, lse = attend(q.flatten(0, 1), parts, 0.2)
    expected, expected_lse = reference_attention(q, k, v, 0.2, None)
    torch.testing.assert_close((out, lse), (expected.flatten(0, 1), expected_lse.flatten()), rtol=0, atol=1e-5)
    assert_in_place(calls)
    assert calls["attend_in_c"] == 3, "C code runs once for each part that is not empty"


def test_only_empty_parts_are_an_error() -> None:
    q, k, v = random_qkv(3, 1, 64, torch.float32)
    with pytest.raises(AssertionError, match="all parts are empty"):
        attend(q.flatten(0, 1), [KVPart(k[:, :0], v[:, :0])] * 2, 0.2)


def test_unsupported_inputs_have_no_c_code() -> None:
    for d, dtype in ((48, torch.float32), (64, torch.float64), (64, torch.float16)):
        assert library(d, dtype) is None
