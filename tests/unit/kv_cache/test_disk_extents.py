"""Test a KV pool on disk that shares block files with the session store, so that each block is stored once.

Reads return the written KV, and sessions give the same tokens as in memory, even after overwrites, eviction and disk
errors. Files in the store never change.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.disk_arena import LAYOUT, WIDTH, arena
from support.sampling import examples
from support.tiny_models import tiny_model, tiny_prompt

from offload_rt import LLM, SamplingParams
from offload_rt.core import BLOCK_SIZE
from offload_rt.errors import DiskError
from offload_rt.kv_cache.disk import extents, requests, row_cache, row_copy
from offload_rt.kv_cache.disk.direct_file import BlockFile, DirectFile, aligned
from offload_rt.kv_cache.disk.extents import StoredExtent
from offload_rt.kv_cache.disk.file_arena import FileArena
from offload_rt.model_runner import prefill as prefill_module
from offload_rt.sessions.session import Session
from offload_rt.storage.disk_store import DiskStore
from offload_rt.storage.saver import Saver

# -------------------------------------------------------------------------------------------------------------- rows

OFFSET = 8192


class BlockFiles:
    """Test double that creates block files and records in `invalid` every write of an incomplete or repeated layer."""

    def __init__(self, folder: Path, file_arena: FileArena) -> None:
        self._folder, self._layer = folder, file_arena.file_layout.layer_bytes
        self.invalid: list[int] = []

    def new(self) -> StoredExtent:
        file = BlockFile(os.open(self._folder, os.O_TMPFILE | os.O_RDWR, 0o600))
        file.allocate(0, OFFSET + LAYOUT.layers * self._layer)
        seen: set[int] = set()

        def once(layer: int, block: memoryview) -> None:
            if layer in seen or layer >= LAYOUT.layers or len(block) != self._layer:
                self.invalid.append(layer)
            seen.add(layer)

        return StoredExtent(file, OFFSET, self._layer, once)

    def stored(self, rows: torch.Tensor) -> StoredExtent:
        """Return a block file that contains the KV `rows` `[layers, Hkv, 64, width]`."""
        extent = self.new()
        data = aligned(LAYOUT.layers * self._layer)
        blocks = data.view(LAYOUT.layers, -1)
        flat = rows.reshape(LAYOUT.layers, -1).view(torch.uint8)
        blocks[:, : flat.shape[1]] = flat
        extent.file.write(OFFSET, data)
        return extent


class ArenaModel:
    """Expected contents of an arena, and a mask of the KV entries that were written since their block was allocated."""

    def __init__(self, file_arena: FileArena, blocks: BlockFiles) -> None:
        self.file_arena, self.blocks = file_arena, blocks
        self.rows = torch.zeros(LAYOUT.layers, LAYOUT.blocks, LAYOUT.kv_heads, BLOCK_SIZE, WIDTH)
        self.known = torch.zeros(self.rows.shape[:-1], dtype=torch.bool)

    def fill(self, number: int, slab: int, place: int, first: int, count: int) -> None:
        count = min(count, 192 - first)
        rows = torch.full((LAYOUT.kv_heads, count, WIDTH), float(number + 1)) + torch.arange(count)[:, None] / 256
        self.file_arena.fill(slab, place, first, rows[..., : LAYOUT.head_dim], rows[..., LAYOUT.head_dim :])
        for i in range(count):
            block, slot = slab * 3 + (first + i) // BLOCK_SIZE, (first + i) % BLOCK_SIZE
            self.rows[place, block, :, slot], self.known[place, block, :, slot] = rows[:, i], True

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.file_arena.copy(source, target, tokens)
        for each in (self.rows, self.known):
            each[:, target, :, :tokens] = each[:, source, :, :tokens]

    def extent(self, kind: int, block: int, number: int) -> None:
        """Assign a file to a block, if the block allows it.

        Kind 0 is an empty file, kind 1 an empty file for a block with buffered KV, and kind 2 a file with stored KV.
        """
        if kind == 1 and self.file_arena.is_buffered(block):
            self.file_arena.move_to(block, self.blocks.new(), LAYOUT.layers)
        elif kind == 0 and self.file_arena.is_empty(block):
            self.file_arena.attach(block, self.blocks.new())
        elif kind == 2 and self.file_arena.is_empty(block):
            self.rows[:, block] = torch.arange(self.rows[:, block].numel()).view_as(self.rows[:, block]) / 64 - number
            self.known[:, block] = True
            self.file_arena.attach(block, self.blocks.stored(self.rows[:, block]), range(LAYOUT.layers))

    def discard(self, block: int) -> None:
        self.file_arena.discard([block])
        self.known[:, block] = False

    def gather(self, place: int, seed: int, count: int) -> None:
        chosen = np.random.default_rng(seed).permutation(LAYOUT.blocks * 2 * BLOCK_SIZE)[:count]
        blocks, rest = np.divmod(chosen, 2 * BLOCK_SIZE)
        heads, slots = np.divmod(rest, BLOCK_SIZE)
        known = self.known[place, blocks, heads, slots].numpy()
        blocks, heads, slots = blocks[known], heads[known], slots[known]
        out = torch.full((len(blocks), WIDTH), -1.0)
        self.file_arena.gather(
            place, self.file_arena.file_layout.entry_ids(place, blocks, slots, heads), out, np.arange(len(blocks))
        )
        assert torch.equal(out, self.rows[place, blocks, heads, slots])

    def view(self, slab: int, place: int, first: int, count: int) -> None:
        count = min(count, 192 - first)
        part = self.file_arena.view(slab, place, first, count)
        whole = (each[place, slab * 3 : slab * 3 + 3].transpose(0, 1).flatten(1, 2) for each in (self.rows, self.known))
        rows, known = (each[:, first : first + count] for each in whole)
        assert torch.equal(torch.cat((part.k, part.v), dim=2)[known], rows[known])


SLABS, LAYERS, BLOCKS = st.integers(0, 1), st.integers(0, 1), st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.just("fill"), SLABS, LAYERS, st.integers(0, 191), st.integers(1, 192)),
    st.tuples(st.just("fill"), SLABS, LAYERS, st.sampled_from([0, 64]), st.sampled_from([64, 128, 192])),
    st.tuples(st.just("copy"), BLOCKS, BLOCKS, st.integers(0, 64)),
    st.tuples(st.just("extent"), st.integers(0, 2), BLOCKS),
    st.tuples(st.just("extent"), st.integers(0, 2), BLOCKS),
    st.tuples(st.just("discard"), BLOCKS),
    st.tuples(st.just("gather"), LAYERS, st.integers(0, 2**31), st.integers(1, 40)),
    st.tuples(st.just("view"), SLABS, LAYERS, st.integers(0, 191), st.integers(1, 192)),
)


@given(st.lists(STEPS, min_size=10, max_size=30))
@example([("extent", 2, 1), ("gather", 0, 5, 40)])
@example([("fill", 0, 0, 0, 192), ("gather", 0, 5, 40), ("fill", 0, 0, 64, 64), ("gather", 0, 5, 40)])
@example([("fill", 0, 0, 0, 192), ("gather", 0, 5, 40), ("fill", 0, 0, 65, 62), ("gather", 0, 5, 40)])
@example([("fill", 0, 0, 64, 64), ("gather", 0, 5, 600), ("discard", 1), ("extent", 2, 1)])
@example([("extent", 2, 1), ("fill", 0, 0, 70, 3), ("view", 0, 0, 64, 64)])
@example([("extent", 0, 1), ("fill", 0, 0, 0, 192), ("fill", 0, 0, 64, 64), ("extent", 1, 1)])
@settings(max_examples=examples(25), deadline=None)
def test_reads_return_the_written_kv_from_every_location(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    compare_with_model(tmp_path_factory.mktemp("rows", numbered=True), steps)


@given(st.lists(STEPS, max_size=12))
@settings(max_examples=examples(10), deadline=None)
def test_reads_return_the_written_kv_without_a_compiler(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (row_cache, row_copy, requests):
            patch.setattr(module, "_library", lambda: None)
        patch.setattr(requests, "_merge_library", lambda: None)
        compare_with_model(tmp_path_factory.mktemp("rows", numbered=True), steps)


def compare_with_model(folder: Path, steps: list[Any]) -> None:
    file_arena = arena(folder)
    model = ArenaModel(file_arena, BlockFiles(folder, file_arena))
    for number, (kind, *where) in enumerate(steps):
        if kind == "fill":
            model.fill(number, *where)
        elif kind == "extent":
            model.extent(*where, number)
        elif kind != "copy" or where[0] != where[1]:
            getattr(model, kind)(*where)
    file_arena.check_integrity()
    assert file_arena.budget.slots < 25 and file_arena.budget.block_buffers == 1, "otherwise all KV stays in memory"
    assert not model.blocks.invalid
    for place in range(LAYOUT.layers):
        model.gather(place, 0, LAYOUT.blocks * 2 * BLOCK_SIZE)
    file_arena.discard(range(LAYOUT.blocks))
    assert not file_arena.host_bytes, "buffers and cached KV entries of freed blocks are freed"
    assert not len(file_arena._extents) and file_arena.file.files.handles.max() == file_arena.file.handle, (
        "unused files are closed"
    )


# ---------------------------------------------------------------------------------------------------------- sessions

MODEL = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
TURNS = [tiny_prompt(300, seed=1), tiny_prompt(120, seed=2), tiny_prompt(70, seed=3)]


def make_llm(folder: Path | None, **named: Any) -> LLM:
    """Create a runtime. If `folder` is given, host memory has room for only a quarter of the context's KV."""
    limits = {} if folder is None else {"disk": folder, "host_memory": "128KiB", "disk_limit": "1MiB"}
    return LLM(MODEL, **{"dtype": "float32", "policy": "full", **limits, **named})


