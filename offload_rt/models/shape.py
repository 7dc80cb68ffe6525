"""Dimensions and weight sizes of a model, determined without reading its weights."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..config import Quantize
from ..core import ModelGeometry, RowShape, StateShape
from ..kernels.packed_format import PackedFormat
from ..utils.extras import installed_version
from .checkpoint import as_model_error, build_skeleton, declared_dtype, read_config, resolve_device, resolve_dtype
from .checkpoint_cache import CheckpointCache
from .importing import Conversion, conversion_of, converted_source
from .linear import backend_of, has_external_formats, packing, packing_of, use_backends
from .linear.dense import computes_bfloat16
from .linear.packed import PACKED
from .loading import check_loaded, quantize_checkpoint
from .multimodal import belongs_to, unused_modules
from .packed_checkpoint import CannotPackError, declared_formats, use_packed_formats
from .plain_shape import plain_shape
from .registry import adapter_for, has_external_adapters
from .rotary import fix_rope_scaling
from .source import DEFAULT_HUB, Hub, ModelSource, find_source
from .stored_tensors import readable_tensors
from .weights import (
    ON_DEVICE,
    ExpertSizes,
    Placement,
    WeightSizes,
    aligned,
    table_stays_on_host,
    unpacked_bytes,
    weight_bytes,
    weight_sizes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class ModelShape:
    """Dimensions and weight sizes of a model, returned by `load_shape`.

    Attributes:
        weight_bytes: Size in bytes of parameters, buffers and unpacked copies (`weights.unpacked_bytes`), not including
            `host_bytes`. Tied weights count once.
        sizes: `weight_bytes`, broken down into layers, experts, embedding and other weights.
        dtype: Dtype in which the model computes.
        packing: Quantisation method, if weights stay packed on the device, or None.
        streams: Whether layers can be streamed, that is, copied to the device one by one.
        placement: The experts and the embedding that stay in host memory.
        host_table: Size in bytes of the table of `LayerEmbeddings` in host memory, or 0.
        host_bytes: Size in bytes of this table and of the weights that `placement` keeps in host memory.
    """

    geometry: ModelGeometry
    weight_bytes: int
    sizes: WeightSizes
    dtype: torch.dtype
    device: torch.device
    packing: str | None = None
    streams: bool = True
    placement: Placement = ON_DEVICE
    host_table: int = 0
    host_bytes: int = 0

    def with_placement(self, placement: Placement) -> ModelShape:
        assert not self.placement and not placement.layers, "layers are placed by a plan"
        sizes, on_host = self.sizes.on_device(placement), self.sizes.on_host(placement)
        weights = self.weight_bytes - on_host
        if placement.experts is not None and self.sizes.experts is not None:
            weights += placement.experts * sum(self.sizes.experts.one_expert)
        host_bytes = self.host_table + on_host
        return replace(self, weight_bytes=weights, sizes=sizes, placement=placement, host_bytes=host_bytes)

    def with_table_on_host(self) -> ModelShape:
        table, fixed = self.sizes.layer_table, self.sizes.fixed - self.sizes.layer_table
        return replace(
            self,
            weight_bytes=self.weight_bytes - table,
            sizes=replace(self.sizes, fixed=fixed, layer_table=0),
            host_table=table,
            host_bytes=self.host_bytes + table,
        )


def load_shape(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    hub: Hub = DEFAULT_HUB,
    max_model_len: int | None = None,
    quantize: Quantize = "auto",
) -> ModelShape:
    """Return the shape of a model, from its configuration (config.json or GGUF header) or from a loaded model.

    For arguments and errors, see `load_model`.
    """
    if not isinstance(model, (str, os.PathLike)):
        check_loaded(model, str(device), str(dtype).removeprefix("torch."))
        geometry, sizes, packed = adapter_for(model).geometry, weight_sizes(model), packing_of(model)
        size = weight_bytes(model) + unpacked_bytes(model)
        return ModelShape(geometry, size, sizes, model.dtype, model.device, packed, packed is None)
    target = resolve_device(device)
    source = find_source(model, hub)
    compute = partial(_read_shape, source, target, dtype, max_model_len, quantize)
    if has_external_adapters() or has_external_formats():
        return compute()
    arguments = [str(target), str(dtype), max_model_len, quantize, computes_bfloat16(), *_code_versions()]
    if quantize in ("auto", "none") and (shape := _plain_shape(source, target, dtype)) is not None:
        return shape
    # importing transformers and building a skeleton takes four seconds of processor time
    return CheckpointCache(source).lookup("shapes", arguments, compute, _parse, _dump)


def _plain_shape(source: ModelSource, target: torch.device, dtype: str | torch.dtype) -> ModelShape | None:
    plain = plain_shape(source)
    declared = None if plain is None or plain.dtype is None else getattr(torch, plain.dtype, None)
    if plain is None or (plain.dtype is not None and not isinstance(declared, torch.dtype)):
        return None
    chosen = resolve_dtype(dtype, source, declared, target) or torch.float32
    geometry = plain.geometry
    each = [prod(shape) * chosen.itemsize for shape in plain.layer.values()]
    embedding = geometry.vocab * geometry.hidden * chosen.itemsize
    rotary = 2 * (geometry.head_dim // 2) * torch.float32.itemsize  # frequencies, and a copy of them
    sizes = WeightSizes(
        fixed=(1 if plain.tied else 2) * embedding + geometry.hidden * chosen.itemsize + rotary,
        layers=(sum(map(aligned, each)),) * geometry.layers,
        widest=max(side for shape in plain.layer.values() if len(shape) == 2 for side in shape),
        embedding=0 if plain.tied else embedding,
    )
    return ModelShape(geometry, sizes.fixed + geometry.layers * sum(each), sizes, chosen, target)


def _code_versions() -> list[object]:
    """Return the time of the latest change to this package's code, and the versions of the packages that it uses."""
    # The shape of a model depends on this code, in addition to the model's files.
    package = Path(__file__).parents[1]
    # In a checkout, `kernels` is a link, which `os.walk` does not follow from its parent.
    folders = [path for top in (package, package / "kernels") for path, *_ in os.walk(top)]
    files = (file for folder in folders for file in os.scandir(folder) if file.name.endswith(".py"))
    versions = [installed_version(name) for name in ("gguf", "compressed-tensors", "bitsandbytes")]
    return [max(file.stat().st_mtime_ns for file in files), *versions]


