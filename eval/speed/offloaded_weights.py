"""Weight offloading of a transformers model by accelerate, the usual choice if a model does not fit on the device.

The weights stay in host memory and are copied to the device in every forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import cpu_offload, init_empty_weights


def offload_weights(model: Any, device: torch.device) -> tuple[Any, int]:
    """Copy `model` with weights in host memory and computation on `device`.

    Returns the copy and the bytes transferred to the device per forward pass. Tied parameters count once per module.
    """
    with init_empty_weights(include_buffers=False):
        twin = type(model)(model.config).requires_grad_(False).eval()
    weights = {name: weight.to("cpu", copy=True) for name, weight in model.state_dict().items()}
    crossing = sum(weight.nbytes for weight in weights.values())
    return cpu_offload(twin, execution_device=device, state_dict=weights), crossing
