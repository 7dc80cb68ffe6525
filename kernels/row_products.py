"""Linear layers of a few bfloat16 rows on a processor, by `row_products.c`: a decode step reads every weight once, and
reads them here about twice as fast as through torch's product with one row."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from . import native

MOST_ROWS = 12
"""Up to which it is the faster one (of 9 rows, what a pass over 8 drafts has, Qwen 0.5B takes 64 ms, by torch 89)."""

WORTH_A_THREAD = 4 << 20
"""Bytes of a weight for each thread that reads it, so that beginning a thread is not felt."""


@cache
def _library() -> ctypes.CDLL | None:
    library = native.compiled("row_products") if native.has_bfloat16_vectors() else None
    if library is not None:
        library.linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    return library


def takes(weight: torch.Tensor) -> ctypes.CDLL | None:
    """The code for a weight `[out, in]`; None where it does not take it, or the processor lacks the instructions."""
    suits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 32 == 0
    return _library() if suits else None


def linear(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x `[..., in]` times weight `[out, in]` plus bias `[out]`, all bfloat16: `[..., out]`, sums in float32."""
    (outs, ins), x = weight.shape, x.contiguous()
    out = x.new_empty(*x.shape[:-1], outs)
    assert weight.is_contiguous() and x.shape[-1] == ins
    added = None if bias is None else bias.data_ptr()
    threads = max(1, min(torch.get_num_threads(), weight.nbytes // WORTH_A_THREAD))
    library.linear(x.data_ptr(), weight.data_ptr(), added, out.data_ptr(), x.numel() // ins, outs, ins, threads)
    return out
