"""Compare the Triton kernels that read, write and append entries through pointer tables with torch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from offload_rt.kernels import lists
from offload_rt.kernels.pointer_table import PointerTable

HEADS, ROWS = 2, 150
COUNTS = (0, 70, 200)  # no entries, fewer than ROWS, more than ROWS


def random_tables(device: torch.device, w: int, dtype: torch.dtype) -> tuple[PointerTable, PointerTable]:
    """Return a pointer table for three sequences with different capacities, and a table of copies."""
    torch.manual_seed(w)
    tensors = [torch.randn(HEADS, max(count, 1) + 3, w, device=device).to(dtype) for count in COUNTS]
    return PointerTable.of(tensors), PointerTable.of([x.clone() for x in tensors])


@pytest.mark.parametrize(("w", "dtype"), [(1, torch.float32), (24, torch.bfloat16), (300, torch.float32)])
def test_lists_are_read_and_written_up_to_their_counts(kernel_device: torch.device, w: int, dtype: torch.dtype) -> None:
    from offload_rt.kernels.triton_entries import read_lists, write_lists

    own, reference = random_tables(kernel_device, w, dtype)
    counts = torch.tensor(COUNTS, dtype=torch.int32, device=kernel_device)
    found = read_lists(own, ROWS, counts)
    assert torch.equal(found, lists.read_lists(reference, ROWS, counts))
    for p, count in enumerate(counts.repeat_interleave(HEADS).tolist()):
        assert torch.equal(found[p, :count], own.tensors[p // HEADS][p % HEADS, : min(count, ROWS)])
        assert not found[p, count:].any()
    write_lists(found + 1, own, counts)
    lists.write_lists(found + 1, reference, counts)
    for tensor, expected in zip(own.tensors, reference.tensors, strict=True):
        assert torch.equal(tensor, expected)


def test_grid_of_a_million_tokens_is_within_the_limits_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from offload_rt.kernels import triton_entries

    kernel = MagicMock()
    monkeypatch.setattr(triton_entries, "_copy", kernel)
    keys = torch.empty(8, 1 << 20, 256, device="meta")
    table: Any = SimpleNamespace(tensors=[keys], table=None, heads=8, lists=8, dtype=keys.dtype)
    triton_entries.read_lists(table, 1 << 20, torch.ones(1))
    [[grid]] = [call.args for call in kernel.__getitem__.call_args_list]
    assert grid == (1 << 16, 8)


@pytest.mark.parametrize(("group", "page"), [(1, 1), (3, 16)])
def test_scores_of_pages_without_candidates_are_masked(kernel_device: torch.device, group: int, page: int) -> None:
    from offload_rt.kernels.triton_entries import mask_scores

    scores = torch.randn(3, group, 5000, device=kernel_device)
    # ranges: empty, within one page, several blocks
    starts, stops = (
        torch.tensor(bounds, dtype=torch.int32, device=kernel_device) for bounds in ([9, 17, 5], [9, 30, 4900 * page])
    )
    masked, expected = mask_scores(scores, starts, stops, page), lists.mask_scores(scores.double(), starts, stops, page)
    assert torch.equal(masked.scores.double(), expected.scores) and torch.equal(
        masked.maxima.amax(-1).double(), expected.maxima.amax(-1)
    )
    assert masked.scores[0].isneginf().all() or page > 1
    assert (masked.scores[1] > -torch.inf).sum(1).tolist() == [13 if page == 1 else 1] * group
    torch.testing.assert_close(masked.lse.double(), expected.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("page", [1, 16])
def test_appended_entry_starts_a_page_or_lowers_its_minimum(kernel_device: torch.device, page: int) -> None:
    from offload_rt.kernels.triton_entries import append_entries

    own, reference = random_tables(kernel_device, 24, torch.bfloat16)
    for tensor in (*own.tensors, *reference.tensors):
        tensor[:, 3] = math.nan  # a new page does not read its memory
    before = own.tensors[1].clone()
    entries = torch.randn(3 * HEADS, 24, device=kernel_device).bfloat16()
    slots = torch.tensor([-1, page + page // 2, 3 * page], device=kernel_device).repeat_interleave(HEADS)
    append_entries(entries, own, slots, page)
    lists.append_entries(entries, reference, slots, page)
    for tensor, expected in zip(own.tensors, reference.tensors, strict=True):
        assert torch.equal(tensor.nan_to_num(9.0), expected.nan_to_num(9.0))
    newest = entries[HEADS : 2 * HEADS]
    assert torch.equal(own.tensors[1][:, 1], newest if page == 1 else torch.minimum(before[:, 1], newest))
    assert torch.equal(own.tensors[2][:, 3], entries[2 * HEADS :])
