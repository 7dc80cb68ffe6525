"""Weight formats that transformers' quantisers load and compute: bitsandbytes, torchao and MXFP4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .backend import LinearBackend, TensorLocation, quantization_option


class BitsAndBytes(LinearBackend):
    """4-bit and 8-bit weights of bitsandbytes."""

    method = "bitsandbytes"

    def can_stream(self, config: Any) -> bool:
        return bool(quantization_option(config, "load_in_4bit"))  # modules hold a second copy of int8 weights

    def prepare(self, model: Any, dtype: torch.dtype | None, moved: bool) -> None:
        if dtype is not None:  # transformers loads weights that are not packed in the dtype of the file
            for weight in model.parameters():
                if weight.is_floating_point():
                    weight.data = weight.data.to(dtype)
        # bitsandbytes repacks weights for a CPU at their first use. A weight that moves is read on another device or
        # from a buffer, so it must keep its layout. Its CPU code rounds inputs to bfloat16, which is wrong for float32.
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
            elif hasattr(value, "absmax"):  # scales that are packed themselves
                yield from self._places_in(value)


class TorchAO(LinearBackend):
    """Tensor subclasses of torchao. They store their own device, so they cannot be streamed."""

    method = "torchao"

    def places(self, weight: torch.Tensor) -> Iterator[TensorLocation] | None:
        return self._inner(weight) if hasattr(weight, "__tensor_flatten__") else None

    def _inner(self, weight: Any) -> Iterator[TensorLocation]:
        for name in weight.__tensor_flatten__()[0]:
            inner = getattr(weight, name)
            yield from self._inner(inner) if hasattr(inner, "__tensor_flatten__") else (TensorLocation(weight, name),)


class MXFP4(LinearBackend):
    """MXFP4 weights (gpt-oss). transformers has no kernel for CPUs and dequantises them there."""

    method = "mxfp4"

    def stays_packed(self, device: torch.device) -> bool:
        return device.type != "cpu"
