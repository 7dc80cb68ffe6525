"""Test the host pool: block tables, reads and writes, contiguous runs, limits, and copy-on-write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.pools import BLOCK_BYTES, append, geometry, kv, make_pool, read

from offload_rt.core import BLOCK_SIZE, BlockTable
from offload_rt.errors import MemoryLimitError, PoolFullError
from offload_rt.kv_cache import system_memory
from offload_rt.kv_cache.layout import PAGE, ArenaLayout
from offload_rt.kv_cache.pool import HostPool
from offload_rt.utils import control_groups
from offload_rt.utils.control_groups import processor_limit


def gather_kv(pool: HostPool, blocks: BlockTable, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's K and V `[Hkv, length, d]`, gathered by row index."""
    tokens = torch.arange(blocks.length)
    base = pool.row_base(blocks)[tokens // BLOCK_SIZE] + tokens % BLOCK_SIZE
    rows = torch.tensor([[pool.layout.row(layer, head, side) for head in range(2)] for side in range(2)])
    k, v = pool.rows[base + rows[..., None]]
    return k, v


def test_rows_and_runs_return_the_written_kv() -> None:
    pool = make_pool(12)
    blocks = pool.new_block_table(600)
    for layer in (0, 1):
        for start, stop in ((0, 250), (250, 251), (251, 600)):  # prefill chunks that cross blocks and slabs
            k, v = kv(range(600), layer)
            pool.write(blocks, layer, start, k[:, start:stop], v[:, start:stop])
    pool.commit(blocks, 600)
    for layer in (0, 1):
        k, v = kv(range(600), layer)
        for first, last in ((0, 600), (63, 65), (255, 513), (599, 600), (10, 10)):
            parts = pool.runs(blocks, layer, range(first, last))
            if first == last:
                assert parts == []
                continue
            got = read(parts)
            assert torch.equal(got[0], k[:, first:last])
            assert torch.equal(got[1], v[:, first:last])
        got = gather_kv(pool, blocks, layer)
        assert torch.equal(got[0], k)
        assert torch.equal(got[1], v)
    pool.check_integrity()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not report the memory of a process")
def test_short_prompt_uses_only_its_pages_of_a_slab() -> None:
    """In a slab, K and V of each head and layer take 2 MiB each. Clearing a huge page for each would take 64 MiB."""
    pool = HostPool(geometry(8, 2, 64), torch.bfloat16, 1 << 27)
    before, (k, v) = resident_bytes(), torch.ones(2, 2, BLOCK_SIZE, 64, dtype=torch.bfloat16)
    blocks = pool.new_block_table(BLOCK_SIZE)
    for layer in range(8):
        pool.write(blocks, layer, 0, k, v)
    assert pool.layout.plane_rows * pool.layout.row_bytes == 2 << 20
    assert resident_bytes() - before < 8 << 20, "3 MiB are measured, tables and tensors included"


def test_block_table_in_an_empty_pool_has_one_run_per_slab() -> None:
    pool = make_pool(12)
    at_once = pool.new_block_table(9 * BLOCK_SIZE)
    assert [part.k.shape[1] for part in pool.runs(at_once, 0, range(9 * BLOCK_SIZE))] == [
        4 * BLOCK_SIZE,
        4 * BLOCK_SIZE,
        BLOCK_SIZE,
    ]
    pool.release(at_once)
    growing = pool.new_block_table(1)
    for _ in range(9):
        append(pool, growing, BLOCK_SIZE)
    assert [part.k.shape[1] for part in pool.runs(growing, 0, range(9 * BLOCK_SIZE))] == [
        4 * BLOCK_SIZE,
        4 * BLOCK_SIZE,
        BLOCK_SIZE,
    ]


def test_empty_slab_is_preferred_to_two_free_runs() -> None:
    pool = make_pool(12)
    pool.new_block_table(3 * BLOCK_SIZE)
    second = pool.new_block_table(3 * BLOCK_SIZE)
    assert len(pool.spans(second, 0, range(3 * BLOCK_SIZE))) == 1
    assert pool.new_block_table(BLOCK_SIZE).ids == [3], "a table that fits uses the gap"


def test_views_are_contiguous_matrices_without_copies() -> None:
    pool = make_pool(12)
    blocks = pool.new_block_table(200)
    (part,) = pool.runs(blocks, 1, range(3, 200))
    for rows in (*part.k, *part.v):
        assert rows.is_contiguous()
        assert rows.untyped_storage().data_ptr() == pool.rows.untyped_storage().data_ptr()
    assert part.k.data_ptr() == pool.rows[int(pool.row_base(blocks)[0]) + pool.layout.row(1, 0, 0, 3)].data_ptr()


def test_sequences_that_grow_together_have_long_runs() -> None:
    pool = make_pool(64, slab_blocks=64)
    block_tables = [pool.new_block_table(BLOCK_SIZE) for _ in range(4)]
    for _ in range(15):
        for blocks in block_tables:
            append(pool, blocks, BLOCK_SIZE)
    pool.check_integrity()
    assert pool.free_blocks == 4
    run_counts = [len(pool.spans(blocks, 0, range(blocks.capacity))) for blocks in block_tables]
    assert max(run_counts) <= 5, run_counts  # 15 if each takes the next free block


def test_fork_shares_blocks_and_copies_the_last_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(32)
    first = pool.new_block_table(0)
    append(pool, first, 100)
    pool.reserve(first, 300)  # reserved slots without tokens are not shared
    before = pool.bytes_used
    second = pool.fork(first)
    assert pool.bytes_used == before
    copies: list[tuple[int, int, int]] = []
    copy = pool._arena.copy
    monkeypatch.setattr(pool._arena, "copy", lambda *where: (copies.append(where), copy(*where)))
    append(pool, second, 5, sequence=1)
    append(pool, first, 5)
    append(pool, second, 5, sequence=1)
    assert [where[2] for where in copies] == [36], "only the filled slots of the last block are copied, once"
    assert first.ids[0] == second.ids[0] and first.ids[1] != second.ids[1]
    for blocks, sequence in ((first, 0), (second, 1)):
        for layer in range(2):
            got, _ = read(pool.runs(blocks, layer, range(105)))
            assert torch.equal(got[:, :100], kv(range(100), layer)[0])
            assert torch.equal(got[:, 100:], kv(range(100, 105), layer, sequence)[0])
    pool.check_integrity()
    pool.release(first)
    pool.release(second)
    pool.release(second)
    assert pool.bytes_used == 0 and second == BlockTable()


def test_write_to_a_shared_block_fails_an_assertion() -> None:
    pool = make_pool(4)
    blocks = pool.new_block_table(0)
    append(pool, blocks, 10)
    pool.fork(blocks)
    with pytest.raises(AssertionError, match="shared"):
        pool.write(blocks, 0, 10, *kv(range(10, 11), 0))


def test_error_of_a_full_pool_names_the_missing_memory() -> None:
    pool = make_pool(6, slab_blocks=6)
    blocks = pool.new_block_table(5 * BLOCK_SIZE)
    with pytest.raises(PoolFullError) as error:
        pool.new_block_table(3 * BLOCK_SIZE)
    for text in ("3 blocks of 64 tokens (24 KiB)", "of 6 only 1", "2 too few (16 KiB)", "from 48 KiB", "to 64 KiB"):
        assert text in str(error.value)
    pool.commit(blocks, 5 * BLOCK_SIZE - 1)
    fork = pool.fork(blocks)
    with pytest.raises(PoolFullError):
        pool.reserve(fork, 6 * BLOCK_SIZE)  # the copy of the last block, and one more
    assert fork == blocks
    pool.check_integrity()


def test_invalid_limits_are_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"cannot hold one block.*8192 bytes"):
        HostPool(geometry(), torch.float32, BLOCK_BYTES - 1)
    with pytest.raises(MemoryLimitError, match=r"more than the .* available here; lower host_memory"):
        HostPool(geometry(), torch.float32, 1 << 60)
    assert HostPool(geometry(), torch.float32, BLOCK_BYTES).block_count == 1