def answer(session: Session, turn: list[int]) -> list[int]:
    """Return the generated tokens. Check the integrity of the session and the runner."""
    tokens = [event.token_id for event in session.send(turn, GREEDY)]
    session.context.saver.flush()
    session.check_integrity()
    session.kv.runner.check_integrity()
    return tokens


def count_stored_blocks(llm: LLM) -> int:
    assert llm.runner.pool.file is not None
    return len(llm.runner.pool.file._extents)


def run_session(folder: Path | None, store: Path, **options: Any) -> list[list[int]]:
    """Return the tokens of a session that is continued, forked, truncated and reopened by a new engine."""
    tokens = []
    with make_llm(folder) as llm:
        session = llm.session("s", store, **options)
        tokens += [answer(session, TURNS[0]), answer(session, TURNS[1])]
        fork = session.fork("t")
        tokens += [answer(fork, TURNS[2]), answer(session, TURNS[2])]
        if not options:  # a limited store loses KV, and a truncated session cannot compute it again
            session.truncate(keep_last=150)
        tokens += [answer(session, TURNS[1]), answer(fork, TURNS[1])]
    with make_llm(folder) as llm:
        tokens += [answer(llm.session(name, store, **options), TURNS[2]) for name in ("s", "t")]
    return tokens


def changed_block_files(store: Path, before: dict[Path, bytes]) -> list[Path]:
    """Return the block files that changed since the last call. Record new files in `before`."""
    now = {path: path.read_bytes() for path in store.rglob("*.kv")}
    changed = [path for path, data in before.items() if path in now and now[path] != data]
    before.update(now)
    return changed


