"""One function for each operation of the decode step: Triton for tensors on a CUDA device, torch elsewhere (and for
float64, and where Triton is not installed). What each computes is defined, shapes and all, in `lists` and `segments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from . import lists, low_bit, low_bit_cpu, low_bit_lists, segments
from .lists import Scores
from .low_bit import Layout
from .pointer_table import PointerTable
from .segments import Run


def _compiled(tensor: torch.Tensor) -> bool:
    """Whether an operation on `tensor` is Triton's."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and find_spec("triton") is not None


def gather_rows(rows: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """See `lists.gather_rows`. `rows` lies in device memory or in page-locked host memory, of any dtype; without Triton
    the host is asked for the ids."""
    module: Any = lists
    if _compiled(ids):
        from . import triton_gather as module
    module.gather_rows(rows, ids, counts, out)


def scatter_rows(rows: torch.Tensor, ids: torch.Tensor, source: torch.Tensor) -> None:
    """See `lists.scatter_rows`. Memory as in `gather_rows`."""
    module: Any = lists
    if _compiled(ids):
        from . import triton_gather as module
    module.scatter_rows(rows, ids, source)


def keep_rows(k: torch.Tensor, v: torch.Tensor, kept: PointerTable, places: torch.Tensor) -> None:
    """See `lists.keep_rows`."""
    module: Any = lists
    if _compiled(k):
        from . import triton_append as module
    module.keep_rows(k, v, kept, places)


def partial_scores(
    q: torch.Tensor, keys: PointerTable, starts: torch.Tensor, stops: torch.Tensor, tokens: int
) -> Scores:
    """See `lists.partial_scores`."""
    module: Any = lists
    if _compiled(q):
        from . import triton_scores as module
    found: Scores = module.partial_scores(q, keys, starts, stops, tokens)
    return found


def quantised_scores(
    q: torch.Tensor,
    packed: PointerTable,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """See `lists.quantised_scores`."""
    module: Any = lists
    if _compiled(q):
        from . import triton_scores as module
    found: Scores = module.quantised_scores(q, packed, mean, step, bits, starts, stops, tokens)
    return found


def select_tokens(
    found: Scores,
    starts: torch.Tensor,
    stops: torch.Tensor,
    kv_heads: int,
    alpha: float,
    limits: torch.Tensor,
    cap: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lists.select_tokens`."""
    module: Any = lists
    if _compiled(found.scores):
        from . import triton_select as module
    chosen: tuple[torch.Tensor, torch.Tensor] = module.select_tokens(found, starts, stops, kv_heads, alpha, limits, cap)
    return chosen


def attend_counted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lists.attend_counted`."""
    module: Any = lists
    if _compiled(q):
        from . import triton_attention as module
    part: tuple[torch.Tensor, torch.Tensor] = module.attend_counted(q, k, v, counts, scale)
    return part


def attend_kept(
    q: torch.Tensor,
    kept: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lists.attend_kept`."""
    module: Any = lists
    if _compiled(q):
        from . import triton_resident as module
    whole: tuple[torch.Tensor, torch.Tensor] = module.attend_kept(q, kept, starts, stops, k, v, counts, scale)
    return whole


def merge_parts(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lists.merge_parts`."""
    module: Any = lists
    if _compiled(outs):
        from . import triton_attention as module
    whole: tuple[torch.Tensor, torch.Tensor] = module.merge_parts(outs, lses)
    return whole


def append_partial(k: torch.Tensor, basis: torch.Tensor, keys: PointerTable, slots: torch.Tensor) -> None:
    """See `lists.append_partial`."""
    module: Any = lists
    if _compiled(k):
        from . import triton_append as module
    module.append_partial(k, basis, keys, slots)


def append_quantised(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    step: torch.Tensor,
    bits: int,
    packed: PointerTable,
    slots: torch.Tensor,
) -> None:
    """See `lists.append_quantised`."""
    module: Any = lists
    if _compiled(k):
        from . import triton_append as module
    module.append_quantised(k, basis, mean, step, bits, packed, slots)


def attend_runs(q: torch.Tensor, runs: Sequence[Run], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `segments.attend_runs`."""
    module: Any = segments
    if _compiled(q):
        from . import triton_segments as module
    whole: tuple[torch.Tensor, torch.Tensor] = module.attend_runs(q, runs, scale)
    return whole


def append_low_bit_keys(
    k: torch.Tensor,
    basis: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    storages: PointerTable,
    slots: torch.Tensor,
) -> None:
    """See `low_bit_lists.append_keys`."""
    low_bit_lists.append_keys(k, basis, mean, layout, storages, slots)


def low_bit_list_scores(
    q: torch.Tensor,
    mean: torch.Tensor,
    layout: Layout,
    storages: PointerTable,
    starts: torch.Tensor,
    stops: torch.Tensor,
    tokens: int,
) -> Scores:
    """See `low_bit_lists.scores`."""
    return low_bit_lists.scores(q, mean, layout, storages, starts, stops, tokens)


def low_bit_scores(
    q: torch.Tensor, shift: torch.Tensor, storage: torch.Tensor, layout: Layout, tokens: range
) -> torch.Tensor:
    """See `low_bit.low_bit_scores`."""
    module: Any = low_bit_cpu if low_bit_cpu.suits(q) else low_bit
    found: torch.Tensor = module.low_bit_scores(q, shift, storage, layout, tokens)
    return found


def tail_attention(
    q: torch.Tensor, shift: torch.Tensor, storage: torch.Tensor, layout: Layout, tokens: range, skip: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `low_bit.tail_attention`."""
    module: Any = low_bit_cpu if low_bit_cpu.suits(q) else low_bit
    if _compiled(q):
        from . import triton_low_bit as module
    part: tuple[torch.Tensor, torch.Tensor] = module.tail_attention(q, shift, storage, layout, tokens, skip)
    return part


def select_low_bit(
    q: torch.Tensor,
    shift: torch.Tensor,
    storage: torch.Tensor,
    layout: Layout,
    tokens: range,
    alpha: float,
    max_fraction: float,
) -> torch.Tensor:
    """See `low_bit.select_tokens`."""
    module: Any = low_bit_cpu if low_bit_cpu.suits(q) else low_bit
    chosen: torch.Tensor = module.select_tokens(q, shift, storage, layout, tokens, alpha, max_fraction)
    return chosen


def top_low_bit(
    q: torch.Tensor, shift: torch.Tensor, storage: torch.Tensor, layout: Layout, tokens: range, n: int
) -> torch.Tensor:
    """See `low_bit.top_scored`."""
    module: Any = low_bit_cpu if low_bit_cpu.suits(q) else low_bit
    chosen: torch.Tensor = module.top_scored(q, shift, storage, layout, tokens, n)
    return chosen


def store_low_bit(storage: torch.Tensor, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """See `low_bit.store_rows`."""
    module: Any = low_bit_cpu if low_bit_cpu.suits(rows) else low_bit
    module.store_rows(storage, layout, rows, start, values=values)
