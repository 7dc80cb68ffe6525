"""Layout of packed weights: codes of 4, 5, 6 or 8 bits, and a scale and an optional minimum per group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPS = (32, 64, 128)
"""Possible group sizes of codes of 4, 5 and 8 bits. Groups of 6-bit codes are 16 inputs, as in GGUF's Q6_K."""


@dataclass(frozen=True)
class PackedFormat:
    """The layout of one packed weight, `[out, row_bytes]` in bytes. Both C code and torch read it in place.

    A weight is `code * scale + minimum`. Each row is [lower bits of codes][higher bits][scales][minima]; scales and
    minima are float16. `packed_products.c` describes the order of the codes.

    Attributes:
        ins: Input features, a multiple of 64 (of 128 with 6 bits).
        bits: Bits of a code: 4, 5, 6 or 8.
        group: Inputs with a common scale.
        has_minima: Whether each group has a minimum. Without it, the minimum is `-offset * scale`.
        offset: The code that stands for 0 in a format without minima.
    """

    ins: int
    bits: int
    group: int
    has_minima: bool
    offset: int = 0

    def __post_init__(self) -> None:
        assert self.fits(self.ins, self.bits, self.group), self

    @staticmethod
    def fits(ins: int, bits: int, group: int) -> bool:
        """Return whether rows of `ins` inputs can be packed with `bits`-bit codes in groups of `group` inputs."""
        groups = (16,) if bits == 6 else GROUPS
        return bits in (4, 5, 6, 8) and group in groups and ins % max(group, 128 if bits == 6 else 64) == 0

    @property
    def high(self) -> int:
        """Offset in bytes of the higher bits in a row."""
        return self.ins if self.bits == 8 else self.ins // 2

    @property
    def scales(self) -> int:
        """Offset in bytes of the scales in a row."""
        return self.ins * self.bits // 8

    @property
    def minima(self) -> int:
        """Offset in bytes of the minima in a row, or of its end if there are none."""
        return self.scales + 2 * self.ins // self.group

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.minima + (2 * self.ins // self.group if self.has_minima else 0)

    def pack(self, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None = None) -> torch.Tensor:
        """Return the packed rows, uint8 `[out, row_bytes]`.

        Args:
            codes: uint8 `[out, ins]`.
            scales: `[out, ins / group]`, rounded to float16.
            minima: Like `scales`, if the format has minima.
        """
        assert (minima is not None) == self.has_minima
        parts = [*self._split(codes), scales.half().contiguous().view(torch.uint8)]
        if minima is not None:
            parts.append(minima.half().contiguous().view(torch.uint8))
        return torch.cat(parts, dim=1)

    def _split(self, codes: torch.Tensor) -> list[torch.Tensor]:
        """Split codes into bytes for storage: the lower 4 bits, two codes per byte, then the remaining bits.

        Codes of 8 bits are unchanged.
        """
        if self.bits == 8:
            return [codes]
        pairs = codes.view(len(codes), -1, 2, 32) & 15
        found = [(pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)]
        if self.bits > 4:
            each = self.bits - 4
            high = (codes >> 4).view(len(codes), -1, *((8, 8) if each == 1 else (4, 32)))
            if each == 1:  # bit i of 8 bytes belongs to code i
                shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
                found.append((high << shifts).sum(-1, dtype=torch.uint8).flatten(1))
            else:
                shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
                found.append((high << shifts[:, None]).sum(-2, dtype=torch.uint8).flatten(1))
        return found

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes of packed rows, uint8 `[out, ins]`."""
        count = len(rows)
        low = rows[:, : self.high]
        if self.bits == 8:
            return low
        low = low.reshape(count, -1, 1, 32)
        found = torch.cat((low & 15, low >> 4), dim=2).flatten(1)
        if self.bits > 4:
            high = rows[:, self.high : self.scales]
            shifts = torch.arange(0, 8, self.bits - 4, dtype=torch.uint8, device=rows.device)
            if self.bits == 5:
                bits = high.reshape(count, -1, 1) >> shifts & 1
            else:
                bits = high.reshape(count, -1, 1, 32) >> shifts[:, None] & 3
            found |= bits.reshape(count, -1) << 4
        return found

    def unpack(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights `[out, ins]` of packed rows, computed in float32."""
        scales = rows[:, self.scales : self.minima].contiguous().view(torch.float16).float()
        minima = rows[:, self.minima :].contiguous().view(torch.float16).float() if self.has_minima else None
        grouped = self.codes(rows).view(len(rows), -1, self.group).float() * scales[..., None]
        grouped += (-self.offset * scales if minima is None else minima)[..., None]
        return grouped.flatten(1).to(dtype)
