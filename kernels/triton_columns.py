"""Split the columns of a vector into two tiles, because the sizes of Triton's tiles are powers of two.

For example, keys of latent attention have 576 = 512 + 64 elements. A single tile of 1,024 elements would need almost
twice as many registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


def split_columns(d: int, least: int = 16, least_rest: int = 16) -> dict[str, int]:
    """Return the sizes of two tiles that cover d columns: D is at least `least`, REST is 0 or at least `least_rest`.

    REST is 0 (a single tile) if two tiles would not be smaller together. In particular, powers of two are not split.
    """
    padded: int = max(least, triton.next_power_of_2(d))
    rest: int = max(least_rest, triton.next_power_of_2(d - padded // 2))
    splits = padded > least and padded // 2 + rest < padded
    return {"D": padded // 2, "REST": rest} if splits else {"D": padded, "REST": 0}


@triton.jit
def load_columns(
    x: tl.tensor, start: tl.tensor, mask: tl.tensor, d: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr
) -> tl.tensor:
    """Load columns [FIRST, FIRST + WIDTH) of vectors that begin at elements `start` `[n]` of x. Return `[n, WIDTH]`.

    Columns from d on, and vectors outside `mask` `[n]`, are 0.
    """
    column = FIRST + tl.arange(0, WIDTH)
    return tl.load(x + start[:, None] + column[None, :], mask=mask[:, None] & (column < d)[None, :], other=0.0)
