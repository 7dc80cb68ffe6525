"""Swap preempted sequences to disk if this is estimated to be faster than recomputing them (PagedAttention §4.5).

A preempted sequence is stored like a session, with the same block names, saver and loader.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..core import BLOCK_SIZE, BlockTable
from ..kv_cache.prefix_tree import EXACT
from ..model_runner.sequence import Sequence
from ..storage.loader import BlockLoader, DamagedBlockError, PlacedBlock
from ..storage.naming import NamedBlock, SessionProvenance, name_blocks, window_blocks
from ..storage.options import StoreOptions
from ..storage.saver import Saver, layer_bytes
from ..storage.swap_file import SwapFile
from ..transfer.streams import on_device
from .runner import Runner

BYTES_PER_SECOND = 500e6  # assumed read speed of the disk until it has been measured
FOLDER = "preempted"  # subfolder of the user's folder, so that no other files of the user are touched


@dataclass(frozen=True)
class SwappedSequence:
    """All data, except the tokens, that is needed to restore a sequence whose KV is on disk. See `Sequence`.

    Attributes:
        floor: First token that sliding layers can see.
        snapshot: Slot of a snapshot of the recurrent state in host memory. None if the model has no recurrent state.
    """

    names: Seq[NamedBlock]
    position: int
    exact: int
    shift: int
    provenance: str
    floor: int
    snapshot: int | None = None

    @property
    def keys(self) -> list[bytes]:
        return [name.key for name in self.names]


class Swap:
    """Writes the KV of preempted sequences to an unnamed file, and restores it bit for bit.

    If writing or reading fails, the sequence is computed again. Blocks are identified by their tokens, so the KV of a
    common prompt is stored only once. KV reveals users' text, so the operating system deletes the file when the process
    ends. Raises StoreError if the folder cannot be used.
    """

    def __init__(self, runner: Runner, folder: Path, options: StoreOptions | None = None) -> None:
        self._runner = runner
        model, own_folder = runner.model, folder / FOLDER
        namespace = f"{model.fingerprint} {runner.adapter.dtype} {runner.pool.format.name} {FOLDER}"
        layers, pool = runner.pool.groups.layers, runner.pool
        slot = layers * layer_bytes(pool, BLOCK_SIZE)
        self._disk = SwapFile(own_folder, namespace, layers, slot, None if options is None else options.limit)
        self._saver = Saver(self._disk, runner.pool, runner.transfer.storage)
        self._users: Counter[bytes] = Counter()
        self._ids = itertools.count()
        self._write_seconds_per_byte = self._read_seconds_per_byte = 1 / BYTES_PER_SECOND
        self._prefill_seconds_per_token = 0.0
        self.close = weakref.finalize(self, _close, self._saver, self._disk)

    @property
    def bytes_used(self) -> int:
        return self._disk.bytes_used

    def swap_out(self, sequence: Sequence, batch: int) -> SwappedSequence | None:
        """Write the KV of a sequence to disk. `batch` is the number of sequences that are decoded together.

        Return None if writing fails, if the sequence cannot be restored exactly, or if computing it again is estimated
        to be faster.
        """
        if not self._restorable(sequence):
            return None
        runner, swapped = self._runner, self._describe(sequence)
        fresh = [name for name in swapped.names if name.key not in self._disk]
        token_bytes = self._runner.pool.block_bytes // BLOCK_SIZE
        written = sum(name.count for name in fresh) * token_bytes
        read = sequence.position * token_bytes
        seconds = written * self._write_seconds_per_byte + read * self._read_seconds_per_byte
        if seconds >= self._recompute_seconds(sequence, batch):
            return None
        if runner.states is not None:
            assert runner.snapshots is not None
            if (snapshot := runner.snapshots.copy(sequence)) is None:
                return None
            swapped = replace(swapped, snapshot=snapshot)
        began, complete = time.perf_counter(), False
        self._users.update(swapped.keys)
        try:
            while fresh:
                taken = self._saver.save(sequence.blocks, fresh)
                self._saver.flush()
                fresh = fresh[taken:]
            complete = all(key in self._disk for key in swapped.keys)
        finally:
            if not complete:  # after an error, the caller gets no description of the blocks
                self.discard(swapped)
        if not complete:
            return None
        if written:
            self._write_seconds_per_byte = (time.perf_counter() - began) / written
        return swapped

    def swap_in(self, swapped: SwappedSequence, tokens: Seq[int], spare: int = 0) -> Sequence | None:
        """Read a sequence's KV from disk, except for blocks that are cached. Return None if the file is damaged.

        The returned sequence has a slot for one more token. If fewer than `spare` blocks would remain free, raises
        PoolFullError before reading anything.
        """
        runner, pool = self._runner, self._runner.pool
        blocks = self._cached_exact_blocks(swapped, tokens)
        with runner.cache_manager.released_on_error(blocks):
            found = self._find(swapped, blocks)
            pool.check_can_grow(blocks, swapped.position + 1, spare)
        if found is None:
            pool.release(blocks)
            return None
        known = blocks.length
        sequence = runner.adopt(
            tokens, blocks, capacity=swapped.position + 1, known=swapped.position, exact=swapped.exact,
            shift=swapped.shift, provenance=swapped.provenance, snapshot=swapped.snapshot,
        )  # fmt: skip
        restored = False
        try:
            if self._load(blocks, found):
                runner.reload(sequence)
                self._rebuild_policy_state(sequence)
                restored = True
        finally:
            if not restored:
                pool.truncate(blocks, known)
                runner.free(sequence)
        return sequence if restored else None

    def discard(self, swapped: SwappedSequence) -> None:
        """Remove a sequence's blocks from disk, except those that other swapped sequences also use."""
        if swapped.snapshot is not None:
            assert self._runner.snapshots is not None
            self._runner.snapshots.give_back(swapped.snapshot)
        keys = swapped.keys
        self._users.subtract(keys)
        self._users += Counter()
        self._disk.remove(key for key in keys if key not in self._users)

    def _restorable(self, sequence: Sequence) -> bool:
        # Exact restoration needs KV that is not quantised and a policy state that depends on keys alone.
        runner = self._runner
        learns_keys_alone = not (runner.policy.wants_queries or runner.policy.wants_weights)
        complete = sequence.position and not sequence.unobserved and sequence.blocks.length == sequence.position
        complete = complete and (runner.states is None or runner.snapshots is not None)
        return bool(complete) and learns_keys_alone and runner.pool.format.exact and runner.config.eviction is None

    def _recompute_seconds(self, sequence: Sequence, batch: int) -> float:
        # This assumes that none of the blocks is cached.
        trace, decoded = sequence.trace, sequence.position - sequence.exact
        computed = trace.prompt_tokens - trace.reused_tokens
        if computed > 0:
            self._prefill_seconds_per_token = trace.prefill_seconds / computed
        step = trace.decode_seconds / max(1, len(trace.attended))
        if not self._runner.approximates:
            return sequence.position * (self._prefill_seconds_per_token or step)
        return sequence.exact * (self._prefill_seconds_per_token or step) + decoded * step / batch

    def _describe(self, sequence: Sequence) -> SwappedSequence:
        groups, position = self._runner.pool.groups, sequence.position
        # Blocks with exact KV are named by their tokens. Other names are unique to this sequence.
        provenance_key = SessionProvenance(self._disk.root, f"{FOLDER}-{next(self._ids)}", sequence.provenance)
        names = name_blocks(provenance_key, sequence.tokens, position, [(sequence.exact, position)])
        # The block table may still contain a block that has just left the window. A restored table has no slots for
        # such a block.
        windows = window_blocks(groups, names, position, sequence.blocks.floor)
        return SwappedSequence(
            [*names, *windows] if groups.full else windows, position, sequence.exact, sequence.shift,
            sequence.provenance, sequence.blocks.floor,
        )  # fmt: skip

    def _cached_exact_blocks(self, swapped: SwappedSequence, tokens: Seq[int]) -> BlockTable:
        if not self._runner.config.enable_prefix_caching:
            return BlockTable(floor=swapped.floor)
        provenance_key = EXACT + swapped.provenance
        return self._runner.pool.match(tokens[: swapped.exact + 1], provenance_key, floor=swapped.floor)

    def _find(self, swapped: SwappedSequence, blocks: BlockTable) -> list[PlacedBlock] | None:
        known = range(blocks.length // BLOCK_SIZE), blocks.windows
        names = [name for name in swapped.names if name.index not in known[name.group > 0]]
        stored = [self._disk.find(name) for name in names]
        each = zip(names, stored, strict=True)
        found = [PlacedBlock(name.index, block, name.group) for name, block in each if block is not None]
        return found if len(found) == len(names) else None

    def _load(self, blocks: BlockTable, found: list[PlacedBlock]) -> bool:
        if not found:
            return True
        layers = self._runner.adapter.geometry.layers
        loader = BlockLoader(self._runner.pool, blocks, found, ahead=layers)
        try:
            for layer in range(layers):
                loader.wait(layer)
        except DamagedBlockError:
            return False
        finally:
            loader.close()
        read = self._disk.layers * sum(placed.block.layer_bytes for placed in found)
        self._read_seconds_per_byte = loader.load_seconds / read
        return True

    @torch.inference_mode()
    def _rebuild_policy_state(self, sequence: Sequence) -> None:
        runner, device = self._runner, self._runner.adapter.device
        for layer in runner.adapter.geometry.kv_layers:
            if layer not in runner.policy.dense_layers:
                start = 0
                for rows in runner.pool.runs(sequence.blocks, layer, range(sequence.position)):
                    with on_device(device):
                        sequence.state.on_kv(layer, rows.k.to(device), rows.v.to(device), start)
                    start += rows.k.shape[1]
        sequence.unobserved = 0


def _close(saver: Saver, disk: SwapFile) -> None:
    saver.close()
    disk.close()
