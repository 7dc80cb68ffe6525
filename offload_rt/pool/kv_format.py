"""How a row of K or V is written in host memory: as it is, or as integers with a scale for each group of numbers.

Group-wise asymmetric quantisation as FlexGen's (§4.3 there: groups of 64 numbers, minimum and maximum kept exact): what
is in the pool is also what crosses the link; rows become numbers again where they are attended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from ..config import KVFormatName
from ..config_fields import check_choice

GROUP = 64
"""Most numbers of a row that share a scale."""


class KVFormat(Protocol):
    """Rows of d numbers as rows of `width` stored elements."""

    @property
    def name(self) -> str:
        """As in `kv_format=`; with "auto" the model's dtype."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        ...

    @property
    def storage(self) -> torch.dtype:
        """Of the stored elements."""
        ...

    @property
    def width(self) -> int:
        """Stored elements of a row."""
        ...

    @property
    def exact(self) -> bool:
        """Whether stored rows are the rows themselves, to be attended to where they lie."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """`[..., d]` numbers as `[..., width]` stored elements."""
        ...

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """`[..., width]` stored elements as `[..., d]` numbers of the model's dtype."""
        ...


@dataclass(frozen=True)
class Native:
    """The model's own dtype; encoding and decoding hand back what they are given."""

    dtype: torch.dtype
    head_dim: int

    @property
    def name(self) -> str:
        """The dtype's name."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def storage(self) -> torch.dtype:
        """The dtype itself."""
        return self.dtype

    @property
    def width(self) -> int:
        """d."""
        return self.head_dim

    exact = True

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns `rows` as they are."""
        return rows

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns `stored` as it is."""
        return stored


@dataclass(frozen=True)
class Quantised:
    """`bits` a number (8, 4 or 2). A row is its packed codes, then a float16 minimum and step for each group: d * bits
    / 8 + 4 * groups bytes. A number is off by at most half a step, (max - min) / (2 * (2^bits - 1)), plus the rounding
    of minimum and step to float16."""

    bits: int
    dtype: torch.dtype
    head_dim: int

    @property
    def name(self) -> str:
        """int8, int4 or int2."""
        return f"int{self.bits}"

    @property
    def storage(self) -> torch.dtype:
        """Bytes."""
        return torch.uint8

    @property
    def groups(self) -> int:
        """Groups of a row: as few as keep each at `GROUP` numbers or fewer."""
        return math.ceil(self.head_dim / GROUP)

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self._code_bytes + 4 * self.groups

    @property
    def _code_bytes(self) -> int:
        return math.ceil(self.head_dim * self.bits / 8)

    exact = False

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes of `[..., d]` numbers, and behind them minimum and step of each group, as bytes `[..., width]`."""
        grouped = rows.float().unflatten(-1, (self.groups, -1))
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        levels = (1 << self.bits) - 1
        low = low.half()
        step = ((high - low.float()) / levels).half().clamp_min(torch.finfo(torch.float16).tiny)
        codes = ((grouped - low.float()) / step.float()).round_().clamp_(0, levels).to(torch.uint8)
        scales = torch.cat((low, step), dim=-1).flatten(-2).view(torch.uint8)
        return torch.cat((self._pack(codes.flatten(-2)), scales), dim=-1)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Numbers `[..., d]` of the model's dtype from codes, minima and steps."""
        codes = self._unpack(stored[..., : self._code_bytes]).float().unflatten(-1, (self.groups, -1))
        scales = (
            stored[..., self._code_bytes :]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.float16)
            .float()
            .unflatten(-1, (-1, 2))
        )
        rows: torch.Tensor = torch.addcmul(scales[..., :1], codes, scales[..., 1:]).flatten(-2).to(self.dtype)
        return rows

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Codes `[..., d]`, 8 / bits neighbours to a byte, the first in the lowest bits."""
        fields = 8 // self.bits
        split = codes.unflatten(-1, (-1, fields))
        packed: torch.Tensor = split[..., 0].clone()
        for field in range(1, fields):
            packed |= split[..., field] << (self.bits * field)
        return packed

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        fields = [(packed >> (self.bits * field)) & ((1 << self.bits) - 1) for field in range(8 // self.bits)]
        codes: torch.Tensor = torch.stack(fields, dim=-1).flatten(-2)
        return codes


def kv_format(name: KVFormatName, dtype: torch.dtype, head_dim: int) -> KVFormat:
    """The format `name` for rows of `head_dim` numbers of `dtype`. Raises ConfigError for an unknown name."""
    check_choice("kv_format", name, ("auto", "int8", "int4", "int2"))
    if name == "auto":
        return Native(dtype, head_dim)
    return Quantised(int(name.removeprefix("int")), dtype, head_dim)
