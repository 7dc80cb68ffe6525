"""Launch each Triton kernel as in a decode step, on tensors without data, so that `compiled_kernels` compiles it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload_rt.kernels.kv_runs import Run
from offload_rt.kernels.low_bit import Layout
from offload_rt.kernels.packed_format import PackedFormat
from offload_rt.kernels.pages import PAGE_BLOCKS, PAGE_TOKENS, Pages
from offload_rt.kernels.pointer_table import PointerTable
from offload_rt.kernels.pool_rows import DeviceRows
from offload_rt.policies.infinigen.scoring import row_width

from .low_bit import table_of

KV_HEADS, D, COLUMNS, TOKENS, BATCH = 8, 128, 38, 4096, 2
"""Shape of an 8B Llama. The scoring keys have `COLUMNS` columns, which corresponds to partial_ratio 0.3."""


@dataclass(frozen=True)
class Shape:
    """Attention shape. `planes` is 1 if the values are part of the keys, and 2 otherwise."""

    kv_heads: int = KV_HEADS
    group: int = 4
    d: int = D
    planes: int = 2

    @property
    def lists(self) -> int:
        return BATCH * self.kv_heads


LLAMA = Shape()


def _zero_bounds(shape: Shape = LLAMA) -> torch.Tensor:
    return torch.zeros(shape.lists, dtype=torch.int32)


def _gather(width: int, dtype: torch.dtype) -> None:
    from offload_rt.kernels import triton_gather

    rows, ids = torch.empty(TOKENS, width, dtype=dtype), torch.empty(BATCH * KV_HEADS, 512, dtype=torch.int64)
    out = rows.new_empty(2, *ids.shape, width)
    triton_gather.gather_rows(rows, ids, _zero_bounds(), out[0])
    bases, planes = ids.new_empty(BATCH, TOKENS // 64), ids.new_empty(2, KV_HEADS)
    triton_gather.gather_tokens(rows, ids, _zero_bounds(), bases, planes, out)
    table = PointerTable.of([torch.empty(2 * KV_HEADS, 65, width, dtype=dtype) for _ in range(BATCH)])
    triton_gather.gather_slots(table, ids, out)
    triton_gather.scatter_slots(table, ids, out)
    triton_gather.gather_tokens(rows, ids, _zero_bounds(), bases, planes[:1], out[:1])


def _gather_copies(width: int, dtype: torch.dtype) -> None:
    """Launch gathers from a pool whose blocks may have copies on the device."""
    from offload_rt.kernels import triton_gather

    rows, ids = torch.empty(TOKENS, width, dtype=dtype), torch.empty(BATCH * KV_HEADS, 512, dtype=torch.int64)
    out, bases = rows.new_empty(2, *ids.shape, width), ids.new_empty(BATCH, TOKENS // 64)
    planes, tally = ids.new_empty(2, KV_HEADS), ids.new_empty(BATCH, 2)
    device = DeviceRows(torch.empty_like(rows), TOKENS, planes)
    triton_gather.gather_rows(rows, ids, _zero_bounds(), out[0], device)
    triton_gather.gather_tokens(rows, ids, _zero_bounds(), bases, planes, out, device, tally)
    k = rows[: BATCH * KV_HEADS]
    triton_gather.write_rows(rows, k, k, ids.flatten()[: 2 * BATCH], planes, device)


def _append(shape: Shape = LLAMA) -> None:
    from offload_rt.kernels import triton_append, triton_entries, triton_gather

    lists, heads, d = shape.lists, shape.kv_heads, shape.d
    k, slots = torch.empty(lists, d, dtype=torch.bfloat16), torch.empty(lists, dtype=torch.int64)
    resident = PointerTable.of([torch.empty(shape.planes * heads, 68, d, dtype=torch.bfloat16) for _ in range(BATCH)])
    triton_append.store_resident(k, k, resident, slots[:BATCH])
    planes = slots.new_empty(shape.planes, heads)
    triton_gather.write_rows(torch.empty(TOKENS, d, dtype=torch.bfloat16), k, k, slots[:BATCH], planes)
    keys = PointerTable.of([torch.empty(heads, COLUMNS, TOKENS, dtype=torch.bfloat16) for _ in range(BATCH)])
    triton_append.append_partial(k, torch.empty(heads, d, COLUMNS), keys, slots)
    packed = PointerTable.of([torch.empty(heads, TOKENS // 2, d, dtype=torch.int8) for _ in range(BATCH)])
    scale = torch.empty(heads, d)
    triton_append.append_quantised(k, torch.empty(heads, d, d), scale, scale, 4, packed, slots)
    entries = PointerTable.of([torch.empty(heads, TOKENS, d, dtype=torch.bfloat16) for _ in range(BATCH)])
    triton_entries.append_entries(k, entries, slots, 16)
    triton_entries.write_lists(triton_entries.read_lists(entries, 64, slots[:BATCH]), entries, slots[:BATCH])
    triton_entries.mask_scores(torch.empty(lists, shape.group, 64), _zero_bounds(shape), _zero_bounds(shape), 16)
    slot_tables = PointerTable.of([torch.empty(heads, 65, 2, dtype=torch.int32) for _ in range(BATCH)])
    triton_entries.write_lists(triton_entries.read_lists(slot_tables, 65, slots[:BATCH]), slot_tables, slots[:BATCH])


def _partial(shape: Shape) -> None:
    from offload_rt.kernels import triton_scores

    keys = PointerTable.of([torch.empty(shape.kv_heads, COLUMNS, TOKENS, dtype=torch.bfloat16) for _ in range(BATCH)])
    q = torch.empty(shape.lists, shape.group, COLUMNS)
    triton_scores.partial_scores(q, keys, _zero_bounds(shape), _zero_bounds(shape), TOKENS)


def _quantised(bits: int, d: int, shape: Shape = LLAMA) -> None:
    from offload_rt.kernels import triton_scores

    rows = [torch.empty(shape.kv_heads, TOKENS * bits // 8, row_width(d), dtype=torch.int8) for _ in range(BATCH)]
    q, scale = torch.empty(shape.lists, shape.group, d), torch.empty(shape.kv_heads, d)
    triton_scores.quantised_scores(
        q, PointerTable.of(rows), scale, scale, bits, _zero_bounds(shape), _zero_bounds(shape), TOKENS
    )


def _select(shape: Shape) -> None:
    from offload_rt.kernels import triton_select
    from offload_rt.kernels.lists import Scores

    blocks = torch.empty(shape.lists, shape.group, TOKENS // 256)
    found = Scores(torch.empty(shape.lists, shape.group, TOKENS), blocks, blocks)
    limits = torch.empty(BATCH, dtype=torch.int32)
    triton_select.select_tokens(found, _zero_bounds(shape), _zero_bounds(shape), shape.kv_heads, 5.0, limits, 200)


def _attend(dtype: torch.dtype, shape: Shape = LLAMA) -> None:
    from offload_rt.kernels import triton_attention, triton_resident

    resident = PointerTable.of(
        [torch.empty(shape.planes * shape.kv_heads, 68, shape.d, dtype=dtype) for _ in range(BATCH)]
    )
    q, k = (
        torch.empty(shape.lists, shape.group, shape.d, dtype=dtype),
        torch.empty(shape.lists, 512, shape.d, dtype=dtype),
    )
    v = k if shape.planes == 1 else torch.empty_like(k)
    triton_resident.attend_resident(
        q, resident, _zero_bounds(shape), _zero_bounds(shape), k, v, _zero_bounds(shape), 0.1
    )
    triton_attention.attend_counted(q, k, v, _zero_bounds(shape), 0.1)


def _attend_copies(dtype: torch.dtype, shape: Shape = LLAMA) -> None:
    from offload_rt.kernels import triton_resident

    resident = PointerTable.of(
        [torch.empty(shape.planes * shape.kv_heads, 1, shape.d, dtype=dtype) for _ in range(BATCH)]
    )
    q, rows = (torch.empty(*size, shape.d, dtype=dtype) for size in ((shape.lists, shape.group), (TOKENS,)))
    planes, bounds = torch.empty(shape.planes, shape.kv_heads, dtype=torch.int64), _zero_bounds(shape)
    copies, bases = DeviceRows(rows, TOKENS, planes), planes.new_empty(BATCH, TOKENS // 64)
    triton_resident.attend_copies(q, resident, bounds, bounds, copies, bases, bounds, bounds, 0.1)


def _runs(dtype: torch.dtype, shape: Shape, sequences: int) -> None:
    from offload_rt.kernels import triton_kv_runs

    own, shared = (torch.empty(shape.planes, shape.kv_heads, n, shape.d, dtype=dtype) for n in (64, TOKENS))
    runs = [Run(0, sequences, shared[0], shared[-1]), *(Run(b, b + 1, own[0], own[-1]) for b in range(sequences))]
    triton_kv_runs.attend_runs(torch.empty(shape.kv_heads * shape.group, sequences, shape.d, dtype=dtype), runs, 0.1)


def _norms_and_rotary() -> None:
    from offload_rt.kernels import triton_norm, triton_rotary

    for tokens in (BATCH, 100):
        hidden, turns = torch.empty(tokens, 32 * D, dtype=torch.bfloat16), torch.empty(1, tokens, D)
        triton_norm.rms_norm(hidden, hidden[0], 1e-5)
        triton_rotary.rotate_halves(hidden.view(tokens, -1, D).transpose(0, 1), turns, turns)


def _skew_queries(shape: Shape = LLAMA) -> None:
    from offload_rt.kernels import triton_skew

    q = torch.empty(shape.kv_heads * shape.group, BATCH, shape.d, dtype=torch.bfloat16)
    triton_skew.skew_queries(q, torch.empty(shape.kv_heads, shape.d, shape.d), shape.kv_heads, 0.1)


def _low_bit(bits: int, shape: Shape) -> None:
    from offload_rt.kernels import triton_low_bit, triton_low_bit_rows, triton_low_bit_scores

    layout, lists, heads, d = Layout(shape.d, bits), shape.lists, shape.kv_heads, shape.d
    page, count = torch.zeros(2, heads, PAGE_BLOCKS, layout.block_bytes, dtype=torch.uint8), TOKENS // PAGE_TOKENS
    table = table_of([Pages.of([page] * count, 1) for _ in range(BATCH)])
    q, mean, mixing = torch.ones(lists, shape.group, d), torch.zeros(heads, d), torch.eye(d)
    k, basis = torch.empty(lists, d, dtype=torch.bfloat16), torch.empty(heads, d, d)
    triton_low_bit_rows.append_rows(k, k, basis, mean, mixing, layout, table, torch.zeros(lists, dtype=torch.int64))
    for values in (False, True):
        triton_low_bit_rows.store_rows(table.pages[0], layout, torch.empty(heads, 200, d), 70, values=values)
    bounds = _zero_bounds(shape)
    triton_low_bit_scores.scores(q, mean, layout, table, bounds, bounds, TOKENS)
    chosen, exact = torch.zeros(lists, 80, dtype=torch.int64), (torch.empty_like(q), q.new_empty(q.shape[:2]))
    triton_low_bit.merge_approximate(q, mean, mixing, layout, table, bounds, bounds, chosen, bounds, TOKENS, *exact)


def _latent(heads: int) -> None:
    """Launch the kernels of a model with latent attention, except those for float32, gathers and fetched KV."""
    shape = Shape(1, heads, 576, planes=1)
    _append(shape)
    _skew_queries(shape)
    _partial(shape)
    for bits in (8, 4, 2):
        _quantised(bits, int(0.3 * shape.d) if bits == 8 else shape.d, shape)
    _select(shape)
    _runs(torch.bfloat16, shape, 4)
    for bits in (4, 2):
        _low_bit(bits, shape)


def _latent_fp32() -> None:
    _attend(torch.float32, Shape(1, 16, 576, planes=1))
    _runs(torch.float32, Shape(1, 16, 576, planes=1), 4)


def _packed_weights(form: PackedFormat) -> None:
    from offload_rt.kernels import triton_packed

    rows = torch.empty(4096, form.row_bytes, dtype=torch.uint8)
    triton_packed.linear(torch.empty(1, form.ins, dtype=torch.bfloat16), rows, form, None)
    triton_packed.unpack(rows, form, torch.bfloat16)


def _embedding_part(width: int) -> None:
    """Launch the copy of one layer's embeddings from a table with 35 layers."""
    from offload_rt.kernels import triton_embedding

    table = torch.empty(97, 35 * width, dtype=torch.bfloat16)
    triton_embedding.embedding_part(table[:, width : 2 * width], torch.empty(BATCH, dtype=torch.int64))


