"""Weight formats: how linear layers store their weights and how they compute with them.

This module contains the interface, and the formats that transformers both loads and computes: bitsandbytes, torchao and
MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class TensorLocation:
    """Location of a plain tensor that is part of a weight: it is attribute `name` of the object `owner`."""

    owner: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = getattr(self.owner, self.name)
        return tensor

    def assign(self, tensor: torch.Tensor) -> None:
        setattr(self.owner, self.name, tensor)


def quantization_option(config: Any, name: str) -> Any:
    options = getattr(config, "quantization_config", None)  # a dictionary before loading, and an object afterwards
    return options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)


class BackendLinear(nn.Linear):
    """Base class of linear layers that use the format of a `LinearBackend`. Subclasses override `forward`."""


class LinearBackend:
    """A weight format of linear layers. This base class is the format of plain weights, whose products torch computes.

    To add a format, override methods and add an instance to `BACKENDS`. If transformers loads the format, set `method`.
    If this package computes the forward pass, override `supports` and `pack`, and set `layer_class`. Then all tensors
    of a weight must be parameters, because sizes, placement, streaming and fingerprints cover all parameters.
    """

    layer_class: type[BackendLinear] = BackendLinear
    """Class of linear layers in this format.

    Plain layers are converted in place, by changing their class to this one.
    """

    method = ""
    """Value of `quant_method` in the configuration of checkpoints in this format; "" if there are no such
    checkpoints.
    """

    def supports(self, layer: nn.Linear, device: torch.device) -> bool:
        """Return whether this backend can compute the plain linear layer `layer` on `device`."""
        return False

    def pack(self, layer: nn.Linear) -> None:
        """Convert the weight of `layer` to this format in place. On the meta device, only shapes are converted."""

    def stays_packed(self, device: torch.device) -> bool:
        """Return whether weights stay packed on `device`. Otherwise, they are dequantised during loading."""
        return True

    def can_stream(self, config: Any) -> bool:
        return False

    def prepare(self, model: Any, dtype: torch.dtype | None, offloaded: bool) -> None:
        """Adjust a model in this format after it was loaded.

        Args:
            dtype: Requested dtype of the weights that are not packed. None keeps the dtype stored in the file.
            offloaded: Whether weights will be copied between host and device memory.
        """

    def tensor_locations(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        """Return the locations of the tensors that make up `weight`, or None if it has another format."""
        return None


class BitsAndBytes(LinearBackend):
    method = "bitsandbytes"

    def can_stream(self, config: Any) -> bool:
        # Modules with int8 weights keep a second copy of them.
        return bool(quantization_option(config, "load_in_4bit"))

    def prepare(self, model: Any, dtype: torch.dtype | None, offloaded: bool) -> None:
        if dtype is not None:  # transformers keeps the file's dtype for weights that are not packed
            for weight in model.parameters():
                if weight.is_floating_point():
                    weight.data = weight.data.to(dtype)
        # For a CPU, bitsandbytes repacks weights at their first use. A weight that moves between memories must keep its
        # layout, because it is read on another device or from a buffer. The CPU code of bitsandbytes rounds inputs to
        # bfloat16, which is wrong for float32 models.
        for module in model.modules() if offloaded or model.dtype == torch.float32 else ():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False

    def tensor_locations(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        state = getattr(weight, "quant_state", None)
        return None if state is None else iter((TensorLocation(weight, "data"), *self._locations_in(state)))

    def _locations_in(self, state: Any) -> Iterator[TensorLocation]:
        for name, value in vars(state).items():
            if isinstance(value, torch.Tensor):
                yield TensorLocation(state, name)
            elif hasattr(value, "absmax"):  # nested quantisation: the scales are packed as well
                yield from self._locations_in(value)


class TorchAO(LinearBackend):
    """Weight format of torchao. Its tensors record the device that they are on, so layers cannot be streamed."""

    method = "torchao"

    def tensor_locations(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        return self._inner(weight) if hasattr(weight, "__tensor_flatten__") else None

    def _inner(self, weight: Any) -> Iterator[TensorLocation]:
        for name in weight.__tensor_flatten__()[0]:
            inner = getattr(weight, name)
            yield from self._inner(inner) if hasattr(inner, "__tensor_flatten__") else (TensorLocation(weight, name),)


class MXFP4(LinearBackend):
    """Weight format MXFP4 (gpt-oss), used with `quantize="none"`. On a CPU, transformers dequantises the weights."""

    method = "mxfp4"

    def stays_packed(self, device: torch.device) -> bool:
        return device.type != "cpu"
