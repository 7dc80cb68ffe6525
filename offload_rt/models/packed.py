"""Weights that stay packed: int8, int4, nf4, fp8 ... as transformers' quantisers keep them. Their modules compute; here
is how many bytes they take, of a loaded model and of a checkpoint before its weights are read."""

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
"""Bytes: what the safetensors library itself takes for the longest header."""


ALIGNMENT = 64
"""Every weight of a layer that moves as one block begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape there, whether its numbers are plain floating-point ones, its bytes."""

    shape: tuple[int, ...]
    floats: bool
    bytes: int


UNPACKED = (
    "transformers keeps no GGUF blocks of this architecture, its weights are numbers; for weights that stay in 4 bits "
    "name a checkpoint that bitsandbytes has packed (documentation: Architectures)"
)
"""What to know of a GGUF file."""


def packing(config: Any) -> str | None:
    """What packs the weights of a model of this configuration, such as "bitsandbytes"; None where nothing does."""
    given = getattr(config, "quantization_config", None)
    if not given:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else getattr(given, "quant_method", given)
    return str(getattr(method, "value", method))


def packing_of(model: Any) -> str | None:
    """`packing` of a loaded model. A configuration may still name GGUF where transformers has made numbers of all
    blocks, as it does for most architectures even if it is asked not to."""
    method = packing(model.config)
    return None if method == "gguf" and all(weight.is_floating_point() for weight in model.parameters()) else method


def stays_packed(config: Any, device: torch.device) -> bool:
    """Whether a checkpoint of this configuration is still packed when it is loaded: transformers makes numbers of mxfp4
    where it has no kernel, which is on a CPU."""
    method = packing(config)
    return method is not None and not (method == "mxfp4" and device.type == "cpu")


def moves_packed(config: Any) -> bool:
    """Whether packed weights of a model of this configuration can be taken from one memory to another piece by piece:
    those of bitsandbytes in 4 bits can. (Its int8 ones are held a second time by their modules, and what torchao and
    others make of a weight says itself on which device it is.)"""
    given = getattr(config, "quantization_config", None)
    four = given.get("load_in_4bit") if isinstance(given, Mapping) else getattr(given, "load_in_4bit", False)
    return packing(config) == "bitsandbytes" and bool(four)


def keep_layout(model: Any) -> None:
    """Keeps bitsandbytes from packing a weight anew for this processor when it first multiplies with it: weights that
    move are read on another device, or through memory that has them as they were."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def cast_numbers(model: Any, dtype: torch.dtype | None) -> None:
    """Puts what bitsandbytes has left as numbers (embedding, norms, head) into `dtype`: transformers reads it in the
    dtype of the file, whatever it is asked for."""
    if dtype is None or packing(model.config) != "bitsandbytes":
        return
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def refuse_packed(model: Any, why: str) -> None:
    """Raises ModelError where weights are packed that must be numbers."""
    method = packing_of(model)
    if method is not None:
        raise ModelError(
            f"the weights are packed ({method}), and {why}: use the checkpoint they were made from", reason="packed"
        )


@dataclass(frozen=True)
class Place:
    """Where a plain tensor that belongs to a weight lies: the attribute `name` of `holder`."""

    holder: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """What lies there."""
        found: torch.Tensor = getattr(self.holder, self.name)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Puts another one there."""
        setattr(self.holder, self.name, tensor)


def places_of(weight: torch.Tensor) -> Iterator[Place]:
    """Where the plain tensors lie that hold a weight: its numbers, or what a packed one is made of, scales included."""
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
    """The plain tensors that hold a weight (`places_of`)."""
    return (place.tensor for place in places_of(weight))


def aligned(size: int) -> int:
    """Bytes that a weight of `size` bytes takes among others."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def held_bytes(weight: torch.Tensor) -> int:
    """Bytes of a weight as it is held."""
    return sum(tensor.nbytes for tensor in tensors_of(weight))


def widest_side(layer: nn.Module) -> int:
    """The longest side of any matrix of a layer, whichever way it is packed; of experts both sides
    together, as many as a token chooses."""
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
    """Bytes of a packed checkpoint's weights beside its layers, and of each layer, in a model of `dtype`: packed ones
    as they are in the file, those that the model has as numbers in its own dtype; each of a layer's aligned. Raises
    ModelError where the files cannot be read."""
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
    """The name of a weight without what stands before layers and embedding, which is other in files of multimodal
    models than in the models."""
    found = _LAYER.search(name)
    return name[found.start() :].removeprefix(".") if found else ".".join(name.split(".")[-2:])


def _headers(location: Location) -> dict[str, Stored]:
    """What the safetensors files of a checkpoint hold, by name."""
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
    """Names and entries of a safetensors file's header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(_HEADER_LIMIT, file.stat().st_size):
            raise ValueError(f"{file.name} is damaged: its header would have {length} bytes")
        header = json.loads(opened.read(length))
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]


def _stored(shape: Any, dtype: Any, offsets: Any) -> Stored:
    floats = str(dtype) in ("F64", "F32", "F16", "BF16")
    return Stored(tuple(int(size) for size in shape), floats, int(offsets[1]) - int(offsets[0]))