def test_failed_reservation_of_address_space_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.kv_cache.system_memory.available_memory", lambda: 1 << 61)
    with pytest.raises(MemoryLimitError, match=r"cannot reserve .* of address space .*ulimit"):
        HostPool(geometry(), torch.float32, 1 << 60)


def test_default_limit_is_half_of_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.kv_cache.system_memory.available_memory", lambda: 100 * BLOCK_BYTES)
    assert HostPool(geometry(), torch.float32, None).block_count == 50
    monkeypatch.setattr("offload_rt.kv_cache.system_memory.available_memory", lambda: 1 << 60)
    pool = HostPool(geometry(1, 1, 1), torch.float16, None)
    assert pool.block_count == (1 << 24) // BLOCK_SIZE


def use_control_groups(monkeypatch: pytest.MonkeyPatch, root: Path, membership: Path) -> None:
    monkeypatch.setattr(control_groups, "ROOT", root)
    monkeypatch.setattr(control_groups, "MEMBERSHIP", membership)


def test_control_groups_limit_the_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def group(folder: Path, names: tuple[str, str], limit: str, used: int, cache: str) -> None:
        folder.mkdir(parents=True)
        (folder / names[0]).write_text(limit + "\n")
        (folder / names[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{cache} 10\n")

    two, one = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    group(tmp_path / "v2/a/b", two, "max", 50, "inactive_file")
    (tmp_path / "v2/a").joinpath("memory.max").write_text("100\n")
    (tmp_path / "v2/a").joinpath("memory.current").write_text("70\n")
    (tmp_path / "v2/a").joinpath("memory.stat").write_text("inactive_file 10\n")
    (tmp_path / "two").write_text("0::/a/b\n")
    use_control_groups(monkeypatch, tmp_path / "v2", tmp_path / "two")
    assert list(system_memory._cgroup_headroom()) == [40]
    group(tmp_path / "v1/memory/job", one, "200", 260, "total_inactive_file")
    (tmp_path / "one").write_text("9:name=systemd:/\n4:cpu,memory:/job\n0::/nowhere\n")
    use_control_groups(monkeypatch, tmp_path / "v1", tmp_path / "one")
    assert list(system_memory._cgroup_headroom()) == [0]
    use_control_groups(monkeypatch, tmp_path, tmp_path / "absent")
    assert list(system_memory._cgroup_headroom()) == []
    monkeypatch.undo()
    assert system_memory.available_memory() > 0


def test_control_groups_limit_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    for name, text in {
        "two": "0::/a/b\n", "v2/a/b/cpu.max": "max 100000\n", "v2/a/cpu.max": "250000 100000\n",
        "one": "4:cpu,cpuacct:/job\n", "v1/cpu/job/cpu.cfs_quota_us": "1000\n",
        "v1/cpu/job/cpu.cfs_period_us": "50000\n", "v1/cpu/cpu.cfs_quota_us": "-1\n",
        "v1/cpu/cpu.cfs_period_us": "50000\n", "free": "4:cpu:/\n",
        "odd/cpu.max": "5 0\n", "odder/cpu.max": "a b\n", "root": "0::/\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for root, membership, limit in (
        ("v2", "two", 3), ("v1", "one", 1), ("v1", "free", None), ("odd", "root", None),
        ("odder", "root", None), ("v2", "absent", None),
    ):  # fmt: skip
        use_control_groups(monkeypatch, tmp_path / root, tmp_path / membership)
        assert processor_limit() == limit, (root, membership)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    use_control_groups(monkeypatch, tmp_path / "v2", tmp_path / "two")
    assert processor_limit() is None


@pytest.mark.parametrize("blocks", [1, 2, 255, 256, 257, 1000, 1025])
@pytest.mark.parametrize(("head_dim", "dtype"), [(8, torch.float16), (80, torch.bfloat16), (64, torch.float32)])
def test_layout_wastes_less_than_a_block_per_slab(blocks: int, head_dim: int, dtype: torch.dtype) -> None:
    shape = geometry(3, 2, head_dim)
    limit = blocks * shape.kv_bytes(BLOCK_SIZE, dtype) + 17
    layout = ArenaLayout.fit(shape, dtype, limit)
    assert layout.block_bytes == shape.kv_bytes(BLOCK_SIZE, dtype)
    assert layout.blocks <= blocks < layout.blocks + layout.slabs
    assert layout.slab_blocks * BLOCK_SIZE <= 16_384
    assert layout.slab_rows * layout.row_bytes % PAGE == 0
    last_slot = (layout.slab_blocks - 1) * BLOCK_SIZE
    last = (layout.slabs - 1) * layout.slab_rows + last_slot + layout.row(2, 1, 1, BLOCK_SIZE - 1)
    assert layout.rows - layout.slab_rows < last < layout.rows
    assert layout.bytes - layout.blocks * layout.block_bytes < layout.slabs * (PAGE * layout.row_bytes)


def test_slabs_are_prepared_at_admission() -> None:
    pool = make_pool(12)
    pool.prepare(9 * BLOCK_SIZE)
    ready = pool._arena.active
    assert ready == 3 and pool.bytes_used == 0
    blocks = pool.new_block_table(10)
    for _ in range(8):
        append(pool, blocks, BLOCK_SIZE)
    assert pool._arena.active == ready
    pool.prepare(1 << 30)
    assert pool._arena.active == ready


@pytest.mark.gpu
@pytest.mark.simulated
def test_slabs_are_pinned_on_demand() -> None:
    pool = HostPool(geometry(), torch.float32, 12 * BLOCK_BYTES, pin=True, slab_tokens=4 * BLOCK_SIZE)
    blocks = pool.new_block_table(5 * BLOCK_SIZE)
    for part in pool.runs(blocks, 0, range(5 * BLOCK_SIZE)):
        assert part.k.is_pinned()
    k, v = kv(range(5 * BLOCK_SIZE), 0)
    pool.write(blocks, 0, 0, k.cuda(), v.cuda())
    assert torch.equal(read(pool.runs(blocks, 0, range(5 * BLOCK_SIZE)))[0], k)


@pytest.mark.gpu
@pytest.mark.simulated
def test_slabs_are_activated_on_demand() -> None:
    """Only two slabs are checked, because an H100's driver reports a mapping as pinned if any part of it is pinned."""
    shape = geometry(head_dim=512)
    pool = HostPool(
        shape, torch.float32, 3 * shape.kv_bytes(4 * BLOCK_SIZE, torch.float32), pin=True, slab_tokens=4 * BLOCK_SIZE
    )
    pool.new_block_table(5 * BLOCK_SIZE)
    slabs = [pool.rows[slab * pool.layout.slab_rows] for slab in range(3)]
    assert pool._arena.active == 2 and [slab.is_pinned() for slab in slabs][:2] == [True, True]


@pytest.mark.gpu
@pytest.mark.simulated
def test_memory_that_cannot_be_pinned_raises_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next kernel must not raise the driver's error again."""
    pool = HostPool(geometry(), torch.float32, 12 * BLOCK_BYTES, pin=True, slab_tokens=4 * BLOCK_SIZE)
    again = HostPool(geometry(), torch.float32, 12 * BLOCK_BYTES, pin=True, slab_tokens=4 * BLOCK_SIZE)
    pool.prepare(1)
    monkeypatch.setattr(again._arena, "rows", pool._arena.rows)  # this memory is already pinned
    with pytest.raises(MemoryLimitError, match="cannot pin"):
        again.prepare(1)
    assert torch.ones(3, device="cuda").sum().item() == 3