def _dump(shape: ModelShape) -> str:
    return json.dumps(asdict(shape), default=str)


def _parse(text: str) -> ModelShape:
    entries = json.loads(
        text, object_hook=lambda entry: {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    )
    geometry, sizes = entries["geometry"], entries["sizes"]
    geometry["states"] = tuple(StateShape(**state) for state in geometry["states"])
    geometry["window_rows"] = None if geometry["window_rows"] is None else RowShape(**geometry["window_rows"])
    sizes["experts"] = None if sizes["experts"] is None else ExpertSizes(**sizes["experts"])
    entries |= {"geometry": ModelGeometry(**geometry), "sizes": WeightSizes(**sizes)}
    entries["placement"] = Placement(**entries["placement"])
    dtype = getattr(torch, entries["dtype"].removeprefix("torch."))
    return ModelShape(**entries | {"dtype": dtype, "device": torch.device(entries["device"])})


def _read_shape(
    source: ModelSource, target: torch.device, dtype: str | torch.dtype, max_model_len: int | None, quantize: Quantize
) -> ModelShape:
    conversion = conversion_of(source, quantize, target)
    if conversion is not None and (converted := converted_source(conversion)) is not None:
        source, conversion = converted, None
    config = read_config(source)
    chosen = resolve_dtype(dtype, source, declared_dtype(source, config), target) or torch.float32
    skeleton = build_skeleton(source, config, chosen)
    with as_model_error(f"the checkpoint {source} is not a valid model"):
        fix_rope_scaling(skeleton, max_model_len)
        quantize_checkpoint(skeleton, quantize, target)
        use_packed_formats(skeleton, _formats(conversion, skeleton), chosen)
        use_backends(skeleton, target)
        geometry, sizes = adapter_for(skeleton).geometry, weight_sizes(skeleton)
    packed, backend = packing_of(skeleton), backend_of(config)
    if packed == PACKED.method or backend is None or not backend.stays_packed(target):
        size = weight_bytes(skeleton) + unpacked_bytes(skeleton)
        shape = ModelShape(geometry, size, sizes, chosen, target, packed if packed == PACKED.method else None)
        on_host = table_stays_on_host(config, target, shape.packing or packing(config))
        return shape.with_table_on_host() if on_host else shape
    fixed, layers = _packed_bytes(source, skeleton, chosen)
    fixed += unpacked_bytes(skeleton, all_packed=True)
    sizes = replace(sizes, fixed=fixed, layers=layers, experts=None, layer_table=0)
    return ModelShape(geometry, fixed + sum(layers), sizes, chosen, target, packing(config), backend.can_stream(config))


def _formats(conversion: Conversion | None, skeleton: PreTrainedModel) -> dict[str, PackedFormat]:
    if packing(skeleton.config) == PACKED.method:
        return declared_formats(skeleton.config)
    if conversion is None:
        return {}
    try:
        return conversion.formats(skeleton)
    except CannotPackError:
        return {}


def _packed_bytes(source: ModelSource, skeleton: nn.Module, dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
    """Return the sizes in bytes of a packed checkpoint's weights: of all weights outside decoder layers, and of each
    layer.

    Packed weights count with their size in the file, and other weights with their size in `dtype`. Raises ModelError.
    """
    named = {_unprefixed(name): tuple(weight.shape) for name, weight in skeleton.named_parameters()}
    depth = 1 + max(int(match[1]) for name in named if (match := _LAYER.search(name)))
    layers, fixed = [0] * depth, sum(buffer.nbytes for buffer in skeleton.buffers())
    unused = unused_modules(skeleton)
    for name, shape, kind, size, _ in readable_tensors(source):
        if any(belongs_to(module, name) for module in unused):
            continue
        plain = kind in ("F64", "F32", "F16", "BF16") and named.get(_unprefixed(name)) == shape
        size = torch.Size(shape).numel() * dtype.itemsize if plain else size
        match = _LAYER.search(name)
        if match is not None and int(match[1]) < depth:
            layers[int(match[1])] += aligned(size)
        else:
            fixed += size
    return fixed, tuple(layers)


def _unprefixed(name: str) -> str:
    """Remove the prefix of a weight name, because files and modules of multimodal models have different prefixes."""
    match = _LAYER.search(name)
    return name[match.start() :].removeprefix(".") if match else ".".join(name.split(".")[-2:])
