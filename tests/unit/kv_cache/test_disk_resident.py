"""Test that with contexts on disk, resident memory exceeds `host_memory` by at most 64 MiB."""

from __future__ import annotations

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_rt.core import ModelGeometry, Selection, VisibleTokens
from offload_rt.kernels.decode_attention import attend
from offload_rt.kv_cache.disk.file_layout import DiskTier
from offload_rt.kv_cache.pool import HostPool
from offload_rt.transfer.disk import DiskTransfer
from offload_rt.utils.allocator import give_back

SINKS, RECENT, KV_HEADS, D = 4, 64, 2, 64
HOST = 0.25
"""Host memory as a fraction of the context's KV."""


def peak_resident_bytes(reset: bool) -> int:
    """Return the peak resident memory in bytes. If `reset` is true, first reset the peak to the current usage."""
    if reset:
        gc.collect()
        give_back()
        Path("/proc/self/clear_refs").write_text("5")
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def random_selections(layers: int, context: int, steps: int) -> list[list[torch.Tensor]]:
    """For each step and layer, draw 5 % of the context as pairs of tokens. Four fifths are from the previous step."""
    generator = torch.Generator().manual_seed(0)
    count, pair_count = context // 40, (context - SINKS - RECENT) // 2
    chosen = [torch.randperm(pair_count, generator=generator)[:count] for _ in range(layers * KV_HEADS)]
    result = []
    for _ in range(steps):
        pairs = [torch.stack(chosen[i : i + KV_HEADS]).sort().values for i in range(0, len(chosen), KV_HEADS)]
        result.append([torch.stack((2 * pair, 2 * pair + 1), -1).flatten(1) + SINKS for pair in pairs])
        for i, previous in enumerate(chosen):
            kept = previous[torch.randperm(count, generator=generator)[: count * 4 // 5]]
            new = torch.randperm(pair_count, generator=generator)[:count]
            chosen[i] = torch.cat((kept, new[~torch.isin(new, kept)]))[:count]
    return result


@torch.inference_mode()
def bytes_over_limit(folder: Path, context: int, layers: int, steps: int, selects: bool) -> int:
    """Decode `steps` tokens. Return how many bytes the peak resident memory is above `host_memory`."""
    geometry = ModelGeometry(
        layers, 14 * D, 14, KV_HEADS, D, vocab=2, scales=(D**-0.5,) * layers, windows=(None,) * layers,
        max_positions=1 << 30, absolute_positions=False, default_alpha=4.0,
    )  # fmt: skip
    size, dtype = geometry.kv_bytes(context, torch.bfloat16), torch.bfloat16
    drawn = random_selections(layers, context, steps) if selects else [None] * steps
    bytes_before, limit = peak_resident_bytes(reset=True), int(HOST * size)
    disk_limit = geometry.kv_bytes(context + context // 64 + 4096, dtype)
    pool = HostPool(geometry, dtype, limit, disk=DiskTier(folder, disk_limit))
    transfer, blocks = DiskTransfer(pool, geometry, torch.device("cpu")), pool.new_block_table(context)
    k, v = torch.randn(2, KV_HEADS, 4096, D).to(dtype)
    for layer in range(layers):
        for start in range(0, context, 4096):
            pool.write(blocks, layer, start, k, v)
    pool.commit(blocks, context)
    give_back()  # as the runner does after a prompt
    transfer.storage.open(blocks, SINKS, RECENT)
    q, row = torch.randn(14, D).to(dtype), torch.randn(KV_HEADS, 1, D).to(dtype)
    for step in drawn:
        position = blocks.length
        pool.reserve(blocks, position + 1)
        visible = VisibleTokens.of(position + 1, sinks=SINKS, recent=RECENT, window=None)
        selected = [None if step is None else Selection(tokens) for tokens in step or [None] * layers]
        pending: list[Any] = [transfer.rows.fetch(blocks, 0, visible, selected[0])]
        for layer in range(layers):
            transfer.storage.append(blocks, layer, position, row, row)
            if layer + 1 < layers:
                pending.append(transfer.rows.fetch(blocks, layer + 1, visible, selected[layer + 1]))
            attend(q, pending.pop(0).wait(), geometry.scales[layer])  # keep no reference to the attended KV
        pool.commit(blocks, position + 1)
    return peak_resident_bytes(reset=False) - bytes_before - limit


def measure_excess(folder: Path, context: int, layers: int) -> dict[str, int]:
    """Return the bytes over the limit with full attention and with selection. A small first run loads the libraries."""
    bytes_over_limit(folder, 8192, 1, 2, True)
    steps = {"full": (2, False), "selected": (24, True)}
    return {kind: bytes_over_limit(folder, context, layers, *args) for kind, args in steps.items()}


@pytest.mark.skipif("OFFLOAD_RT_STRESS" not in os.environ, reason="a GB to write: make stress PART=disk")
@pytest.mark.parametrize(("context", "layers"), [(1 << 20, 2), (1 << 18, 8)])
def test_resident_memory_stays_within_64_mib_of_the_limit(context: int, layers: int, tmp_path: Path) -> None:
    # Use a separate process, because other tests leave memory with the allocator.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        excess = process.submit(measure_excess, tmp_path, context, layers).result()
    print(context, {kind: f"{over >> 20} MiB over the limit" for kind, over in excess.items()})
    assert all(over < 64 << 20 for over in excess.values())


def test_small_context_stays_within_the_limit(tmp_path: Path) -> None:
    """This is the only test of the limit that also runs without OFFLOAD_RT_STRESS."""
    assert bytes_over_limit(tmp_path, 16_384, 1, 3, True) < 64 << 20
