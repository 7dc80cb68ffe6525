"""Low-bit keys and values, and attention over them, in torch: the reference implementation of the faster kernels.

A vector `[d]` is multiplied by an orthogonal matrix (`mixing`), which spreads large channels over all channels. It is
stored as d codes of `bits` bits and one 8-bit step size. Code c represents `(c - (2^bits - 1) / 2) * step`. The step is
the largest magnitude of the vector divided by 2^(bits - 1), so no value is clipped. Clipping errors, unlike rounding
errors, would not average out over many tokens.

Vectors are stored in blocks of 64 tokens (`Layout`), and blocks in pages (`pages.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .pages import BLOCK, Pages
from .reference import capped
from .selection import quantise_query

KEY_BITS = 4
"""Number of bits per element of a key. Attention output tolerates 2-bit values, but scores need 4-bit keys."""

MIN_STEP_BITS = (127 - 20) << 3
"""Upper eleven bits, after the sign bit, of the float32 number 2^-20, the smallest step size. Its code is 0."""


# ------------------------------------------------------------------------------------------------------------- rows


def mixing(d: int) -> torch.Tensor:
    """Return an orthogonal float64 matrix `[d, d]` whose elements all have small magnitude.

    It is the Kronecker product of a Hadamard matrix and a discrete cosine transform. The size of the Hadamard matrix is
    the largest power of two that divides d.
    """
    odd = d // (d & -d)
    column = torch.arange(odd, dtype=torch.float64)
    mixed = torch.cos(math.pi / odd * (column[:, None] + 0.5) * column[None]) * math.sqrt(2 / odd)
    mixed[:, 0] /= math.sqrt(2)
    while mixed.shape[0] < d:
        mixed = torch.cat((torch.cat((mixed, mixed), 1), torch.cat((mixed, -mixed), 1)), 0) / math.sqrt(2)
    return mixed


def encode_steps(steps: torch.Tensor) -> torch.Tensor:
    """Encode positive step sizes as uint8 floats with five exponent bits and three fraction bits.

    Steps are rounded up and clamped to the range of the format, from 2^-20 to 1.875 * 2^11.
    """
    upper = (steps.float().contiguous().view(torch.int32) + ((1 << 20) - 1)) >> 20
    return (upper - MIN_STEP_BITS).clamp_(0, 255).to(torch.uint8)


def decode_steps(codes: torch.Tensor) -> torch.Tensor:
    return ((codes.to(torch.int32) + MIN_STEP_BITS) << 20).view(torch.float32)


def quantise_rows(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise float32 or float64 vectors x `[..., d]`.

    Returns:
        Packed codes, uint8 `[..., w]` with w = d * bits / 8, and the codes of the steps, uint8 `[...]`. Byte i contains
        the codes of channels i, i + w, i + 2w, and so on, starting with channel i in the lowest bits.
    """
    steps = encode_steps(x.abs().amax(-1) / (1 << (bits - 1)))
    codes = (x / decode_steps(steps).to(x.dtype).unsqueeze(-1)).floor_() + (1 << (bits - 1))
    codes = codes.clamp_(0, (1 << bits) - 1).to(torch.uint8)
    fields = codes.unflatten(-1, (8 // bits, -1))
    packed = fields[..., 0, :].clone()
    for field in range(1, 8 // bits):
        packed |= fields[..., field, :] << (bits * field)
    return packed, steps


def unpack_rows(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([(packed >> (bits * field)) & ((1 << bits) - 1) for field in range(8 // bits)], -1)


def dequantise_rows(packed: torch.Tensor, steps: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    levels = unpack_rows(packed, bits).to(dtype) - ((1 << bits) - 1) / 2
    return levels * decode_steps(steps).to(dtype).unsqueeze(-1)


# ----------------------------------------------------------------------------------------------------------- layout


def packs(head_dim: int, value_bits: int) -> bool:
    """Return whether a 4-bit key and a `value_bits`-bit value each take a whole number of bytes."""
    return head_dim * KEY_BITS % 8 == 0 and head_dim * value_bits % 8 == 0


@dataclass(frozen=True)
class Layout:
    """Byte layout of a block of 64 tokens: packed keys, packed values, and the codes of their quantisation steps.

    Keys are transposed (byte i of all 64 keys is contiguous), because scores of adjacent tokens are computed together.
    Values are stored token by token, because adjacent channels of the output are computed together.
    """

    head_dim: int
    value_bits: int

    def __post_init__(self) -> None:
        assert self.value_bits in (2, 4) and packs(self.head_dim, self.value_bits)

    @property
    def key_bytes(self) -> int:
        return self.head_dim * KEY_BITS // 8

    @property
    def value_bytes(self) -> int:
        return self.head_dim * self.value_bits // 8

    @property
    def block_bytes(self) -> int:
        return BLOCK * (self.key_bytes + self.value_bytes + 2)

    def keys(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the packed keys `[Hkv, blocks, 64, key_bytes]` and of their step codes `[Hkv, blocks, 64]`.

        `rows` contains the blocks, uint8 `[Hkv, blocks, block_bytes]`.
        """
        steps = BLOCK * (self.key_bytes + self.value_bytes)
        packed = rows[:, :, : BLOCK * self.key_bytes].unflatten(2, (-1, BLOCK)).transpose(2, 3)
        return packed, rows[:, :, steps : steps + BLOCK]

    def values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the packed values `[Hkv, blocks, 64, value_bytes]` and of the codes of their step sizes."""
        first, steps = BLOCK * self.key_bytes, BLOCK * (self.key_bytes + self.value_bytes)
        return rows[:, :, first:steps].unflatten(2, (BLOCK, -1)), rows[:, :, steps + BLOCK :]


def store_rows(pages: Pages, layout: Layout, rows: torch.Tensor, start: int, *, values: bool) -> None:
    """Quantise `rows` `[Hkv, m, d]` (keys, or values if `values` is true) and store them from slot `start` on."""
    data = quantise_rows(rows, layout.value_bits if values else KEY_BITS)
    for blocks, slots, part_tokens in pages.parts(range(start, start + rows.shape[1])):
        slot_index = torch.arange(slots.start, slots.stop, device=rows.device)
        for part, codes in zip(layout.values(blocks) if values else layout.keys(blocks), data, strict=True):
            part[:, slot_index // BLOCK, slot_index % BLOCK] = codes[:, part_tokens]


# -------------------------------------------------------------------------------------------------------- attention


def low_bit_scores(q: torch.Tensor, mean: torch.Tensor, pages: Pages, layout: Layout, tokens: range) -> torch.Tensor:
    """Return scores `[Hkv, G, n]` of queries q `[Hkv, G, d]` for the low-bit keys of the n `tokens`.

    q must already be scaled and transformed to the basis of the keys. `mean` `[Hkv, d]` was subtracted from the keys
    before quantisation. The query is rounded to int8 (`selection.quantise_query`), so the sums over channels are exact
    integers and therefore the same on every device.
    """
    weights, scale = quantise_query(q)
    middle = weights.sum(-1, keepdim=True).to(q.dtype) * (((1 << KEY_BITS) - 1) / 2)
    scores = q.new_empty(*q.shape[:2], len(tokens))
    for blocks, slots, part_tokens in pages.parts(tokens):
        codes, steps = (part.flatten(1, 2)[:, slots] for part in layout.keys(blocks))
        sums = torch.bmm(weights.to(q.dtype), unpack_rows(codes, KEY_BITS).to(q.dtype).transpose(1, 2))
        scores[:, :, part_tokens] = (sums - middle) * decode_steps(steps).to(q.dtype).unsqueeze(1)
    return scores * scale + torch.bmm(q, mean.unsqueeze(2))


def approximate_attention(
    q: torch.Tensor,
    mean: torch.Tensor,
    pages: Pages,
    layout: Layout,
    tokens: range,
    excluded: torch.Tensor,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the low-bit KV of `tokens`, except the tokens in `excluded`.

    Args:
        q, mean, pages, layout, tokens: See `low_bit_scores`.
        excluded: Token indices to exclude, int64 `[Hkv, n]`. Negative entries are padding.

    Returns:
        out `[Hkv, G, d]`, not yet multiplied by the inverse of `mixing`, and lse `[Hkv, G]`, in the dtype of q. If all
        tokens are excluded, out is 0 and lse is -inf.
    """
    scores = capped(low_bit_scores(q, mean, pages, layout, tokens), softcap)
    is_hidden = torch.zeros(scores.shape[0], len(tokens) + 1, dtype=torch.bool, device=q.device)
    is_hidden.scatter_(1, torch.where(excluded < 0, len(tokens), excluded - tokens.start), True)
    scores = scores.masked_fill_(is_hidden[:, :-1].unsqueeze(1), -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    out = torch.zeros_like(q)
    for blocks, slots, part_tokens in pages.parts(tokens):
        packed, steps = (part.flatten(1, 2)[:, slots] for part in layout.values(blocks))
        out += torch.bmm(weights[:, :, part_tokens], dequantise_rows(packed, steps, layout.value_bits, q.dtype))
    return out, lse
