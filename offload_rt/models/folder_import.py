"""Conversion of a checkpoint folder whose weights are already packed (GPTQ or AWQ, for example) to a packed
checkpoint.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ModelError
from ..kernels.packed_format import PackedFormat
from ..utils.progress import Progress
from .checkpoint import as_model_error, build_skeleton, read_tokenizer
from .importers import IMPORTERS, Importer
from .linear import packing
from .linear.packed import is_stacked
from .packed_checkpoint import CannotPackError, write_checkpoint
from .source import ModelSource
from .stored_tensors import StoredTensor, check_complete, stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_UNUSED = "rotary_emb.inv_freq"
"""A buffer of old checkpoints. It is skipped, because transformers computes it."""


@dataclass(frozen=True)
class FolderImport:
    source: ModelSource
    interleaved: bool  # whether to interleave packed rows
    config: PreTrainedConfig

    @functools.cached_property
    def _local(self) -> ModelSource:
        if self.source.folder is not None:
            return self.source
        from huggingface_hub import snapshot_download

        hub = self.source.hub
        with as_model_error(f"cannot download {self.source}"):
            folder = snapshot_download(
                self.source.name_or_path,
                revision=hub.revision,
                token=hub.token,
                cache_dir=hub.folder,
                allow_patterns=_FILES,
            )
        return replace(self.source, name_or_path=str(folder))

    def files(self) -> list[Path]:
        assert self._local.folder is not None
        return sorted(path for path in self._local.folder.iterdir() if path.is_file())

    def formats(self, skeleton: PreTrainedModel) -> dict[str, PackedFormat]:
        with self._errors():
            layers = _Layers(self.config, self.source, skeleton)
            return {name: form for name in layers.modules if (form := layers.packed_format(name)) is not None}

    def write(self, folder: Path) -> None:
        config = copy.deepcopy(self.config)
        del config.quantization_config
        source = self._local
        with self._errors():
            skeleton = build_skeleton(source, config, torch.bfloat16)
            layers = _Layers(self.config, source, skeleton)
            tensors, formats = layers.read()
        write_checkpoint(folder, config, tensors, formats, interleaved=self.interleaved)
        if (tokenizer := read_tokenizer(source)) is not None:
            tokenizer.save_pretrained(folder)
        if getattr(skeleton, "generation_config", None) is not None:
            from transformers import GenerationConfig

            if (source.folder or Path()).joinpath("generation_config.json").exists():
                GenerationConfig.from_pretrained(source.name_or_path).save_pretrained(folder)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with as_model_error(f"cannot read the packed weights of {self.source}"):
                yield
        except ModelError as error:
            if isinstance(error.__cause__, CannotPackError):
                raise ModelError(
                    f"{self.source} has packed weights ({packing(self.config)}) of a kind that is not supported: "
                    f"{error.__cause__}; quantize='none' loads them with transformers' packages"
                ) from error
            raise


class _Layers:
    """The tensors of a checkpoint, grouped by module.

    Raises CannotPackError if the checkpoint has tensors that do not exist in transformers' model.

    Attributes:
        modules: For each module, its tensors by name suffix, such as "qweight".
    """

    def __init__(self, config: Any, source: ModelSource, skeleton: PreTrainedModel) -> None:
        method = packing(config)
        assert method is not None
        self._importer: Importer = IMPORTERS[method]
        quantization = config.quantization_config
        self._options = quantization if isinstance(quantization, dict) else quantization.to_dict()
        self._importer.check(self._options)
        self._skeleton, self.modules = skeleton, defaultdict[str, dict[str, StoredTensor]](dict)
        expected = {**dict(skeleton.named_parameters(remove_duplicate=False)), **dict(skeleton.named_buffers())}
        tied = set(getattr(skeleton, "all_tied_weights_keys", {}) or ())
        for stored in stored_tensors(source):
            module, part = self._importer.split(stored.name)
            if stored.name.endswith(_UNUSED) or stored.name in tied:
                continue
            if stored.name not in expected and (
                part not in self._importer.suffixes or expected.keys().isdisjoint((module, f"{module}.weight"))
            ):
                raise CannotPackError(f"the model in transformers has no {stored.name}")
            self.modules[module][part] = stored

    def packed_format(self, name: str) -> PackedFormat | None:
        parts = self.modules[name]
        if (shape := self._shape(name)) is None or parts.keys().isdisjoint(self._importer.suffixes):
            return None
        try:
            shapes = {part: stored.shape for part, stored in parts.items()}
            return self._importer.packed_format(shapes, self._options, shape[1])
        except (KeyError, IndexError) as error:
            raise CannotPackError(f"{name} lacks {error}") from error

    def _shape(self, name: str) -> tuple[int, int] | None:
        parent, _, child = name.rpartition(".")
        experts = self._skeleton.get_submodule(parent)
        if is_stacked(experts, child):
            _, ins, outs = getattr(experts, child).shape
            return outs, ins
        module = self._skeleton.get_submodule(name)
        return (module.out_features, module.in_features) if type(module) is nn.Linear else None

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, PackedFormat]]:
        from safetensors import safe_open

        tensors: dict[str, torch.Tensor] = {}
        formats: dict[str, PackedFormat] = {}
        files = {stored.file for parts in self.modules.values() for stored in parts.values()}
        opened: dict[Path, Any] = {
            file: safe_open(check_complete(file), framework="pt") for file in files if file is not None
        }
        with Progress(enabled=True).items("Packing weights", len(self.modules)) as advance:
            for name, parts in self.modules.items():
                module_tensors = {
                    part: opened[stored.file].get_tensor(stored.name) for part, stored in parts.items() if stored.file
                }
                if (form := self.packed_format(name)) is not None:
                    layer = self._importer.pack(module_tensors, form, self._options)
                    shape = self._shape(name)
                    assert shape is not None
                    if layer.rows.shape[-2] != shape[0]:
                        raise CannotPackError(f"{name} has {layer.rows.shape[-2]} outputs instead of {shape[0]}")
                    formats[name], tensors[f"{name}.packed"] = layer.form, layer.rows
                    if layer.order is not None:
                        tensors[f"{name}.order"] = layer.order
                    module_tensors = {part: tensor for part, tensor in module_tensors.items() if part == "bias"}
                tensors |= {f"{name}.{part}": tensor for part, tensor in module_tensors.items()}
                advance()
        return tensors, formats
