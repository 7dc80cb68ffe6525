"""Write and load packed checkpoints: folders with packed weights.

A folder contains config.json, the tokenizer, and model.safetensors. On a CPU, the weights are memory-mapped and not
copied. `quantization_config` in config.json states the format of each packed weight.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels.packed_format import PackedFormat, interleave
from .linear.packed import PACKED, can_use_packed_weights, is_stacked, use_packed_experts, use_packed_weights
from .packed_cache import is_intact

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WEIGHTS = "model.safetensors"

_ALIGNMENT = 64  # the size of a cache line; a vector that crosses two lines is read more slowly


class CannotPackError(Exception):
    """Raised if the weights of a checkpoint cannot stay packed, so that transformers must load it."""


def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    formats: Mapping[str, PackedFormat],
    *,
    interleaved: bool,
) -> None:
    """Write config.json and the weights of a packed checkpoint to an existing folder.

    `tensors` maps parameter names to all parameters, and `formats` maps module names to the formats of packed weights,
    whose rows are not interleaved. If `interleaved` is True, they are interleaved, also in `tensors`, so that the
    weights are not in memory twice.
    """
    config.save_pretrained(folder)
    config_path = folder / "config.json"
    entries = json.loads(config_path.read_text())
    if interleaved:
        formats = {name: form.for_cpu() for name, form in formats.items()}
        for name in formats:
            tensors[f"{name}.packed"] = interleave(tensors[f"{name}.packed"])
    weights = {name: asdict(form) for name, form in sorted(formats.items())}
    entries["quantization_config"] = {"quant_method": PACKED.method, "weights": weights}
    config_path.write_text(json.dumps(entries, indent=1))
    _save_aligned(tensors, folder / WEIGHTS)


def _save_aligned(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Save tensors so that the first one is at a multiple of `_ALIGNMENT` bytes in the file.

    If the sizes of the tensors are multiples too, so are all addresses in the mapped file.
    """
    from safetensors.torch import save_file

    save_file(tensors, path, {"padding": ""})
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    if missing := -header % _ALIGNMENT:
        save_file(tensors, path, {"padding": missing * " "})


def declared_formats(config: PreTrainedConfig) -> dict[str, PackedFormat]:
    weights: dict[str, dict[str, Any]] = config.quantization_config["weights"]
    return {name: PackedFormat(**entries) for name, entries in weights.items()}


def use_packed_formats(model: Any, formats: Mapping[str, PackedFormat], dtype: torch.dtype) -> None:
    """Replace weights of a model on the meta device with uninitialised packed weights.

    `formats` maps the names of the modules to convert to their formats.
    """
    if not formats:
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    for name, form in formats.items():
        parent, _, child = name.rpartition(".")
        if is_stacked(model.get_submodule(parent), child):
            use_packed_experts(model.get_submodule(parent), child, form)
            continue
        module = model.get_submodule(name)
        if not can_use_packed_weights(module) or module.weight.shape[1] != form.ins:
            raise ModelError(f"the packed weight {name} does not belong to the configuration")
        use_packed_weights(module, form, dtype)
    if tied and hasattr(embedding, "packed"):
        use_packed_weights(head, embedding.form, dtype)
        head.packed = embedding.packed


def read_checkpoint(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """Load a packed checkpoint. Convert weights that are not packed to `dtype`.

    Raise ModelError if the weights are damaged or do not belong to the configuration.
    """
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    damaged = f"the packed weights in '{folder}' are damaged; delete this folder to create it again"
    if not is_intact(folder):
        raise ModelError(damaged)
    auto: Any = AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model: Any = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # `init_empty_weights` replaces every parameter by a new one, so tied weights must be tied again
    model.tie_weights()
    use_packed_formats(model, declared_formats(config), dtype)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}  # where each weight is used; a tied weight has several owners
    for module in model.modules():
        for attribute, weight in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            owners.setdefault(id(weight), []).append((module, attribute))
    expected = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            if name not in expected or tensor.shape != expected[name].shape:
                raise ModelError(f"{damaged} ({name} has the shape {tuple(tensor.shape)})")
            value = tensor.to(dtype) if tensor.is_floating_point() else tensor
            if isinstance(expected[name], nn.Parameter):
                value = nn.Parameter(value, requires_grad=False)
            for module, attribute in owners[id(expected[name])]:
                setattr(module, attribute, value)
    if missing := sorted(name for name, weight in model.named_parameters() if weight.is_meta):
        raise ModelError(f"{damaged} (it lacks {', '.join(missing[:3])})")
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return loaded