@pytest.fixture(scope="module")
def expected_tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[list[int]]]:
    """Return the tokens of runs in host memory. The key tells whether the store has a size limit."""
    folders = tmp_path_factory.mktemp("room"), tmp_path_factory.mktemp("limit")
    return {False: run_session(None, folders[0]), True: run_session(None, folders[1], limit=1 << 30)}


BLOCK_BYTES = MODEL.config.num_hidden_layers * 2 * BLOCK_SIZE * MODEL.config.hidden_size // 2 * 8
"""Size of a block's K and V in all layers. The model has half as many KV heads as query heads."""


def test_session_tokens_equal_a_run_in_memory(expected_tokens: dict[bool, list[list[int]]], tmp_path: Path) -> None:
    assert run_session(tmp_path / "rows", tmp_path / "store") == expected_tokens[False]


def test_kv_is_written_once_and_restored_without_writes(tmp_path: Path) -> None:
    before: dict[Path, bytes] = {}
    with make_llm(tmp_path / "rows") as llm:
        session, file = llm.session("s", tmp_path / "store"), llm.runner.pool.file
        answer(session, TURNS[0])
        assert file is not None and count_stored_blocks(llm) == len(TURNS[0]) // BLOCK_SIZE == 4
        steps_read = (GREEDY.max_tokens - 1) * 4 * BLOCK_BYTES
        assert file.use.bytes_written == 4 * BLOCK_BYTES
        assert not file._written.any(), "the pool's own file is empty"
        assert file.use.bytes_read == steps_read, "only decode steps read"
        changed_block_files(tmp_path / "store", before)
    with make_llm(tmp_path / "rows") as llm:
        session, file = llm.session("s", tmp_path / "store"), llm.runner.pool.file
        answer(session, TURNS[1][:10])
        assert file is not None and count_stored_blocks(llm) >= session.loaded_tokens // BLOCK_SIZE == 4
        assert file.use.bytes_written <= 3 * BLOCK_BYTES, "the block after the restored KV, and the next"
        session.truncate(keep_last=100)
        answer(session, TURNS[2])
        assert not changed_block_files(tmp_path / "store", before) and len(before) > 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["evicted", "no room", "few files", "parts", "no file"])
def test_blocks_without_a_stored_extent_give_the_same_tokens(
    case: str, expected_tokens: dict[bool, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"evicted": 5 * (BLOCK_BYTES + 4096) + 50_000, "no room": BLOCK_BYTES}
    if case == "few files":
        monkeypatch.setattr(extents, "most_files", lambda: extents.SPARE_FILES + 2)
    if case == "parts":
        monkeypatch.setitem(prefill_module.SEGMENT_BYTES, "cpu", 1)
    if case == "no file":
        monkeypatch.setattr(BlockFile, "allocate", failing_allocate(BlockFile.allocate))
    limit = {"limit": limits[case]} if case in limits else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a session is not saved completely
        assert run_session(tmp_path / "rows", tmp_path / "store", **limit) == expected_tokens[bool(limit)]


def failing_allocate(real: Any) -> Any:
    """Return a version of `allocate` that fails for every file except the pool's own."""

    def allocate(file: BlockFile, offset: int, size: int) -> None:
        if not isinstance(file, DirectFile):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, offset, size)

    return allocate


