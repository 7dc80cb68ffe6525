"""Digest a model's architecture, configuration and weights.

Skew artifacts, the calibration cache and stored KV are only valid for one model. They identify it by this digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import nn

from .packed import packing_of, tensors_of
from .text_part import is_of, other_parts, text_config

VERSION = 3
_BLOCK_ELEMENTS = 1 << 20
"""Number of elements digested at a time, so that copies stay in the CPU cache."""

_NEUTRAL = frozenset(
    {
        "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
        "finetuning_task", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
        "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "problem_type",
        "return_dict", "sep_token_id", "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Configuration entries that cannot change results. Entries that begin with "_" are ignored as well."""


def fingerprint(model: Any) -> str:
    """Return the digest of a loaded transformers model as 64 hexadecimal digits.

    The digest covers the class, all configuration entries except `_NEUTRAL`, and the name, shape and elements of every
    weight. Only the text decoder of a multimodal model is covered.

    The digest does not depend on the device or the checkpoint's file layout. It does not depend on the dtype either, if
    that dtype represents the weights exactly: a bfloat16 checkpoint loaded in float32 has the same digest. Data that
    depends on the compute dtype, such as stored KV, must record that dtype in addition.
    """
    digest = hashlib.sha256(f"offload-rt model {VERSION}\n{_architecture(model)}\n".encode())
    weights = dict(model.named_parameters())
    if packing_of(model) is not None:  # some formats keep packed numbers in buffers
        weights |= dict(model.named_buffers())
    others = other_parts(model)
    for name, weight in sorted(weights.items()):
        if not any(is_of(part, name) for part in others):
            digest.update(f"{name} {tuple(weight.shape)}\n".encode())
            for tensor in tensors_of(weight):
                digest.update(_digest(tensor.detach()))
    return digest.hexdigest()


def _architecture(model: nn.Module) -> str:
    """Return the model's class and configuration as canonical JSON."""
    config: Any = text_config(model.config)
    said = {key: value for key, value in config.to_dict().items() if key not in _NEUTRAL and not key.startswith("_")}
    if packing_of(model) is None:  # irrelevant once the weights are unpacked
        said.pop("quantization_config", None)
    entries = {key: _canonical(value) for key, value in said.items()}
    entries = {key: value for key, value in entries.items() if value is not None}
    return json.dumps({"architecture": type(model).__name__, "config": entries}, sort_keys=True, default=str)


def _canonical(value: Any) -> Any:
    """Return `value` with all numbers as float (checkpoints write 10000 or 10000.0) and without None entries."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value


def _digest(weight: torch.Tensor) -> bytes:
    """Digest all elements, independent of strides and device.

    All blocks are digested as bfloat16, so that the dtype in which a checkpoint is loaded does not matter. Blocks that
    bfloat16 cannot represent exactly are digested in a wider dtype as well.
    """
    narrow, wide = xxhash.xxh3_128(), xxhash.xxh3_128()
    for start, block in _blocks(weight):
        rounded = block.bfloat16() if block.is_floating_point() else block
        narrow.update(_bytes(rounded))
        if rounded.dtype != block.dtype and not torch.equal(rounded.to(block.dtype), block):
            single = block.float()
            exact = single if torch.equal(single.to(block.dtype), block) else block
            wide.update(start.to_bytes(8, "little"))
            wide.update(_bytes(exact))
    return narrow.digest() + wide.digest()


def _blocks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the elements in order as flat CPU blocks, each with the index of its first row.

    Block boundaries depend only on the shape.
    """
    rows = weight.reshape(1, -1) if weight.dim() < 2 else weight
    at_once = max(1, _BLOCK_ELEMENTS // max(1, rows[:1].numel()))
    for start in range(0, len(rows), at_once):
        yield start, rows[start : start + at_once].cpu().reshape(-1)


def _bytes(block: torch.Tensor) -> memoryview:
    return block.contiguous().view(torch.uint8).numpy().data