CASES: dict[str, Callable[[], None]] = {
    "model": _norms_and_rotary,
    "embeddings of each layer": lambda: _embedding_part(256),
    "packed, 4 bits": lambda: _packed_weights(PackedFormat(4096, 4, 32, True, has_factors=True)),
    "packed, 4 bits with zeros": lambda: _packed_weights(PackedFormat(4096, 4, 128, has_zeros=True)),
    "packed, 5 bits": lambda: _packed_weights(PackedFormat(4096, 5, 32, True, has_factors=True)),
    "packed, 6 bits": lambda: _packed_weights(PackedFormat(4096, 6, 16, offset=32, has_factors=True)),
    "packed, 8 bits": lambda: _packed_weights(PackedFormat(4096, 8, 32, offset=128)),
    "gather, bf16": lambda: _gather(D, torch.bfloat16),
    "gather, copies": lambda: _gather_copies(D, torch.bfloat16),
    "gather, int4": lambda: _gather(D // 2 + 12, torch.uint8),
    "append": _append,
    "skew": _skew_queries,
    "partial keys": lambda: _partial(LLAMA),
    "partial keys, groups of 1": lambda: _partial(Shape(group=1)),
    "int8 keys": lambda: _quantised(8, COLUMNS),
    "int8 keys, groups of 1": lambda: _quantised(8, COLUMNS, Shape(group=1)),
    "int4 keys": lambda: _quantised(4, D),
    "int2 keys, d 256": lambda: _quantised(2, 256),
    "select": lambda: _select(LLAMA),
    "select, groups of 1": lambda: _select(Shape(group=1)),
    "attend, bf16": lambda: _attend(torch.bfloat16),
    "attend, bf16, groups of 1": lambda: _attend(torch.bfloat16, Shape(group=1)),
    "attend, bf16, d 256": lambda: _attend(torch.bfloat16, Shape(d=256)),
    "attend, bf16, d 192": lambda: _attend(torch.bfloat16, Shape(d=192)),
    "attend, fp32, d 256": lambda: _attend(torch.float32, Shape(d=256)),
    "attend, fp32, d 512": lambda: _attend(torch.float32, Shape(d=512)),
    "attend copies, bf16": lambda: _attend_copies(torch.bfloat16),
    "attend copies, bf16, groups of 1": lambda: _attend_copies(torch.bfloat16, Shape(group=1)),
    "attend copies, fp32, d 256": lambda: _attend_copies(torch.float32, Shape(d=256)),
    "attend copies, latent": lambda: _attend_copies(torch.bfloat16, Shape(1, 128, 576, planes=1)),
    "runs, bf16": lambda: _runs(torch.bfloat16, LLAMA, 32),
    "runs, bf16, d 192": lambda: _runs(torch.bfloat16, Shape(d=192), 32),
    "runs, fp32, d 96": lambda: _runs(torch.float32, Shape(d=96), 4),
    "runs, fp32, d 256": lambda: _runs(torch.float32, Shape(d=256), 4),
    "tail, int4": lambda: _low_bit(4, LLAMA),
    "tail, int2, d 64": lambda: _low_bit(2, Shape(d=64)),
    "tail, int2": lambda: _low_bit(2, LLAMA),
    "latent, gather": lambda: _gather(576, torch.bfloat16),
    "latent, attend, 16 heads": lambda: _attend(torch.bfloat16, Shape(1, 16, 576, planes=1)),
    "latent, attend, 128 heads": lambda: _attend(torch.bfloat16, Shape(1, 128, 576, planes=1)),
    "latent, 16 heads": lambda: _latent(16),
    "latent, 128 heads": lambda: _latent(128),
    "latent, fp32": _latent_fp32,
}
"""Launch functions by case name."""
