"""Zero-copy gather: the rows that are asked for, byte for byte; nothing behind a count, or with a negative id, is
written."""

from __future__ import annotations

import pytest
import torch

from offload_rt.kernels import lists

ROWS = [  # dtype and width of a row: native rows, and quantised ones of even and odd byte counts
    (torch.bfloat16, 64), (torch.float16, 80), (torch.bfloat16, 96), (torch.float32, 128), (torch.float16, 256),
    (torch.uint8, 36), (torch.uint8, 54), (torch.uint8, 27),
]  # fmt: skip


def random_rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes: NaN and subnormal numbers among them must survive."""
    return torch.randint(0, 256, (count, width * dtype.itemsize), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(("dtype", "width"), ROWS)
@pytest.mark.parametrize("pinned", [True, False])
def test_rows_arrive_as_they_are(kernel_device: torch.device, dtype: torch.dtype, width: int, pinned: bool) -> None:
    from offload_rt.kernels.triton_gather import gather_rows

    cuda = kernel_device.type == "cuda"
    total, listed = (1 << 20, 6554) if cuda else (90, 21)
    rows = random_rows(total, width, dtype)
    rows = rows.pin_memory() if cuda and pinned else rows.to(kernel_device)
    counts = torch.tensor([listed, 0, 1, 13], dtype=torch.int32, device=kernel_device)
    ids = torch.randint(0, total, (4, listed), device=kernel_device)
    ids[3, 13:] = 1 << 60  # behind the count: an address nobody may read
    ids[0, 5:9] = -1  # not wanted
    out = torch.full((4, listed, width), 7, dtype=dtype, device=kernel_device)
    want = out.clone()
    gather_rows(rows, ids, counts, out)
    lists.gather_rows(rows, ids, counts, want)
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))
    assert (want[0, 5:9] == 7).all()
    assert (want[1] == 7).all() and not torch.equal(want[0].view(torch.uint8), want[1].view(torch.uint8))


def test_rows_that_are_there_twice_are_copied_within(kernel_device: torch.device) -> None:
    """Source and target are one tensor; rows that are read are not written."""
    from offload_rt.kernels.triton_gather import gather_rows

    rows = random_rows(40, 36, torch.uint8).to(kernel_device)
    ids = torch.full((1, 40), -1, device=kernel_device)
    ids[0, 30:] = torch.arange(10, device=kernel_device) * 2
    counts = torch.tensor([40], dtype=torch.int32, device=kernel_device)
    want = rows.clone()
    want[30:] = rows[:20:2]
    for gather in (gather_rows, lists.gather_rows):
        out = rows.clone()
        gather(out, ids, counts, out.unsqueeze(0))
        assert torch.equal(out, want)
