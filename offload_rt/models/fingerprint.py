"""Fingerprint of a model (a digest of its configuration and weights), and detection of changed weights.

The fingerprint identifies the model to which a skew artifact, a cached calibration, or stored KV belongs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn

from ..errors import ModelError
from .checkpoint_cache import CheckpointCache
from .linear import packing, packing_of, tensors_of
from .linear.packed import PACKED
from .multimodal import belongs_to, text_config, unused_modules

VERSION = 3
_BLOCK_ELEMENTS = 1 << 20

_SAMPLES = 16
"""Number of elements per weight that `WeightChangeDetector` compares.

torch's version counter does not register changes made through `.data`, such as merges of PEFT adapters. A merge changes
the whole matrix, so comparing a few elements is enough to detect it.
"""

_NEUTRAL = frozenset(
    {
        "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
        "finetuning_task", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
        "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "problem_type",
        "return_dict", "sep_token_id", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Configuration entries that cannot change results. Entries whose names begin with "_" cannot change them either."""


def fingerprint(model: Any) -> str:
    """Return the fingerprint of a loaded transformers model: a digest as 64 hexadecimal digits.

    The digest covers the class, all configuration entries except `_NEUTRAL`, and the name, shape and elements of each
    weight and stored buffer. For a multimodal model, it covers only the language model.

    The fingerprint does not depend on the device, the file layout, or the dtype, if the dtype represents the weights
    exactly. Stored KV does depend on the dtype, so its name must contain the dtype too.
    """
    digest = hashlib.sha256(f"offload-rt model {VERSION}\n{_architecture(model)}\n".encode())
    unused = unused_modules(model)
    for name, weight in sorted(_weights(model).items()):
        if not any(belongs_to(module, name) for module in unused):
            digest.update(f"{name} {tuple(weight.shape)}\n".encode())
            for tensor in _plain(model, name, weight):
                digest.update(_digest(tensor.detach()))
    return digest.hexdigest()


def _plain(model: Any, name: str, weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors of a weight. Packed rows are not interleaved, so that the digest is the same on all devices."""
    module, _, parameter = name.rpartition(".")
    form = getattr(model.get_submodule(module), "form", None) if parameter == "packed" else None
    if form is None or not form.interleaved:
        yield from tensors_of(weight)
    else:
        yield form.rows(weight) if weight.dim() == 2 else torch.stack([form.rows(matrix) for matrix in weight])


def _weights(model: Any) -> dict[str, torch.Tensor]:
    # Stored buffers, such as `layer_scalar` of Gemma 4, count as weights. In packed models, any buffer may contain
    # weights.
    buffers = dict(model.named_buffers())
    if packing_of(model) is None:
        stored = set(model.state_dict(keep_vars=True))
        buffers = {name: buffer for name, buffer in buffers.items() if name in stored}
    return {**dict(model.named_parameters()), **buffers}


def _architecture(model: nn.Module) -> str:
    config: Any = text_config(model.config)
    declared = {key: v for key, v in config.to_dict().items() if key not in _NEUTRAL and not key.startswith("_")}
    if packing_of(model) is None:  # irrelevant if the weights have been dequantised
        declared.pop("quantization_config", None)
    elif packing(config) == PACKED.method:
        for form in declared["quantization_config"]["weights"].values():
            form.pop("interleaved", None)  # depends on the device
    entries = {"architecture": type(model).__name__, "config": _canonical(declared)}
    return json.dumps(entries, sort_keys=True, default=str)


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # checkpoints write 10000 or 10000.0
        return float(value)
    return value


def _digest(weight: torch.Tensor) -> bytes:
    narrow, wide = xxhash.xxh3_128(), xxhash.xxh3_128()
    for start, block in _blocks(weight):
        rounded = block.bfloat16() if block.is_floating_point() else block
        narrow.update(_bytes(rounded))
        # If bfloat16 cannot represent a block exactly, the block is also digested in a wider dtype.
        if rounded.dtype != block.dtype and not torch.equal(rounded.to(block.dtype), block):
            single = block.float()
            exact = single if torch.equal(single.to(block.dtype), block) else block
            wide.update(start.to_bytes(8, "little"))
            wide.update(_bytes(exact))
    return narrow.digest() + wide.digest()


def _blocks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    rows = weight.reshape(1, -1) if weight.dim() < 2 else weight
    rows_per_block = max(1, _BLOCK_ELEMENTS // max(1, rows[:1].numel()))
    for start in range(0, len(rows), rows_per_block):
        yield start, rows[start : start + rows_per_block].cpu().reshape(-1)


def _bytes(block: torch.Tensor) -> memoryview:
    return block.contiguous().view(torch.uint8).numpy().data


def cached_fingerprint(model: Any, cache: CheckpointCache, *, balanced: bool = False) -> str:
    """Return the fingerprint of a model that was read from a checkpoint. `balanced`: see `key_balance.py`."""
    weights = _weights(model).items()
    arguments = {
        "version": (VERSION, "with buffers"),
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": model.config.to_dict(),
        "weights": [(name, type(weight).__name__, list(weight.shape), str(weight.dtype)) for name, weight in weights],
    } | ({"balanced": True} if balanced else {})
    return cache.lookup("fingerprints", arguments, lambda: fingerprint(model), _checked)


def _checked(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ValueError("it is not a fingerprint")
    return text


class WeightChangeDetector:
    """Detects changes to the weights of a loaded model, for example by an optimizer or a LoRA merge."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = list(model.modules())
        self._changes = 0
        self._last_state = self._state()

    def changes(self) -> int:
        """Return how many calls, including this one, have found changed weights.

        Raise ModelError if a module was replaced.
        """
        if (state := self._state()) != self._last_state:
            self._last_state, self._changes = state, self._changes + 1
        return self._changes

    @property
    def found(self) -> int:
        """Number of calls of `changes` that have found changed weights."""
        return self._changes

    @torch.no_grad()
    def _state(self) -> tuple[Any, ...]:
        modules = list(self._model.modules())
        if len(modules) != len(self._modules) or any(a is not b for a, b in zip(modules, self._modules, strict=True)):
            raise ModelError(
                "a module of the model was replaced while the model is in use; create a new LLM from the changed model"
            )
        tensors = [tensor for weight in _weights(self._model).values() for tensor in tensors_of(weight)]
        versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        samples = [_sample(tensor.detach()) for tensor in tensors]
        return versions, torch.cat(samples).cpu().numpy().tobytes()  # a single copy to the host


def _sample(weight: torch.Tensor) -> torch.Tensor:
    rows = weight.reshape(1, -1) if weight.dim() < 2 else weight
    step_down, step_right = (max(1, -(-length // 4)) for length in (len(rows), rows.shape[-1]))
    return rows[::step_down, ..., ::step_right].reshape(-1)[:_SAMPLES].contiguous().view(torch.uint8)
