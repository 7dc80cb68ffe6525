"""Storage formats of the KV cache: the model's dtype, or integers with a scale per group.

Quantisation is group-wise and asymmetric, as in FlexGen (§4.3). The minimum and the maximum of each group of 64
elements are represented exactly. Host-to-device transfers use the storage format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..config import KVFormatName
from ..core import ModelGeometry
from ..utils.config_fields import check_choice

GROUP = 64  # maximum number of elements that share a scale
DECODED_AT_ONCE = 1 << 24  # maximum number of elements that are decoded together
DECODE_BYTES = 5  # temporary memory per element that is decoded: a code and a float32 number


@dataclass(frozen=True)
class Native:
    """Format that stores vectors unchanged in the model's dtype."""

    dtype: torch.dtype
    head_dim: int

    exact = True  # Stored vectors equal the originals, so attention can read them in place.

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def storage(self) -> torch.dtype:
        return self.dtype

    @property
    def width(self) -> int:
        return self.head_dim

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


@dataclass(frozen=True)
class Quantised:
    """Format that stores integers of 8, 4 or 2 bits, with a float16 minimum and step for each group of elements.

    A vector of d elements takes ceil(d * bits / 8) + 4 * groups + `padding` bytes. The error of an element is at most
    half a step, (max - min) / (2 * (2^bits - 1)), plus the error from rounding the minimum and the step to float16.
    """

    bits: int
    dtype: torch.dtype
    head_dim: int
    padding: int = 0

    exact = False
    storage = torch.uint8

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def groups(self) -> int:
        return math.ceil(self.head_dim / GROUP)

    @property
    def width(self) -> int:
        return self._code_bytes + 4 * self.groups + self.padding

    @property
    def _code_bytes(self) -> int:
        return math.ceil(self.head_dim * self.bits / 8)

    @property
    def _group_size(self) -> int:
        return math.ceil(self.head_dim / self.groups)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode vectors `[..., d]` as bytes `[..., width]`: the packed codes, then each group's minimum and step."""
        # Pad the last group with the last element of the vector, which changes neither its minimum nor its maximum.
        filling = rows[..., -1:].expand(*rows.shape[:-1], self.groups * self._group_size - self.head_dim)
        grouped = torch.cat((rows, filling), dim=-1).float().unflatten(-1, (self.groups, self._group_size))
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        levels = (1 << self.bits) - 1
        low = low.half()
        step = ((high - low.float()) / levels).half().clamp_min(torch.finfo(torch.float16).tiny)
        codes = ((grouped - low.float()) / step.float()).round_().clamp_(0, levels).to(torch.uint8)
        scales = torch.cat((low, step), dim=-1).flatten(-2).view(torch.uint8)
        stored = torch.cat((self._pack(codes.flatten(-2)[..., : self.head_dim]), scales), dim=-1)
        return torch.nn.functional.pad(stored, (0, self.padding)) if self.padding else stored

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Decode bytes `[..., width]` to vectors `[..., d]` in the model's dtype.

        Up to `DECODED_AT_ONCE` elements are decoded together, because this takes `DECODE_BYTES` per element.
        """
        if stored.shape[:-1].numel() * self.head_dim <= DECODED_AT_ONCE:
            return self._decode(stored).to(self.dtype)
        rows = torch.empty(*stored.shape[:-1], self.head_dim, dtype=self.dtype, device=stored.device)
        self._decode_into(stored, rows)
        return rows

    def _decode_into(self, stored: torch.Tensor, rows: torch.Tensor) -> None:
        if rows.numel() <= DECODED_AT_ONCE:
            rows.copy_(self._decode(stored))
            return
        longest = max(range(rows.dim() - 1), key=rows.shape.__getitem__)
        for part, own in zip(stored.chunk(2, longest), rows.chunk(2, longest), strict=True):
            self._decode_into(part, own)

    def _decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Decode bytes to float32 vectors."""
        codes = _resize(self._unpack(stored[..., : self._code_bytes]), self.groups * self._group_size).float()
        grouped = codes.unflatten(-1, (self.groups, self._group_size))
        scales = (
            stored[..., self._code_bytes : self.width - self.padding]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.float16)
            .float()
            .unflatten(-1, (-1, 2))
        )
        rows = torch.addcmul(scales[..., :1], grouped, scales[..., 1:], out=grouped).flatten(-2)
        return rows[..., : self.head_dim]

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Pack codes `[..., d]` into bytes. A byte takes 8 / bits adjacent codes, with the first in its low bits."""
        fields = 8 // self.bits
        split = _resize(codes, self._code_bytes * fields).unflatten(-1, (-1, fields))
        packed: torch.Tensor = split[..., 0].clone()
        for field in range(1, fields):
            packed |= split[..., field] << (self.bits * field)
        return packed

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        fields = [(packed >> (self.bits * field)) & ((1 << self.bits) - 1) for field in range(8 // self.bits)]
        codes: torch.Tensor = torch.stack(fields, dim=-1).flatten(-2)
        return codes


KVFormat = Native | Quantised
"""A storage format. `encode` converts vectors `[..., d]` of the model's dtype to stored elements `[..., width]`.

`decode` converts stored elements to vectors.
"""


def _resize(codes: torch.Tensor, count: int) -> torch.Tensor:
    """Truncate each vector of codes to `count` codes, or pad it with zeros."""
    missing = count - codes.shape[-1]
    return torch.nn.functional.pad(codes, (0, missing)) if missing > 0 else codes[..., :count]


def make_kv_format(name: KVFormatName, dtype: torch.dtype, head_dim: int) -> KVFormat:
    """Return the storage format `name` for vectors of `head_dim` elements of `dtype`. Raises ConfigError."""
    check_choice("kv_cache_dtype", name, ("auto", "int8", "int4", "int2"))
    if name == "auto":
        return Native(dtype, head_dim)
    return Quantised(int(name.removeprefix("int")), dtype, head_dim)


def make_kv_formats(name: KVFormatName, dtype: torch.dtype, geometry: ModelGeometry) -> tuple[KVFormat, KVFormat]:
    """Return the storage formats for full-attention layers and for sliding-window layers. Raises ConfigError.

    Vectors are padded so that `geometry.window_ratio` vectors of a sliding-window layer have the same size as one
    vector of a full-attention layer.
    """
    full = make_kv_format(name, dtype, geometry.head_dim)
    if geometry.window_rows is None:
        return full, full
    window, ratio = make_kv_format(name, dtype, geometry.window_rows.head_dim), geometry.window_ratio
    if isinstance(full, Quantised) and isinstance(window, Quantised):
        width = max(window.width, math.ceil(full.width / ratio))
        return replace(full, padding=ratio * width - full.width), replace(window, padding=width - window.width)
    return full, window


def stored_geometry(geometry: ModelGeometry, formats: tuple[KVFormat, KVFormat]) -> ModelGeometry:
    """Return `geometry` with its head dimensions replaced by the widths of the stored vectors."""
    full, window = formats
    own = geometry.window_rows
    rows = None if own is None else replace(own, head_dim=window.width)
    return replace(geometry, head_dim=full.width, window_rows=rows)