@pytest.mark.parametrize("successful_writes", [0, 5])
def test_failed_write_to_a_stored_extent_fails_only_one_turn(
    successful_writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(tmp_path / "rows") as llm, make_llm(None) as memory:
        session, count = llm.session("s", tmp_path / "store"), 0
        answer(session, TURNS[0])
        with monkeypatch.context() as patch:
            real = BlockFile.write

            def write(file: BlockFile, offset: int, data: torch.Tensor) -> None:
                nonlocal count
                count += 1
                if count > successful_writes:
                    raise OSError(errno.EIO, "Input/output error")
                real(file, offset, data)

            patch.setattr(BlockFile, "write", write)
            with pytest.raises(DiskError, match="cannot write KV"):
                answer(session, TURNS[0])
        [expected] = memory.generate([[*session.tokens, *TURNS[2]]], GREEDY)
        assert answer(session, TURNS[2]) == list(expected.outputs[0].token_ids)
        session.close()
    store = DiskStore(tmp_path / "store", session.context.storage.namespace, 2)
    store.check_integrity()
    assert all(store.verify(name) for name in session.kv.blocks.names(len(session.tokens) // BLOCK_SIZE * BLOCK_SIZE))


def test_damaged_stored_extent_is_recomputed(tmp_path: Path) -> None:
    with make_llm(tmp_path / "rows") as llm, make_llm(None) as memory:
        session = llm.session("s", tmp_path / "store")
        answer(session, TURNS[0])
        [expected] = memory.generate([[*session.tokens, *TURNS[2]]], GREEDY)
        session.close()
    broken = max((tmp_path / "store").rglob("*.kv"), key=lambda path: path.stat().st_size)  # a full block
    data = bytearray(broken.read_bytes())
    data[-5000] ^= 1
    broken.write_bytes(data)
    with make_llm(tmp_path / "rows") as llm:
        assert answer(llm.session("s", tmp_path / "store"), TURNS[2]) == list(expected.outputs[0].token_ids)
        assert broken.read_bytes() != data, "the block was stored again"


def test_block_that_is_being_loaded_gets_no_stored_extent(tmp_path: Path) -> None:
    """A block that is being loaded looks empty, but must not be assigned another file."""
    with make_llm(tmp_path / "rows") as llm:
        session, pool = llm.session("s", tmp_path / "store"), llm.runner.pool
        answer(session, TURNS[0])
        other = DiskStore(tmp_path / "other", "t", 2)
        saver, blocks = Saver(other, pool, llm.runner.transfer.storage), pool.new_block_table(256)
        pool.commit(blocks, 140)
        saving = saver.begin(blocks, session.kv.blocks.names(256))
        assert saving is not None and count_stored_blocks(llm) == 4 + 1
        assert [pending.extent is not None for pending in saving.pending] == [False, False, False, True]
        saver.abort(saving)
        assert count_stored_blocks(llm) == 4 and other.bytes_used == 0
        saver.close()
        pool.release(blocks)
        other.close()


def test_aborted_turn_leaves_no_stored_extent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_llm(tmp_path / "rows") as llm, make_llm(None) as memory:
        session = llm.session("s", tmp_path / "store")
        with monkeypatch.context() as patch:
            real = Saver.layer_done

            def stop(saver: Saver, saving: Any, layer: int) -> None:
                real(saver, saving, layer)
                raise KeyboardInterrupt

            patch.setattr(Saver, "layer_done", stop)
            with pytest.raises(KeyboardInterrupt):
                answer(session, TURNS[0])
        file = llm.runner.pool.file
        assert file is not None and count_stored_blocks(llm) == 0 and not list((tmp_path / "store").rglob("*.tmp"))
        [expected] = memory.generate([TURNS[2] + TURNS[1]], GREEDY)
        assert answer(session, TURNS[2] + TURNS[1]) == list(expected.outputs[0].token_ids)
        assert count_stored_blocks(llm) == 3


EXIT = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from offload_rt.storage.saver import Saver

def write():
    time.sleep(0.3)
    torch.ones(3).sum()
    Path(sys.argv[1]).touch()

pool = SimpleNamespace(file=None, groups=SimpleNamespace(group=[0]))
Saver(None, pool, None).notify(write)
"""


def test_pending_writes_end_before_the_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", EXIT, str(tmp_path / "written")], check=True, timeout=60)
    assert (tmp_path / "written").exists()
