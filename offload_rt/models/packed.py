"""Weights that stay packed (int8, int4, nf4, fp8, ...) in the formats of transformers' quantisers.

Computes their size in bytes, for a loaded model and for a checkpoint before its weights are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ModelError
from .location import Location
from .placement import chosen_by_a_token
from .text_part import is_of, other_parts

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_HEADER_LIMIT = 100 << 20
"""Longest header in bytes that the safetensors library accepts."""


ALIGNMENT = 64
"""Alignment in bytes of each weight in a layer that is copied as one buffer."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, whether it holds plain floating-point numbers, and its size in bytes."""

    shape: tuple[int, ...]
    floats: bool
    bytes: int


UNPACKED = (
    "transformers keeps no GGUF blocks of this architecture, its weights are numbers; for weights that stay in 4 bits "
    "name a checkpoint that bitsandbytes has packed (documentation: Architectures)"
)
"""Warning about GGUF files."""


def packing(config: Any) -> str | None:
    """Return the quantisation method of a configuration, such as "bitsandbytes", or None."""
    given = getattr(config, "quantization_config", None)
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", given)
    return str(getattr(method, "value", method))


def packing_of(model: Any) -> str | None:
    """Return the quantisation method of a loaded model, or None."""
    # The configuration still names GGUF if transformers dequantised all weights, as it does for most architectures.
    method = packing(model.config)
    return None if method == "gguf" and all(weight.is_floating_point() for weight in model.parameters()) else method


def stays_packed(config: Any, device: torch.device) -> bool:
    """Return whether the weights of a checkpoint stay packed after loading."""
    # transformers dequantises mxfp4 on a CPU, where it has no kernel.
    method = packing(config)
    return method is not None and not (method == "mxfp4" and device.type == "cpu")


def moves_packed(config: Any) -> bool:
    """Return whether packed weights can be copied between memories layer by layer. Only 4-bit bitsandbytes can."""
    # bitsandbytes modules hold a second copy of int8 weights; torchao weights store their own device.
    given = getattr(config, "quantization_config", None)
    four = given.get("load_in_4bit") if isinstance(given, Mapping) else getattr(given, "load_in_4bit", False)
    return packing(config) == "bitsandbytes" and bool(four)


def keep_layout(model: Any) -> None:
    """Prevent bitsandbytes from repacking weights for the CPU on first use."""
    # Weights that move are read on another device or from a buffer in the original layout.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def cast_numbers(model: Any, dtype: torch.dtype | None) -> None:
    """Convert the weights that bitsandbytes does not pack (embedding, norms, head) to `dtype`."""
    # transformers loads them in the dtype of the file, whatever dtype is requested.
    if dtype is None or packing(model.config) != "bitsandbytes":
        return
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def refuse_packed(model: Any, why: str) -> None:
    """Raise ModelError if the weights are packed."""
    method = packing_of(model)
    if method is not None:
        raise ModelError(
            f"the weights are packed ({method}), and {why}: use the checkpoint they were made from", reason="packed"
        )


@dataclass(frozen=True)
class Place:
    """Location of a plain tensor that is part of a weight: the attribute `name` of `holder`."""

    holder: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor at this location."""
        found: torch.Tensor = getattr(self.holder, self.name)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the tensor."""
        setattr(self.holder, self.name, tensor)


def places_of(weight: torch.Tensor) -> Iterator[Place]:
    """Yield the locations of the plain tensors of a weight; for packed weights, including their scales."""
    if hasattr(weight, "__tensor_flatten__"):  # torchao
        for name in weight.__tensor_flatten__()[0]:
            inner = getattr(weight, name)
            yield from places_of(inner) if hasattr(inner, "__tensor_flatten__") else (Place(weight, name),)
        return
    yield Place(weight, "data")
    if (state := getattr(weight, "quant_state", None)) is not None:  # bitsandbytes
        yield from _places_in(state)


def _places_in(state: Any) -> Iterator[Place]:
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            yield Place(state, name)
        elif hasattr(value, "absmax"):  # scales that are packed themselves
            yield from _places_in(value)


def tensors_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the plain tensors of a weight (see `places_of`)."""
    return (place.tensor for place in places_of(weight))


def aligned(size: int) -> int:
    """Round `size` in bytes up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def held_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of a weight in memory."""
    return sum(tensor.nbytes for tensor in tensors_of(weight))


def widest_side(layer: nn.Module) -> int:
    """Return the longest side of any matrix of a layer, packed or not.

    For experts it is the sum of both sides times the number of experts per token.
    """
    sides = [0]
    chosen = chosen_by_a_token(layer)
    for module in layer.modules():
        stated = getattr(module, "in_features", None), getattr(module, "out_features", None)
        if all(isinstance(size, int) for size in stated):
            sides += [size for size in stated if isinstance(size, int)]
        else:
            own = list(module.parameters(recurse=False))
            sides += [size for w in own if w.dim() == 2 for size in w.shape]
            sides += [chosen * sum(w.shape[1:]) for w in own if w.dim() == 3]
    return max(sides)


def stored_bytes(location: Location, skeleton: nn.Module, dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of a packed checkpoint's weights outside its layers, and of each layer.

    Packed weights count as in the file, plain ones in `dtype`. Weights of layers are aligned.

    Raises:
        ModelError: The files cannot be read.
    """
    named = {_short(name): tuple(weight.shape) for name, weight in skeleton.named_parameters()}
    depth = 1 + max(int(found[1]) for name in named if (found := _LAYER.search(name)))
    layers, fixed = [0] * depth, sum(buffer.nbytes for buffer in skeleton.buffers())
    others = other_parts(skeleton)
    for name, stored in _headers(location).items():
        if any(is_of(part, name) for part in others):
            continue
        plain = stored.floats and named.get(_short(name)) == stored.shape
        size = int(torch.Size(stored.shape).numel()) * dtype.itemsize if plain else stored.bytes
        found = _LAYER.search(name)
        if found is not None and int(found[1]) < depth:
            layers[int(found[1])] += aligned(size)
        else:
            fixed += size
    return fixed, tuple(layers)


def _short(name: str) -> str:
    """Return the name of a weight without its prefix."""
    # The prefix differs between the files and the modules of multimodal models.
    found = _LAYER.search(name)
    return name[found.start() :].removeprefix(".") if found else ".".join(name.split(".")[-2:])


def _headers(location: Location) -> dict[str, Stored]:
    """Return the tensors in the safetensors files of a checkpoint, by name."""
    try:
        if location.folder is None:
            from huggingface_hub import get_safetensors_metadata

            files = get_safetensors_metadata(
                location.place, revision=location.hub.revision, token=location.hub.token
            ).files_metadata.values()
            listed = {name: info for file in files for name, info in file.tensors.items()}
            return {name: _stored(i.shape, i.dtype, i.data_offsets) for name, i in listed.items()}
        entries = [entry for file in sorted(location.folder.glob("*.safetensors")) for entry in _entries(file)]
        return {name: _stored(i["shape"], i["dtype"], i["data_offsets"]) for name, i in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read what the weights of {location} take: {error}") from error


def _entries(file: Path) -> list[tuple[str, Any]]:
    """Return the names and entries in the header of a safetensors file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(_HEADER_LIMIT, file.stat().st_size):
            raise ValueError(f"{file.name} is damaged: its header would have {length} bytes")
        header = json.loads(opened.read(length))
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _stored(shape: Any, dtype: Any, offsets: Any) -> Stored:
    floats = str(dtype) in ("F64", "F32", "F16", "BF16")
    return Stored(tuple(int(size) for size in shape), floats, int(offsets[1]) - int(offsets[0]))
