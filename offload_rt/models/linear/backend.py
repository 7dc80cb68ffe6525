"""The interface of a weight format: how linear layers store their weights and how they compute with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class TensorLocation:
    """Location of a plain tensor that is part of a weight: attribute `name` of the object `holder`."""

    holder: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        found: torch.Tensor = getattr(self.holder, self.name)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        setattr(self.holder, self.name, tensor)


def quantization_option(config: Any, name: str) -> Any:
    """Return an entry of `config.quantization_config`, or None if it does not exist.

    The configuration is a dictionary before loading and an object afterwards.
    """
    given = getattr(config, "quantization_config", None)
    return given.get(name) if isinstance(given, Mapping) else getattr(given, name, None)


class BackendLinear(nn.Linear):
    """A linear layer that is computed by a `LinearBackend`. Existing layers are converted by changing their class."""

    backend: LinearBackend

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.backend.linear(self, input)


class LinearBackend:
    """A weight format of linear layers. This base class is the format of plain weights, which torch computes.

    To add a format, override the methods that differ in a new file, and add an instance to `BACKENDS`. A format that
    computes its own products overrides `takes`, `pack` and `linear`. All its tensors must be parameters of the layer,
    because sizes, placement, streaming and fingerprints cover all parameters. A format that transformers loads into its
    own modules sets `method` and overrides `stays_packed`, `can_stream`, `prepare` and `places` if needed.
    """

    method = ""
    """Value of `quant_method` in the configurations of checkpoints with this format; "" if there are none."""

    def takes(self, layer: nn.Linear, device: torch.device) -> bool:
        """Return whether this backend can compute the plain linear layer `layer` on `device`."""
        return False

    def pack(self, layer: nn.Linear) -> None:
        """Convert the weight of `layer` to this format in place.

        On the meta device, only the sizes of tensors are used.
        """

    def linear(self, layer: BackendLinear, x: torch.Tensor) -> torch.Tensor:
        """Return the output `[..., out]` of `layer` for input x `[..., in]`."""
        return F.linear(x, layer.weight, layer.bias)

    def stays_packed(self, device: torch.device) -> bool:
        """Return whether the weights of a checkpoint stay packed.

        Otherwise they are dequantised when they are loaded.
        """
        return True

    def can_stream(self, config: Any) -> bool:
        """Return whether the layers of a model can be copied one by one between host and device memory."""
        return False

    def prepare(self, model: Any, dtype: torch.dtype | None, moved: bool) -> None:
        """Adjust a model in this format after loading.

        Args:
            model: The transformers model.
            dtype: Requested dtype of the weights that are not packed. None keeps the dtype of the file.
            moved: Whether weights will move between host and device memory.
        """

    def places(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        """Return the locations of the plain tensors that `weight` consists of, including scales.

        Return None if `weight` has another format.
        """
        return None
