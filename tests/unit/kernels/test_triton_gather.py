"""Test Triton kernels that copy requested KV: the bytes do not change, and no other memory is written."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.interpreter import is_compiled

from offload_rt.core import BLOCK_SIZE
from offload_rt.kernels import lists, pool_rows, reference
from offload_rt.kernels.pointer_table import PointerTable
from offload_rt.kernels.pool_rows import DeviceRows

ROWS = [  # dtype and row width: native rows, and quantised rows of even and odd byte counts
    (torch.bfloat16, 64), (torch.float16, 80), (torch.bfloat16, 96), (torch.float32, 128), (torch.float16, 256),
    (torch.uint8, 36), (torch.uint8, 54), (torch.uint8, 27),
]  # fmt: skip


def random_rows(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of random bytes, which include NaN and subnormal numbers."""
    return torch.randint(0, 256, (count, width * dtype.itemsize), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(("dtype", "width"), ROWS)
@pytest.mark.parametrize("pinned", [True, False])
def test_rows_are_copied_unchanged(kernel_device: torch.device, dtype: torch.dtype, width: int, pinned: bool) -> None:
    from offload_rt.kernels.triton_gather import gather_rows

    cuda = kernel_device.type == "cuda"
    total, listed = (1 << 20, 6554) if is_compiled(kernel_device) else (90, 21)
    rows = random_rows(total, width, dtype)
    rows = rows.pin_memory() if cuda and pinned else rows.to(kernel_device)
    counts = torch.tensor([listed, 0, 1, 13], dtype=torch.int32, device=kernel_device)
    ids = torch.randint(0, total, (4, listed), device=kernel_device)
    ids[3, 13:] = 1 << 60  # beyond the count: an invalid address
    ids[0, 5:9] = -1  # not requested
    out = torch.full((4, listed, width), 7, dtype=dtype, device=kernel_device)
    expected = out.clone()
    gather_rows(rows, ids, counts, out)
    pool_rows.gather_rows(rows, ids, counts, expected)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    assert (expected[0, 5:9] == 7).all()
    assert (expected[1] == 7).all() and not torch.equal(expected[0].view(torch.uint8), expected[1].view(torch.uint8))


def test_rows_are_copied_within_one_tensor(kernel_device: torch.device) -> None:
    from offload_rt.kernels.triton_gather import gather_rows

    rows = random_rows(40, 36, torch.uint8).to(kernel_device)
    ids = torch.full((1, 40), -1, device=kernel_device)
    ids[0, 30:] = torch.arange(10, device=kernel_device) * 2
    counts = torch.tensor([40], dtype=torch.int32, device=kernel_device)
    expected = rows.clone()
    expected[30:] = rows[:20:2]
    for gather in (gather_rows, pool_rows.gather_rows):
        out = rows.clone()
        gather(out, ids, counts, out.unsqueeze(0))
        assert torch.equal(out, expected)


def block_table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `bases` `[3, 2]` and `planes` `[2, 2]` for three sequences with two blocks and two heads.

    `bases` contains the first row of each block. `planes` contains the offsets of each head's K and V within a block.
    """
    bases = torch.randperm(6).view(3, 2) * (4 * BLOCK_SIZE)
    planes = torch.arange(4).view(2, 2) * BLOCK_SIZE
    return bases.to(device), planes.to(device)


PROGRAMS = itertools.product([(1, 2), (5, 2), (64, 2), (5, 1)], [True, False])
TYPES = itertools.cycle([(torch.bfloat16, 64), (torch.float32, 80), (torch.uint8, 27)])


@pytest.mark.parametrize(
    ("dtype", "width", "counted", "programs", "kv_count"),
    [(*kind, counted, *programs) for (programs, counted), kind in zip(PROGRAMS, TYPES, strict=False)],
)
def test_keys_and_values_of_tokens_are_gathered(
    kernel_device: torch.device,
    dtype: torch.dtype,
    width: int,
    counted: bool,
    programs: int,
    kv_count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from offload_rt.kernels import triton_gather

    monkeypatch.setattr(triton_gather, "PROGRAMS", programs)
    rows, (bases, planes) = random_rows(6 * 4 * BLOCK_SIZE, width, dtype), block_table(kernel_device)
    rows, planes = rows.pin_memory() if kernel_device.type == "cuda" else rows, planes[:kv_count]
    tokens = torch.randint(0, 2 * BLOCK_SIZE, (6, 150), device=kernel_device)
    counts = torch.tensor([150, 0, 1, 130, 33, 64], dtype=torch.int32, device=kernel_device)
    if counted:
        tokens[2, 1:] = 1 << 40  # beyond the count: in no block
    out = torch.full((kv_count, 6, 150, width), 7, dtype=dtype, device=kernel_device)
    triton_gather.gather_tokens(rows, tokens, counts if counted else None, bases, planes, out)
    for kv in range(kv_count):
        for p in range(6):
            for i in range(150):
                actual = out[kv, p, i].cpu()
                if counted and i >= int(counts[p]):
                    assert (actual == 7).all()
                    continue
                block, within = divmod(int(tokens[p, i]), BLOCK_SIZE)
                row = int(bases[p // 2, block]) + int(planes[kv, p % 2]) + within
                assert torch.equal(actual.view(torch.uint8), rows[row].view(torch.uint8))
    expected = torch.full_like(out, 7)
    pool_rows.gather_tokens(rows, tokens, counts if counted else None, bases, planes, expected)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kv_count", [2, 1])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 20), (torch.uint8, 13)])
def test_newest_rows_are_written_to_the_pool(
    kernel_device: torch.device, dtype: torch.dtype, width: int, kv_count: int
) -> None:
    from offload_rt.kernels.triton_gather import write_rows

    bases, planes = block_table(kernel_device)
    planes = planes[:kv_count]
    newest = bases[:, 1] + torch.tensor([0, 5, BLOCK_SIZE - 1], device=kernel_device)
    k, v = random_rows(12, width, dtype).to(kernel_device).split(6)
    rows = torch.zeros(6 * 4 * BLOCK_SIZE, width, dtype=dtype)
    rows = rows.pin_memory() if kernel_device.type == "cuda" else rows
    expected = torch.zeros(6 * 4 * BLOCK_SIZE, width, dtype=dtype)
    for p in range(6):
        for kv, source in enumerate((k, v)[:kv_count]):
            expected[int(newest[p // 2]) + int(planes[kv, p % 2])] = source[p].cpu()
    write_rows(rows, k, v, newest, planes)
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(rows.view(torch.uint8), expected.view(torch.uint8))
    defined = torch.zeros_like(expected)
    pool_rows.write_rows(defined, k, v, newest, planes)
    assert torch.equal(defined.view(torch.uint8), expected.view(torch.uint8))


SLOTS = 2


def device_rows(pool: torch.Tensor, bases: torch.Tensor, planes: torch.Tensor) -> DeviceRows:
    """Copy one block of the first sequence and one of the last to the device: `[K or V, head, slot, token]`.

    The copied rows are then zeroed in the pool, and `bases` is changed to refer to the copies.
    """
    (kv_count, heads), first = planes.shape, len(pool)
    copies = pool.new_empty(kv_count * heads * SLOTS * BLOCK_SIZE, pool.shape[1])
    offsets = torch.arange(kv_count * heads).view(kv_count, heads) * SLOTS * BLOCK_SIZE
    for slot, (b, block) in enumerate([(0, 1), (2, 0)]):
        for kv, head in itertools.product(range(kv_count), range(heads)):
            source, target = int(bases[b, block] + planes[kv, head]), int(offsets[kv, head]) + slot * BLOCK_SIZE
            copies[target : target + BLOCK_SIZE] = pool[source : source + BLOCK_SIZE]
            pool[source : source + BLOCK_SIZE] = 0
        bases[b, block] = first + slot * BLOCK_SIZE
    return DeviceRows(copies.to(bases.device), first, offsets.to(bases.device) - first)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.uint8, 27)])
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("kv_count", [2, 1])
def test_tokens_are_read_from_copies_on_the_device(
    kernel_device: torch.device, dtype: torch.dtype, width: int, counted: bool, kv_count: int
) -> None:
    from offload_rt.kernels.triton_gather import gather_rows, gather_tokens

    rows, (bases, planes) = random_rows(6 * 4 * BLOCK_SIZE, width, dtype), block_table(kernel_device)
    tokens, planes = torch.randint(0, 2 * BLOCK_SIZE, (6, 50), device=kernel_device), planes[:kv_count].contiguous()
    counts = torch.tensor([50, 0, 1, 50, 33, 17], dtype=torch.int32, device=kernel_device)
    limits = counts if counted else None
    expected = torch.full((kv_count, 6, 50, width), 7, dtype=dtype, device=kernel_device)
    pool_rows.gather_tokens(rows, tokens, limits, bases, planes, expected)
    device = device_rows(rows, bases, planes)
    rows = rows.pin_memory() if kernel_device.type == "cuda" else rows
    valid = torch.arange(50, device=kernel_device) < counts.unsqueeze(1) if counted else tokens >= 0
    block = tokens // BLOCK_SIZE
    copied = torch.cat((block[:2] == 1, block[2:4] > 1, block[4:] == 0)) & valid
    per_sequence = torch.stack((valid & ~copied, copied), dim=-1).view(3, 100, 2).sum(1)
    assert per_sequence[:, 0].min() > 0 and per_sequence[::2, 1].min() > 0
    for gather in (gather_tokens, pool_rows.gather_tokens):
        out, tally = torch.full_like(expected, 7), torch.ones(3, 2, dtype=torch.int64, device=kernel_device)
        gather(rows, tokens, limits, bases, planes, out, device, tally)
        assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(tally, per_sequence + 1)  # entries read from the pool and from copies are added
    starts = bases.gather(1, block.view(3, -1)).view(3, 2, -1)
    offsets = torch.where(starts >= device.first, device.planes[0, :, None] + device.first, planes[0, :, None])
    ids = (starts + offsets).view(6, -1) + tokens % BLOCK_SIZE
    ids[3, 7] = -1
    expected[0, 3, 7] = 7
    for gather in (gather_rows, pool_rows.gather_rows):
        out = torch.full_like(expected[0], 7)
        gather(rows, ids, counts if counted else torch.full_like(counts, 50), out, device)
        assert torch.equal(out.view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("kv_count", [2, 1])
def test_newest_rows_are_also_written_to_copies_on_the_device(kernel_device: torch.device, kv_count: int) -> None:
    from offload_rt.kernels.triton_gather import write_rows

    bases, planes = block_table(torch.device("cpu"))
    planes, first = planes[:kv_count].contiguous(), 6 * 4 * BLOCK_SIZE
    offsets = torch.arange(2 * kv_count).view(kv_count, 2) * BLOCK_SIZE
    # The second sequence has no copy, and the third is padding.
    newest = torch.tensor([int(bases[0, 1]) + 5, int(bases[1, 0]), -1, first + 5, -1, -1], device=kernel_device)
    k, v = random_rows(12, 27, torch.uint8).to(kernel_device).split(6)
    for write in (write_rows, pool_rows.write_rows):
        rows, copies = (torch.zeros(count, 27, dtype=torch.uint8) for count in (first, 4 * BLOCK_SIZE))
        rows, copies = rows.pin_memory() if kernel_device.type == "cuda" else rows, copies.to(kernel_device)
        planes_there = planes.to(kernel_device)
        write(rows, k, v, newest, planes_there, DeviceRows(copies, first, offsets.to(kernel_device) - first))
        if kernel_device.type == "cuda":
            torch.cuda.synchronize()
        for kv, head in itertools.product(range(kv_count), range(2)):
            source = (k, v)[kv].cpu()
            assert torch.equal(rows[int(bases[0, 1] + planes[kv, head]) + 5], source[head])
            assert torch.equal(rows[int(bases[1, 0] + planes[kv, head])], source[2 + head])
            assert torch.equal(copies.cpu()[int(offsets[kv, head]) + 5], source[head])
        assert int((rows != 0).any(1).sum()) == 4 * kv_count and int((copies != 0).any(1).sum()) == 2 * kv_count


@pytest.mark.parametrize("kv_count", [2, 1])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 20), (torch.uint8, 13)])
def test_slots_are_read_and_written(kernel_device: torch.device, dtype: torch.dtype, width: int, kv_count: int) -> None:
    from offload_rt.kernels import triton_gather

    count = 2 * kv_count
    stored = [random_rows(count * 9, width, dtype).view(count, 9, width).to(kernel_device) for _ in range(3)]
    slots = torch.stack([torch.randperm(9)[:7] for _ in range(6)]).to(kernel_device)
    slots[1, 2] = slots[4, 0] = slots[4, 6] = -1  # not read or written
    source = random_rows(kv_count * 6 * 7, width, dtype).view(kv_count, 6, 7, width).to(kernel_device)
    for name in ("gather_slots", "scatter_slots"):
        results = []
        for module in (lists, triton_gather):
            tensors, rows = [tensor.clone() for tensor in stored], source.clone()
            getattr(module, name)(PointerTable.of(tensors), slots, rows)
            results.append([*tensors, rows])
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(expected.view(torch.uint8), actual.view(torch.uint8))
        changed = results[0][-1] if name == "gather_slots" else torch.stack(results[0][:3])
        assert not torch.equal(changed, source if name == "gather_slots" else torch.stack(stored))
        if name == "gather_slots":
            # Random bits may be NaN, which is not equal to itself.
            changed, before = changed.view(torch.uint8), source.view(torch.uint8)
            assert torch.equal(changed[-1, 3, 5], stored[1][-1, slots[3, 5]].view(torch.uint8))
            assert torch.equal(changed[:, 4, 0], before[:, 4, 0])


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 256), (torch.float32, 8), (torch.float64, 12)])
@pytest.mark.parametrize("pinned", [True, False])
def test_parts_of_embeddings_are_copied_unchanged(
    kernel_device: torch.device, dtype: torch.dtype, width: int, pinned: bool
) -> None:
    from offload_rt.kernels.triton_embedding import embedding_part

    embeddings = random_rows(50, 3 * width, dtype)
    embeddings = embeddings.pin_memory() if kernel_device.type == "cuda" and pinned else embeddings.to(kernel_device)
    for tokens in (0, 1, 21):
        ids = torch.randint(0, 50, (tokens,), device=kernel_device)
        for layer in range(3):
            part = embeddings[:, layer * width : (layer + 1) * width]
            actual, expected = embedding_part(part, ids), reference.embedding_part(part, ids)
            assert actual.device == ids.device and torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
