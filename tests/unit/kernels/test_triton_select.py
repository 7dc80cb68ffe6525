"""Compare the Triton kernel that selects tokens with its definition, including ties, and check for host waits."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from support.interpreter import is_compiled
from support.select_models import as_sets

from offload_rt.kernels import lists
from offload_rt.kernels.pointer_table import PointerTable
from offload_rt.kernels.selection import floor_fraction, select_tokens_reference, selection_limit

KINDS = ["continuous", "ties", "equal", "minus infinity", "signed zeros", "tiny", "no numbers"]


def random_scores(kind: str, shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    scores = torch.randn(shape, device=device) * 4
    if kind == "ties":
        return (scores / 3).round()
    if kind == "equal":
        return torch.zeros_like(scores)
    if kind == "no numbers":  # the model has overflowed: selected ids must still be valid tokens
        return scores * math.nan
    if kind == "minus infinity":
        return scores.masked_fill(torch.rand(shape, device=device) < 0.5, -math.inf)
    if kind == "signed zeros":
        return torch.where(torch.rand(shape, device=device) < 0.5, 0.0, -0.0)
    return scores * 1e-40 if kind == "tiny" else scores


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize(
    ("kind", "heads", "group", "alpha", "share"),
    [(kind, 1, 3, 4.0, 0.2) for kind in KINDS]
    + [
        ("continuous", 1, 1, math.inf, 0.3),
        ("ties", 3, 1, 4.0, 0.2),
        ("equal", 2, 16, 0.0, 0.1),
        ("ties", 1, 70, 4.0, 0.2),
    ],
)
def test_selected_tokens_equal_the_definition(
    kernel_device: torch.device, kind: str, heads: int, group: int, alpha: float, share: float
) -> None:
    from offload_rt.kernels.triton_select import select_tokens

    torch.manual_seed(group)
    tokens, first = (131_072, 64) if is_compiled(kernel_device) else (1100, 9)
    stop = [tokens - 5, tokens // 2, first, first + 1]  # long, short, no candidates, one candidate
    starts = torch.full((4 * heads,), first, dtype=torch.int32, device=kernel_device)
    stops = torch.tensor(stop, dtype=torch.int32, device=kernel_device).repeat_interleave(heads)
    masked = lists.mask_scores(random_scores(kind, (4 * heads, group, tokens), kernel_device), starts, stops)
    limits = [selection_limit(s - first, share) for s in stop]
    limit = torch.tensor(limits, dtype=torch.int32, device=kernel_device)
    chosen, counts = select_tokens(masked, starts, stops, heads, alpha, limit, tokens)
    expected, expected_counts = lists.select_tokens(masked, starts, stops, heads, alpha, limit, tokens)
    assert torch.equal(counts, expected_counts) and torch.equal(chosen, expected)
    assert expected_counts.view(4, heads)[2:].tolist() == [[0] * heads, [int(kind != "no numbers")] * heads]


@pytest.mark.parametrize("group", [1, 4])
def test_definition_equals_the_reference_for_one_sequence(group: int) -> None:
    torch.manual_seed(group)
    starts, stops = torch.full((3,), 8), torch.full((3,), 500)
    masked = lists.mask_scores(torch.randn(3, group, 512) * 3, starts, stops)
    limit = torch.tensor([selection_limit(492, 0.2)])
    chosen, counts = lists.select_tokens(masked, starts, stops, 3, 4.0, limit, 512)
    expected = select_tokens_reference(masked.scores[:, :, 8:500], 4.0, int(limit)) + 8
    assert as_sets(chosen[:, : int(counts[0])]) == as_sets(expected)
    assert floor_fraction(0.2, 492) == int(limit) > 0


def test_number_of_selected_tokens_is_limited(kernel_device: torch.device) -> None:
    from offload_rt.kernels.triton_select import select_tokens

    torch.manual_seed(0)
    starts = torch.zeros(2, dtype=torch.int32, device=kernel_device)
    stops = torch.full((2,), 1500, dtype=torch.int32, device=kernel_device)
    masked = lists.mask_scores(torch.randn(2, 2, 1500, device=kernel_device), starts, stops)
    limit = torch.tensor([1500], dtype=torch.int32, device=kernel_device)
    chosen, counts = select_tokens(masked, starts, stops, 2, math.inf, limit, 40)
    expected, _ = lists.select_tokens(masked, starts, stops, 2, math.inf, limit, 40)
    assert counts.tolist() == [40, 40] and torch.equal(chosen, expected)


@pytest.mark.gpu
@pytest.mark.simulated
def test_selection_does_not_wait_for_the_gpu() -> None:
    from offload_rt.kernels import dispatch

    device = torch.device("cuda")
    q, keys = torch.randn(8, 4, 38, device=device), torch.randn(8, 38, 1024, device=device).half()
    rows = torch.randn(8, 256, 128, device=device).half()
    own = PointerTable.of([keys])
    starts, stops = (torch.full((8,), at, dtype=torch.int32, device=device) for at in (4, 1000))
    limit = torch.full((1,), 128, dtype=torch.int32, device=device)
    query = torch.randn(8, 4, 128, device=device).half()

    def step() -> torch.Tensor:
        masked = dispatch.partial_scores(q, own, starts, stops, 1024)
        _, counts = dispatch.select_tokens(masked, starts, stops, 8, 4.0, limit, 128)
        return dispatch.attend_counted(query, rows, rows, counts, 0.09)[0]

    expected = step()  # compiles the kernels
    torch.cuda.synchronize()
    with warnings.catch_warnings():  # torch warns that this mode may change
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")  # a wait for the device is an error
    try:
        actual = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual, expected)
