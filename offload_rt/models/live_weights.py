"""Detect in-place changes to the weights of a model in use, for example by an optimizer or a LoRA merge."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ModelError
from .packed import packing_of, tensors_of

SAMPLES = 16
"""Maximum number of compared elements per weight. Changes through `.data`, which PEFT uses to merge adapters, do not
increase a tensor's version counter, but they change the whole matrix."""


class LiveWeights:
    """Weights of a model that the caller owns and may change between requests."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._changes = 0
        self._seen = self._state()

    def changes(self) -> int:
        """Return the number of calls so far that found changed weights. Raises ModelError if a module was replaced."""
        if (seen := self._state()) != self._seen:
            self._seen, self._changes = seen, self._changes + 1
        return self._changes

    @torch.no_grad()
    def _state(self) -> tuple[Any, ...]:
        modules = list(self._model.modules())
        if len(modules) != len(self._modules) or any(a is not b for a, b in zip(modules, self._modules, strict=True)):
            raise ModelError(
                "a module of the model was replaced while it is in use; make another LLM of the changed model"
            )
        weights = list(self._model.parameters())
        if packing_of(self._model) is not None:  # some formats keep packed numbers in buffers
            weights += self._model.buffers()
        held = [tensor for weight in weights for tensor in tensors_of(weight)]
        places = [(each.data_ptr(), 0 if each.is_inference() else each._version) for each in held]
        samples = [_sample(each.detach()) for each in held]
        return places, torch.cat(samples).cpu().numpy().tobytes()  # one copy to the host


def _sample(weight: torch.Tensor) -> torch.Tensor:
    """Return the bytes of up to `SAMPLES` elements spread over the tensor."""
    rows = weight.reshape(1, -1) if weight.dim() < 2 else weight
    step_down, step_right = (max(1, -(-length // 4)) for length in (len(rows), rows.shape[-1]))
    return rows[::step_down, ..., ::step_right].reshape(-1)[:SAMPLES].contiguous().view(torch.uint8)
