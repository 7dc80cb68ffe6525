"""Look up some columns of embeddings in Triton, in one launch.

The table is in device memory, or in page-locked host memory, which the device reads in place. Token ids stay on the
device, so that a captured CUDA graph can look up the tokens of each step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8
"""Number of tokens per program. Reads of host memory have a long latency, so many of them must be in flight."""


@triton.jit(do_not_specialize=["tokens"])
def _embedding_part(
    part: tl.tensor, ids: tl.tensor, out: tl.tensor, tokens: tl.tensor,
    STEP: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program i copies the rows of tokens [i * BLOCK, (i + 1) * BLOCK). Rows of `part` are STEP elements apart."""
    # STEP and WIDTH are constants, so that the compiler knows the alignment of rows and uses 16-byte loads.
    token, column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, COLS)
    row = tl.load(ids + token, mask=token < tokens, other=0)
    mask = (token < tokens)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(part + row[:, None] * STEP + column[None, :], mask=mask)
    tl.store(out + token[:, None] * WIDTH + column[None, :], values, mask=mask)


def embedding_part(part: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Look up rows in one launch. See `embedding.embedding_part`.

    `ids` must be int64 and on the device. The columns of `part` must be contiguous, in device memory or in page-locked
    host memory.
    """
    (tokens,), width = ids.shape, part.shape[1]
    assert part.stride(1) == 1 and ids.is_contiguous() and ids.dtype == torch.int64
    out = part.new_empty(tokens, width, device=ids.device)
    if tokens:
        _embedding_part[(triton.cdiv(tokens, _BLOCK),)](
            part, ids, out, tokens, STEP=part.stride(0), WIDTH=width, COLS=triton.next_power_of_2(width), BLOCK=_BLOCK
        )
    return out
