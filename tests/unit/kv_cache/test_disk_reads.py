"""Test reads of a KV pool on disk: they return the written KV, whichever part of it is cached in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.disk_arena import LAYOUT, WIDTH, arena
from support.sampling import examples
from support.tiny_models import tiny_model

from offload_rt import LLM
from offload_rt.core import BLOCK_SIZE, KVPart
from offload_rt.kv_cache.disk import direct_file, row_cache, row_copy
from offload_rt.kv_cache.disk import requests as disk_requests
from offload_rt.kv_cache.disk.direct_file import DirectFile, aligned
from offload_rt.kv_cache.disk.file_layout import DiskTier
from offload_rt.kv_cache.disk.requests import DISK_PAGE, Reads, Requests, RingReader, ThreadReader, merge_reads
from offload_rt.kv_cache.disk.requests import _merge_with_numpy as merge_plain
from offload_rt.kv_cache.disk.row_cache import RowCache
from offload_rt.kv_cache.pool import HostPool
from offload_rt.transfer.disk import DiskState
from offload_rt.transfer.read_ahead import RangeReader, ReadingThread

MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)


# ---------------------------------------------------------------------------------------------------------- requests


@given(
    places=st.lists(st.integers(0, 4000), unique=True, max_size=60),
    size=st.sampled_from([68, 256, 1024]),
    gap=st.sampled_from([0, 4096, 40_960]),
    most=st.sampled_from([2 * DISK_PAGE, 10 * DISK_PAGE, 1 << 30]),
)
@settings(max_examples=examples(60), deadline=None)
def test_merged_requests_cover_every_piece_and_span_only_short_gaps(
    places: list[int], size: int, gap: int, most: int
) -> None:
    offsets = np.array(places, np.int64) * size
    reads = merge_reads(offsets, size, gap, most)
    requests, (own, first) = reads.requests, (np.repeat(np.arange(len(reads.requests.size)), np.diff(reads.first)), 0)
    assert sorted(reads.pieces.tolist()) == list(range(len(places)))
    assert not (requests.offset % DISK_PAGE).any() and not (requests.size % DISK_PAGE).any()
    ends, ordered = requests.offset + requests.size, offsets[reads.pieces]
    assert (requests.offset[own] <= ordered).all() and (ordered + size <= ends[own]).all()
    assert np.array_equal(reads.starts - requests.at[own], ordered - requests.offset[own])
    assert np.array_equal(requests.at, np.cumsum(requests.size) - requests.size) and (requests.size <= most).all()
    apart, joined = requests.offset[1:] - ends[:-1], ends[1:] - requests.offset[:-1]
    assert ((apart > gap) | (joined > most)).all()
    blocks = {
        block for offset in offsets.tolist() for block in range(offset // DISK_PAGE, -(-(offset + size) // DISK_PAGE))
    }
    if most == 1 << 30:
        assert requests.size.sum() <= len(blocks) * DISK_PAGE + gap * max(0, len(places) - 1)
    for plain, compiled in zip(_flat(merge_plain(offsets, size, gap, most)), _flat(reads), strict=True):
        assert np.array_equal(plain, compiled)
    for part in reads.batches(most):
        assert int(part.requests.size.sum()) <= most and int(part.requests.at[0]) == 0 == part.first[0]
        assert np.array_equal(part.pieces, reads.pieces[first : first + len(part.pieces)])
        first += len(part.pieces)
    assert first == len(places)


def _flat(reads: Reads) -> list[np.ndarray[Any, Any]]:
    return [*reads.requests, *reads[1:]]


READERS: dict[str, Callable[[], RingReader | ThreadReader | None]] = {"ring": RingReader.open, "threads": ThreadReader}


@pytest.mark.parametrize("kind", READERS)
def test_concurrent_reads_return_the_written_bytes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_requests, "THREADS", 3)
    if (reader := READERS[kind]()) is None:
        pytest.skip("io_uring is not available")
    monkeypatch.setattr(direct_file, "reader", lambda: reader)
    file = DirectFile(tmp_path)
    file.allocate(0, 64 * DISK_PAGE)
    data = aligned(64 * DISK_PAGE)
    data.copy_(torch.arange(64).repeat_interleave(DISK_PAGE))
    file.write(0, data)
    blocks = np.random.default_rng(0).permutation(64)
    buffer = aligned(64 * DISK_PAGE)
    at = np.arange(64, dtype=np.int64) * DISK_PAGE
    file.read(Requests(blocks * DISK_PAGE, np.full(64, DISK_PAGE, np.int64), at), buffer)
    assert torch.equal(
        buffer.view(64, DISK_PAGE), torch.from_numpy(blocks).to(torch.uint8)[:, None].expand(-1, DISK_PAGE)
    )
    rows, row = aligned(64 * 96).view(64, 96), np.arange(64)
    copies = row_copy.RowCopies(np.arange(65), at + row, row[::-1].copy(), rows)
    file.read(Requests(blocks * DISK_PAGE, np.full(64, DISK_PAGE, np.int64), at), buffer, copies)
    assert torch.equal(rows.flip(0), torch.from_numpy(blocks).to(torch.uint8)[:, None].expand(-1, 96))
    beyond = Requests(np.array([63, 70]) * DISK_PAGE, np.full(2, DISK_PAGE, np.int64), at[:2])
    with pytest.raises(OSError, match="ends early"):
        file.read(beyond, buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_copy_rows_between_arbitrary_positions_with_and_without_c(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.arange(50 * 34 + 1).to(dtype)
    rows = source[:-1].view(50, 34)
    chosen, into = np.array([49, 3, 0, 7]), np.array([2, 0, 5, 4])
    expected = torch.zeros(6, 34, dtype=dtype)
    expected[into] = rows[chosen]
    for _ in range(2):
        row_copy.copy_rows(source, chosen * 34 * source.itemsize, out := torch.zeros(6, 34, dtype=dtype), into)
        assert torch.equal(out, expected)
        monkeypatch.setattr(row_copy, "_library", lambda: None)  # the second iteration uses torch


def test_file_has_no_name_and_is_deleted_with_its_process(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    file.allocate(0, 1 << 20)
    assert list(tmp_path.iterdir()) == []
    (other := tmp_path / "other").write_bytes(b"")
    try:
        os.close(os.open(other, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system has no direct access")
    assert file.direct
    handle = file.handle
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(handle)


def test_direct_file_without_unnamed_files_or_direct_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no")
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(direct_file, "_enable_direct_io", lambda handle: False)
    (tmp_path / f"{direct_file.NAMED}left.rows").write_bytes(b"of a process that was killed before it could unlink")
    file = DirectFile(tmp_path)
    assert list(tmp_path.iterdir()) == [] and not file.direct
    data = aligned(DISK_PAGE)
    data.fill_(7)
    file.write(DISK_PAGE, data)
    read = aligned(DISK_PAGE)
    one = np.array([DISK_PAGE], np.int64)
    file.read(Requests(one, one, one * 0), read)
    assert torch.equal(read, data)


# -------------------------------------------------------------------------------------------------------------- rows


@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 60), st.booleans()), max_size=30))
@settings(max_examples=examples(40), deadline=None)
def test_cache_replacement_is_equal_with_and_without_a_compiler(steps: list[tuple[int, int, bool]]) -> None:
    plain, compiled = RowCache(50, 5, torch.float32), RowCache(50, 5, torch.float32)
    assert plain.slots == 48
    rows = torch.randn(60, 5)
    for seed, count, forget in steps:
        ids, outputs = np.random.default_rng(seed).permutation(60)[:count], torch.zeros(2, 60, 5)
        into, found = np.arange(count)[::-1].copy(), []
        for cache, out in zip((plain, compiled), outputs, strict=True):
            with pytest.MonkeyPatch.context() as patch:
                if cache is plain:
                    patch.setattr(row_cache, "_library", lambda: None)
                    patch.setattr(row_copy, "_library", lambda: None)
                if forget:
                    cache.remove(range(count, count + 7))
                cache.advance(60.0)
                found.append(cache.lookup(ids, out, into))
                cache.insert(found[-1][0], rows, found[-1][0])
                cache.check_integrity()
        hits = np.flatnonzero(~np.isin(ids, found[0][0]))
        assert np.array_equal(*found) and torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0, into[hits]], rows[ids[hits]])
        assert torch.equal(plain.rows[plain.occupied], rows[plain.owners(plain.occupied)])
        for name in ("_owner", "_score", "_last", "used"):
            assert np.array_equal(getattr(plain, name), getattr(compiled, name)), name


@pytest.mark.parametrize("groups", [[3], list(range(0, 20, 2))])
def test_rows_of_groups_are_removed(groups: list[int]) -> None:
    """The ids of one group are looked up. For many groups, all owners are read."""
    cache, ids = RowCache(512, 1, torch.float32), np.arange(160)
    cache.insert(ids, torch.zeros(160, 1), ids)
    cache.remove_groups(groups, 8)
    cache.check_integrity()
    assert sorted(cache.owners(cache.occupied)) == [each for each in range(160) if each // 8 not in groups]


def test_lowest_score_is_evicted_unless_used_in_this_step() -> None:
    cache, rows, out = RowCache(4, 5, torch.float32), torch.randn(60, 5), torch.empty(60, 5)
    for steps, used in ((300, [0, 1]), (0.1, [0, 1]), (0.1, [0, 1]), (0.1, [2, 3]), (0.1, [2, 4, 5]), (300, [6])):
        cache.advance(steps)
        missing, _ = cache.lookup(ids := np.array(used), out, ids)
        cache.insert(missing, rows, missing)
        cache.check_integrity()
        held = set(cache.owners(cache.occupied).tolist())
        assert held >= set(used)
        assert used[0] != 6 or held & {0, 1}, "two uses of three long ago are more than one or two"


def test_entries_in_use_are_read_from_memory(tmp_path: Path) -> None:
    file_arena = arena(tmp_path)
    file_arena.fill(0, 0, 0, *torch.randn(2, LAYOUT.kv_heads, 192, LAYOUT.head_dim))
    rows = file_arena.file_layout.entry_ids(0, np.arange(3), np.array([5, 6, 7]), np.array([0, 1, 0]))
    for _ in range(3):
        file_arena.gather(0, rows, torch.empty(3, WIDTH), np.arange(3))
    assert (file_arena.use.wanted, file_arena.use.cached) == (9, 6)


def test_range_reader_reads_one_block_ahead_and_frees_earlier_ones() -> None:
    read: list[range] = []

    def block(tokens: range) -> KVPart:
        read.append(tokens)
        return KVPart(torch.full((1, len(tokens), 1), float(tokens.start)), torch.zeros(1, len(tokens), 1))

    thread, blocks = ReadingThread(), [range(start, start + 10) for start in range(0, 50, 10)]
    run = RangeReader(thread, block, blocks)
    thread.wait()
    assert read == blocks[:2], "two blocks are read before the first use"
    for number, part in enumerate(run.parts):
        assert float(part.k[0, 0, 0]) == 10 * number and part.v.shape == (1, 10, 1)
        thread.wait()
        assert read == blocks[: number + 2] and len(run._reading) <= 1
    assert float(run.parts[1].k[0, 0, 0]) == 10, "the block is read again"


def test_each_block_of_a_range_reader_is_contiguous(tmp_path: Path) -> None:
    """Concatenating the parts of several slabs would allocate hundreds of MB."""
    geometry = LLM(MODEL, dtype="float32").geometry
    pool = HostPool(geometry, torch.float32, 16 << 20, slab_tokens=2 * BLOCK_SIZE, disk=DiskTier(tmp_path, 2 << 20))
    blocks = pool.new_block_table(1000)
    state = DiskState(pool, geometry, torch.device("cpu"))
    run = state.read_range(blocks, 0, range(4, 990))
    assert [token for block in run._blocks for token in block] == list(range(4, 990))
    assert all(len(pool.spans(blocks, 0, block)) == 1 for block in run._blocks)
    assert len(pool.spans(blocks, 0, range(990))) > 4
    state.wait()
