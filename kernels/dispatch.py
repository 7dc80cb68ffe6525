"""Dispatch each operation to its Triton or its torch implementation.

Triton is used for CUDA tensors. torch is used for other devices, for float64, and if Triton is not installed. The torch
functions document shapes and results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

from . import kv_runs, lists, low_bit_lists, pool_rows, reference
from .lists import Scores

P = ParamSpec("P")
T = TypeVar("T")


def uses_triton(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and find_spec("triton") is not None


def _by_device(reference_function: Callable[P, T], triton: str, on: int = 0) -> Callable[P, T]:
    """Return a function that calls the Triton version of `reference_function` for CUDA tensors.

    `triton` is the module that defines the Triton version under the same name. Positional argument number `on`
    determines the device. It must not be a tensor of the KV pool, which may be in page-locked host memory.
    """

    @wraps(reference_function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        argument: Any = args[on]
        function = reference_function
        if uses_triton(argument.scores if isinstance(argument, Scores) else argument):
            function = getattr(import_module(f".{triton}", __package__), reference_function.__name__)
        return function(*args, **kwargs)

    return call


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    module: Any = reference
    if uses_triton(x) and len(x):
        from . import triton_norm as module
    normed: torch.Tensor = module.rms_norm(x, weight, eps)
    return normed


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    module: Any = reference
    if x.is_cuda and uses_triton(x) and x.stride(2) == 1 and x.shape[1]:
        from . import triton_rotary as module
    rotated: torch.Tensor = module.rotate_halves(x, cos, sin)
    return rotated


embedding_part = _by_device(reference.embedding_part, "triton_embedding", on=1)
gather_rows = _by_device(pool_rows.gather_rows, "triton_gather", on=1)
gather_tokens = _by_device(pool_rows.gather_tokens, "triton_gather", on=1)
gather_slots = _by_device(lists.gather_slots, "triton_gather", on=1)
scatter_slots = _by_device(lists.scatter_slots, "triton_gather", on=1)
write_rows = _by_device(pool_rows.write_rows, "triton_gather", on=3)
store_resident = _by_device(lists.store_resident, "triton_append")
read_lists = _by_device(lists.read_lists, "triton_entries", on=2)
write_lists = _by_device(lists.write_lists, "triton_entries", on=2)
append_entries = _by_device(lists.append_entries, "triton_entries", on=2)
mask_scores = _by_device(lists.mask_scores, "triton_entries")
partial_scores = _by_device(lists.partial_scores, "triton_scores")
quantised_scores = _by_device(lists.quantised_scores, "triton_scores")
select_tokens = _by_device(lists.select_tokens, "triton_select")
attend_counted = _by_device(lists.attend_counted, "triton_attention")
attend_resident = _by_device(lists.attend_resident, "triton_resident")
attend_copies = _by_device(lists.attend_copies, "triton_resident")
append_partial = _by_device(lists.append_partial, "triton_append")
skew_queries = _by_device(lists.skew_queries, "triton_skew")
append_quantised = _by_device(lists.append_quantised, "triton_append")
attend_runs = _by_device(kv_runs.attend_runs, "triton_kv_runs")
append_low_bit = _by_device(low_bit_lists.append_rows, "triton_low_bit_rows")
score_low_bit = _by_device(low_bit_lists.scores, "triton_low_bit_scores")
merge_approximate = _by_device(low_bit_lists.merge_approximate, "triton_low_bit")
