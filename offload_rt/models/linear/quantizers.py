"""Weight formats that are loaded and computed by transformers' quantisers: bitsandbytes, torchao and MXFP4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .backend import LinearBackend, TensorLocation, quantization_option


class BitsAndBytes(LinearBackend):
    """Weight format of bitsandbytes, with 4 or 8 bits."""

    method = "bitsandbytes"

    def can_stream(self, config: Any) -> bool:
        # Modules with int8 weights keep a second copy of them.
        return bool(quantization_option(config, "load_in_4bit"))

    def prepare(self, model: Any, dtype: torch.dtype | None, moved: bool) -> None:
        if dtype is not None:  # transformers keeps the file's dtype for weights that are not packed
            for weight in model.parameters():
                if weight.is_floating_point():
                    weight.data = weight.data.to(dtype)
        # For a CPU, bitsandbytes repacks weights at their first use. A weight that moves between memories must keep its
        # layout, because it is read on another device or from a buffer. The CPU code of bitsandbytes rounds inputs to
        # bfloat16, which is wrong for float32 models.
        for module in model.modules() if moved or model.dtype == torch.float32 else ():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False

    def places(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        state = getattr(weight, "quant_state", None)
        return None if state is None else iter((TensorLocation(weight, "data"), *self._places_in(state)))

    def _places_in(self, state: Any) -> Iterator[TensorLocation]:
        for name, value in vars(state).items():
            if isinstance(value, torch.Tensor):
                yield TensorLocation(state, name)
            elif hasattr(value, "absmax"):  # nested quantisation: the scales are packed as well
                yield from self._places_in(value)


class TorchAO(LinearBackend):
    """Weight format of torchao. Its tensor subclasses store their own device, so layers cannot be streamed."""

    method = "torchao"

    def places(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        return self._inner(weight) if hasattr(weight, "__tensor_flatten__") else None

    def _inner(self, weight: Any) -> Iterator[TensorLocation]:
        for name in weight.__tensor_flatten__()[0]:
            inner = getattr(weight, name)
            yield from self._inner(inner) if hasattr(inner, "__tensor_flatten__") else (TensorLocation(weight, name),)


class MXFP4(LinearBackend):
    """Weight format MXFP4 (gpt-oss). On a CPU, transformers has no kernel for it and dequantises the weights."""

    method = "mxfp4"

    def stays_packed(self, device: torch.device) -> bool:
        return device.type != "cpu"
