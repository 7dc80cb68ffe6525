"""The interface of a weight format: how linear layers store their weights, and how they compute with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class TensorLocation:
    """Location of a plain tensor that is part of a weight: the attribute `name` of `holder`."""

    holder: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.holder, self.name)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        setattr(self.holder, self.name, tensor)


def quantization_option(config: Any, name: str) -> Any:
    """Return an entry of `config.quantization_config` (a dictionary before loading, an object afterwards), or None."""
    given = getattr(config, "quantization_config", None)
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


class BackendLinear(nn.Linear):
    """Linear layer that a `LinearBackend` computes. Existing layers get this class in place."""

    backend: LinearBackend

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.backend.linear(self, input)


class LinearBackend:
    """A format of the weights of linear layers. This base class stands for plain weights, computed by torch.

    To add a format, override the differing methods in one file, and add an instance to `BACKENDS`. A format that
    computes its own products overrides `takes`, `pack` and `linear`. All its tensors must be parameters of the layer,
    because sizes, placement, streaming and fingerprints cover all parameters. A format that transformers loads into
    its own modules sets `method` and overrides `stays_packed`, `can_stream`, `prepare` and `places` where needed.
    """

    method = ""
    """`quant_method` in the configuration of checkpoints in this format, if any."""

    def takes(self, layer: nn.Linear, device: torch.device) -> bool:
        """Return whether this backend computes `layer`, an ordinary linear layer, on `device`."""
        return False

    def pack(self, layer: nn.Linear) -> None:
        """Convert the weight of `layer` to this format in place. On the meta device, only sizes matter."""

    def linear(self, layer: BackendLinear, x: torch.Tensor) -> torch.Tensor:
        """Return the output `[..., out]` of `layer` for x `[..., in]`."""
        return F.linear(x, layer.weight, layer.bias)

    def stays_packed(self, device: torch.device) -> bool:
        """Return whether the weights of a checkpoint stay packed, rather than being dequantised when it is loaded."""
        return True

    def can_stream(self, config: Any) -> bool:
        """Return whether the layers of a model with this configuration can be copied between memories one by one."""
        return False

    def prepare(self, model: Any, dtype: torch.dtype | None, moved: bool) -> None:
        """Adjust a model in this format after loading.

        Args:
            model: The transformers model.
            dtype: Requested dtype of the weights that are not packed. None keeps the dtype of the file.
            moved: Whether weights will move between host and device memory.
        """

    def places(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        """Return the locations of the plain tensors of `weight`, scales included; None if the format differs."""
        return None
