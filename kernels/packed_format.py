"""Layout of packed (quantised) weights, which have a scale and optionally a minimum for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

GROUPS = (32, 64, 128)
"""Possible numbers of inputs per group with 4-bit, 5-bit and 8-bit codes. 6-bit codes have groups of 16 inputs, as in
GGUF's Q6_K.
"""

BLOCK = 256
"""Number of inputs whose int8 scales share a float16 factor, in formats with factors."""

TILE = 16
"""Number of rows that are interleaved in the layout for CPUs."""


@dataclass(frozen=True)
class PackedFormat:
    """Layout of one packed weight matrix, uint8 `[out, row_bytes]`. C code, Triton and torch read it in place.

    A weight is `(code * scale + minimum) * 2^exponent`. Each row consists of the parts [lower bits of codes][higher
    bits][scales][minima or zeros][factors of scales][factors of minima], padded to multiples of 4 bytes. The properties
    `*_start` are the offsets of the parts in bytes. A missing part has the same offset as the next part.

    If `interleaved` is set, each `TILE` rows are interleaved in words of 4 bytes: word 0 of each row, then word 1 of
    each row, and so on. The last rows, fewer than `TILE`, form a smaller tile. A vector instruction of a CPU then
    computes the same input of several rows.

    Scales and minima are float16. In formats with factors, they are int8, and every `BLOCK` inputs share one float16
    factor. `packed_products.c` shows the order of the codes.
    """

    ins: int  # number of input features, a multiple of 64 (of 128 with 6-bit codes, of `BLOCK` with factors)
    bits: int  # number of bits per code: 4, 5, 6 or 8
    group: int  # number of adjacent inputs that share a scale
    # Whether each group has a minimum. If not, the minimum is `-zero * scale`. The *zero* is the code of the weight 0.
    has_minima: bool = False
    offset: int = 0  # zero of all groups, if the rows store neither minima nor zeros
    has_zeros: bool = False  # whether each group has its own zero, a uint8
    has_factors: bool = False  # whether scales and minima are int8 with factors, as in GGUF's Q4_K, Q5_K and Q6_K
    exponent: int = 0  # exponent that shifts scales into the range of float16
    # Whether the columns are stored in another order than the inputs of the layer (`use_packed_weights`).
    permuted: bool = False
    interleaved: bool = False  # whether rows are interleaved, for CPUs

    def __post_init__(self) -> None:
        assert self.fits(self.ins, self.bits, self.group), self
        assert not (self.has_zeros and (self.has_minima or self.has_factors)), self
        assert not self.has_factors or (self.ins % BLOCK == 0 and self.group == (16 if self.bits == 6 else 32)), self

    @staticmethod
    def fits(ins: int, bits: int, group: int) -> bool:
        groups = (16,) if bits == 6 else GROUPS
        return bits in (4, 5, 6, 8) and group in groups and ins % max(group, 128 if bits == 6 else 64) == 0

    @cached_property
    def high_start(self) -> int:
        return self.ins if self.bits == 8 else self.ins // 2

    @cached_property
    def scales_start(self) -> int:
        return self.ins * self.bits // 8

    @cached_property
    def minima_start(self) -> int:
        return self.scales_start + _padded((1 if self.has_factors else 2) * self.ins // self.group)

    @cached_property
    def factors_start(self) -> int:
        if self.has_minima:
            return 2 * self.minima_start - self.scales_start
        return self.minima_start + (_padded(self.ins // self.group) if self.has_zeros else 0)

    @cached_property
    def minima_factors_start(self) -> int:
        return (self.factors_start + self.row_bytes) // 2 if self.has_minima else self.row_bytes

    @cached_property
    def row_bytes(self) -> int:
        return self.factors_start + (_padded(2 * self.ins // BLOCK) * (1 + self.has_minima) if self.has_factors else 0)

    def for_cpu(self) -> PackedFormat:
        return replace(self, interleaved=True)

    def pack(self, codes: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        """Pack the parts of a weight, uint8 `[out, row_bytes]`.

        Args:
            codes: Codes of the weights, uint8 `[out, ins]`.
            parts: Scales, minima or zeros, and factors, in the order in which a row stores them. Floating-point numbers
                are rounded to float16.
        """
        stored = (part.half() if part.is_floating_point() else part for part in parts)
        pieces = [*self._split(codes), *(part.contiguous().view(torch.uint8) for part in stored)]
        rows = torch.cat([F.pad(piece, (0, -piece.shape[1] % 4)) for piece in pieces], dim=1)
        assert rows.shape[1] == self.row_bytes
        return interleave(rows) if self.interleaved else rows

    def rows(self, packed: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows `ids` `[n]` (None: all rows), not interleaved.

        Args:
            packed: Packed weights. If they are interleaved, they must begin at a tile.
        """
        if not self.interleaved:
            return packed if ids is None else packed[ids]
        outs, count = len(packed), self.row_bytes // 4
        words = packed.view(torch.int32).flatten()
        if ids is not None:
            first = ids // TILE * TILE
            start, step = first * count + ids % TILE, (outs - first).clamp_max(TILE)
            return words[start[:, None] + step[:, None] * torch.arange(count, device=ids.device)].view(torch.uint8)
        tiled = outs // TILE * TILE * count
        tiles = words[:tiled].view(-1, count, TILE).transpose(1, 2), words[tiled:].view(1, count, -1).transpose(1, 2)
        return torch.cat([part.reshape(-1, count) for part in tiles]).view(torch.uint8)

    def _split(self, codes: torch.Tensor) -> list[torch.Tensor]:
        """Split codes `[out, ins]` into lower 4 bits (two codes per byte) and higher bits. Keep 8-bit codes."""
        if self.bits == 8:
            return [codes]
        pairs = codes.view(len(codes), -1, 2, 32) & 15
        parts = [(pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)]
        if self.bits > 4:
            high_bits = self.bits - 4
            high = (codes >> 4).view(len(codes), -1, *((8, 8) if high_bits == 1 else (4, 32)))
            if high_bits == 1:  # bit i of 8 bytes belongs to code i
                shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
                parts.append((high << shifts).sum(-1, dtype=torch.uint8).flatten(1))
            else:
                shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
                parts.append((high << shifts[:, None]).sum(-2, dtype=torch.uint8).flatten(1))
        return parts

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes `[out, ins]` of rows that are not interleaved."""
        count = len(rows)
        low = rows[:, : self.high_start]
        if self.bits == 8:
            return low
        low = low.reshape(count, -1, 1, 32)
        codes = torch.cat((low & 15, low >> 4), dim=2).flatten(1)
        if self.bits > 4:
            high = rows[:, self.high_start : self.scales_start]
            shifts = torch.arange(0, 8, self.bits - 4, dtype=torch.uint8, device=rows.device)
            if self.bits == 5:
                bits = high.reshape(count, -1, 1) >> shifts & 1
            else:
                bits = high.reshape(count, -1, 1, 32) >> shifts[:, None] & 3
            codes |= bits.reshape(count, -1) << 4
        return codes

    def unpack(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights `[out, ins]` in `dtype`. The order of the columns does not change."""
        rows, groups = self.rows(packed), self.ins // self.group
        scales = self._numbers(rows[:, self.scales_start :], rows[:, self.factors_start :])
        stored_minima = rows[:, self.minima_start :]
        if self.has_minima:
            minima = self._numbers(stored_minima, rows[:, self.minima_factors_start :])
        else:
            minima = scales * -(stored_minima[:, :groups].float() if self.has_zeros else self.offset)
        grouped = self.codes(rows).view(len(rows), -1, self.group).float() * scales[..., None]
        grouped += minima[..., None]
        return grouped.flatten(1).to(dtype)

    def scale_rows(self, packed: torch.Tensor, scales: torch.Tensor) -> tuple[PackedFormat, torch.Tensor]:
        """Multiply the rows of `packed` by powers of two `[out]`. Return the format and the rows of the result.

        The exponent of the format changes, so that only numbers close to 0 are rounded.
        """
        rows = self.rows(packed).clone()
        start = self.factors_start if self.has_factors else self.scales_start
        stop = self.minima_start if self.has_zeros else self.row_bytes
        numbers = rows[:, start:stop].contiguous().view(torch.float16).float() * scales[:, None]
        change = int(torch.frexp(numbers.abs().amax()).exponent) - 15
        rows[:, start:stop] = torch.ldexp(numbers, torch.tensor(-change)).half().view(torch.uint8)
        return replace(self, exponent=self.exponent + change), interleave(rows) if self.interleaved else rows

    def _numbers(self, stored: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Decode scales or minima to float32 `[out, ins / group]`. The arguments begin with the stored numbers."""
        groups, blocks = self.ins // self.group, self.ins // BLOCK
        if not self.has_factors:
            halves = stored[:, : 2 * groups].contiguous().view(torch.float16)
            return torch.ldexp(halves.float(), torch.tensor(self.exponent))
        integers = stored[:, :groups].view(torch.int8).float().view(len(stored), blocks, BLOCK // self.group)
        factor = factors[:, : 2 * blocks].contiguous().view(torch.float16)
        return (integers * torch.ldexp(factor.float(), torch.tensor(self.exponent))[..., None]).flatten(1)


def interleave(rows: torch.Tensor) -> torch.Tensor:
    """Interleave rows, uint8 `[..., out, row_bytes]`, as `PackedFormat.interleaved` describes."""
    words = rows.view(torch.int32)
    tiled = words.shape[-2] // TILE * TILE
    tiles = words[..., :tiled, :].unflatten(-2, (-1, TILE)), words[..., None, tiled:, :]
    parts = [part.transpose(-1, -2).reshape(*words.shape[:-2], -1, words.shape[-1]) for part in tiles]
    return torch.cat(parts, dim=-2).view(torch.uint8)


def _padded(size: int) -> int:
    return -(-size // 4) * 4
