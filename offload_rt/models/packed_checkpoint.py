"""Checkpoint folders with packed weights: how importers write them and how they are loaded.

A folder has config.json, the tokenizer, and model.safetensors. The file is mapped into memory, so its weights are not
copied. `quantization_config` names the format of each packed weight. Each file is imported once, into the cache folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn

from ..errors import ModelError
from ..kernels.packed_format import PackedFormat
from ..utils.private_files import make_private_folder
from ..utils.units import parse_size
from .linear.packed import PACKED, hold_packed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NEW = "new-"  # prefix of folders that are not complete
WEIGHTS, DIGEST = "model.safetensors", "model.digest"
LIMIT_VARIABLE, DEFAULT_LIMIT = "OFFLOAD_RT_PACKED_LIMIT", "64GiB"
"""Environment variable with the maximum size of all cached folders. The folders used least recently are deleted."""

_SUFFIX = ".packed"
_BYTES_AT_ONCE = 1 << 24
_log = logging.getLogger(__name__)


def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    formats: Mapping[str, PackedFormat],
) -> None:
    """Write config.json and the weights of a packed checkpoint.

    Args:
        folder: An existing folder.
        config: Configuration of the model.
        tensors: Weights by name; packed ones by the name of their module.
        formats: Format of each packed weight, by the name of its module.
    """
    from safetensors.torch import save_file

    config.save_pretrained(folder)
    described = folder / "config.json"
    entries = json.loads(described.read_text())
    stated = {name: [f.bits, f.group, f.has_minima, f.offset, f.ins] for name, f in sorted(formats.items())}
    entries["quantization_config"] = {"quant_method": PACKED.method, "weights": stated}
    described.write_text(json.dumps(entries, indent=1))
    named = {f"{name}{_SUFFIX}" if name in formats else name: tensor for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS)
    (folder / DIGEST).write_text(_digest(folder / WEIGHTS))


def read_checkpoint(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """Load a packed checkpoint. Weights that are not packed get `dtype`. On a CPU, the file is mapped.

    Raises:
        ModelError: The weights are damaged or do not belong to the configuration.
    """
    from accelerate import init_empty_weights
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    damaged = f"the packed weights in '{folder}' are damaged; delete this folder to create it again"
    if not (folder / DIGEST).exists() or (folder / DIGEST).read_text() != _digest(folder / WEIGHTS):
        raise ModelError(damaged)
    auto: Any = AutoModelForCausalLM
    with init_empty_weights(include_buffers=False):
        model: Any = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    formats: dict[str, Any] = config.quantization_config["weights"]
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor, target = file.get_tensor(name), name.removesuffix(_SUFFIX)
            if target in formats:
                bits, group, has_minima, offset, ins = formats[target]
                form, module = PackedFormat(ins, bits, group, has_minima, offset), model.get_submodule(target)
                hold_packed(module, nn.Parameter(tensor, requires_grad=False), form, dtype)
            else:
                owner, _, own = name.rpartition(".")
                holder = model.get_submodule(owner)
                value = tensor.to(dtype) if tensor.is_floating_point() else tensor
                if own in dict(holder.named_parameters(recurse=False)):
                    value = nn.Parameter(value, requires_grad=False)
                setattr(holder, own, value)
    _tie(model, dtype)
    if absent := sorted(name for name, weight in model.named_parameters() if weight.is_meta):
        raise ModelError(f"{damaged} (it lacks {', '.join(absent[:3])})")
    loaded: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return loaded


def _tie(model: Any, dtype: torch.dtype) -> None:
    """Let a tied head compute from the weight of the embedding."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not any(weight.is_meta for weight in head.parameters()):
        return
    packed = getattr(embedding, "packed", None)
    if packed is None:
        head.weight = embedding.weight
    else:
        hold_packed(head, packed, embedding.form, dtype)


def _digest(path: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(_BYTES_AT_ONCE)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError:
        return ""
    return digest.hexdigest()


def cached_folder(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return the cached checkpoint `folder`. If it does not exist, create it atomically with `write`.

    Raises:
        OSError: The folder cannot be written.
    """
    if (folder / DIGEST).exists():
        os.utime(folder)  # marks it as used
        return folder
    make_private_folder(folder.parent)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_NEW))
    try:
        write(temporary)
        if folder.exists() and not (folder / DIGEST).exists():  # the rest of an interrupted deletion
            shutil.rmtree(folder)
        try:
            os.replace(temporary, folder)
        except OSError:
            if not (folder / DIGEST).exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):  # another process deletes at the same time
        _limit(folder)
    return folder


def _limit(newest: Path) -> None:
    """Delete the least recently used folders until all together fit the limit. Keep `newest`."""
    limit = parse_size(os.environ.get(LIMIT_VARIABLE) or DEFAULT_LIMIT, LIMIT_VARIABLE)
    folders = (each for each in newest.parent.iterdir() if not each.name.startswith(_NEW))
    known = [each for each in folders if (each / DIGEST).exists()]
    sizes = {each: sum(file.stat().st_size for file in each.iterdir()) for each in known}
    total = sum(sizes.values())
    for each in sorted(known, key=lambda each: each.stat().st_mtime):
        if total <= limit or each == newest:
            break
        # Processes that have mapped the file can use it until they end.
        shutil.rmtree(each, ignore_errors=True)
        total -= sizes[each]
        _log.info("deleted cached packed weights %s", each)
