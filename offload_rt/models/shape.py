"""Properties of a model that are known before its weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..core import ModelGeometry
from .checkpoint import build_skeleton, one_error, read_config, resolve_device, resolve_dtype
from .given import check_is_model, check_loaded
from .location import OPEN, Hub, locate
from .packed import moves_packed, packing, packing_of, stays_packed, stored_bytes
from .placement import ON_DEVICE, Placement
from .reach import hold_frequencies
from .registry import adapter_for, architectures
from .weights import WeightSizes, weight_bytes, weight_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelShape:
    """Properties of a model that are known before its weights are read.

    Attributes:
        weight_bytes: As in `LoadedModel`, without weights that `placement` keeps in host memory.
        sizes: The parts of `weight_bytes`.
        packing: Quantisation method of weights that stay packed, or None.
        streams: Whether layers can be copied to the device one by one.
        placement: Weights other than layers that stay in host memory.
        host_bytes: Bytes of the weights that `placement` keeps in host memory.
    """

    geometry: ModelGeometry
    weight_bytes: int
    sizes: WeightSizes
    dtype: torch.dtype
    device: torch.device
    packing: str | None = None
    streams: bool = True
    placement: Placement = ON_DEVICE
    host_bytes: int = 0

    def placed(self, placement: Placement) -> ModelShape:
        """Return the shape with experts and embedding placed according to `placement`."""
        assert not self.placement and not placement.layers, "layers are a plan's to place"
        sizes, on_host, slots = self.sizes.on_device(placement), self.sizes.on_host(placement), placement.experts
        weights = self.weight_bytes - on_host
        if slots is not None and self.sizes.experts is not None:
            weights += slots * sum(self.sizes.experts.each)
        return replace(self, weight_bytes=weights, sizes=sizes, placement=placement, host_bytes=on_host)


def load_shape(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    hub: Hub = OPEN,
    reach: int | None = None,
) -> ModelShape:
    """Return the shape of a model from its configuration (config.json or GGUF header), or of a loaded model.

    Raises the errors of `load_model`.
    """
    if isinstance(model, (str, os.PathLike)):
        location = locate(model, hub)
        config = read_config(location, architectures())
        where = resolve_device(device)
        chosen = resolve_dtype(dtype, location, config, where) or torch.float32
        skeleton = build_skeleton(location, config, chosen)
        with one_error(f"the checkpoint {location} says what no model can be"):
            hold_frequencies(skeleton, reach)
            geometry, sizes = adapter_for(skeleton).geometry, weight_sizes(skeleton)
        if stays_packed(config, where):
            fixed, layers = stored_bytes(location, skeleton, chosen)
            sizes = replace(sizes, fixed=fixed, layers=layers, experts=None)
            return ModelShape(
                geometry, fixed + sum(layers), sizes, chosen, where, packing(config), streams=moves_packed(config)
            )
        packed = None
    else:
        check_is_model(model)
        skeleton, where, chosen = model, model.device, model.dtype
        check_loaded(skeleton, str(device), str(dtype).removeprefix("torch."))
        geometry, sizes, packed = adapter_for(skeleton).geometry, weight_sizes(skeleton), packing_of(skeleton)
    return ModelShape(geometry, weight_bytes(skeleton), sizes, chosen, where, packed, streams=packed is None)
