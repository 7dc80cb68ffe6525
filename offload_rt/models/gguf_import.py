"""Conversion of a GGUF file to a packed checkpoint."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.packed_format import PackedFormat
from ..utils.progress import Progress
from .checkpoint import architecture_of, as_model_error, build_skeleton, read_config, read_tokenizer
from .gguf_blocks import can_pack, packed_format, packed_rows
from .gguf_header import GGUFHeader, GGUFTensor, fast_gguf, read_header, require_gguf
from .linear.packed import can_use_packed_weights
from .packed_checkpoint import CannotPackError, write_checkpoint
from .source import ModelSource
from .weights import decoder_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Order = npt.NDArray[np.int64]
"""Row order: row i of a weight in transformers is row `order[i]` of the tensor in the file."""


@dataclass(frozen=True)
class GGUFImport:
    source: ModelSource
    interleaved: bool  # whether to interleave packed rows

    @functools.cached_property
    def path(self) -> Path:
        assert self.source.gguf is not None
        if self.source.folder is not None:
            return self.source.folder / self.source.gguf
        from transformers.utils.hub import cached_file

        options = {name: value for name, value in self.source.hub.options.items() if name != "trust_remote_code"}
        with as_model_error(f"cannot download {self.source}"):
            return Path(str(cached_file(self.source.name_or_path, self.source.gguf, **options)))

    def files(self) -> list[Path]:
        require_gguf(self.source)
        return [self.path]

    def formats(self, skeleton: PreTrainedModel) -> dict[str, PackedFormat]:
        tensors = _TensorMap(skeleton, read_header(self.path))
        packings = {name: tensors.format_and_order(tensor, name) for name, tensor in tensors.by_weight.items()}
        return {name.removesuffix(".weight"): packing[0] for name, packing in packings.items() if packing is not None}

    def write(self, folder: Path) -> None:
        from transformers.utils import logging as transformers_logging

        logging: Any = transformers_logging
        source, header = self.source, read_header(self.path)
        config, tokenizer = read_config(source), read_tokenizer(source)
        tensor_map = _TensorMap(build_skeleton(source, config, torch.bfloat16), header)
        tensors: dict[str, torch.Tensor] = {}
        formats: dict[str, PackedFormat] = {}
        progress = Progress(enabled=logging.is_progress_bar_enabled())
        with progress.items("Packing weights", len(tensor_map.by_weight)) as advance:
            for name, tensor in tensor_map.by_weight.items():
                with as_model_error(f"cannot read tensor {tensor.name} of {source}"):
                    module, packed = name.removesuffix(".weight"), tensor_map.packed(tensor, name)
                    if packed is not None:
                        tensors[f"{module}.packed"], formats[module] = packed
                    else:
                        tensors[name] = tensor_map.dense(tensor)
                advance()
        config.dtype, config.architectures = torch.bfloat16, [architecture_of(config)]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        write_checkpoint(folder, config, tensors, formats, interleaved=self.interleaved)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


class _TensorMap:
    """Maps the weights of a transformers model to the tensors of a GGUF file.

    Attributes:
        by_weight: Maps the name of each weight in transformers to its tensor in the file.
    """

    def __init__(self, skeleton: PreTrainedModel, header: GGUFHeader) -> None:
        """Raise CannotPackError if no tensor can stay packed, or if transformers merges several tensors into one
        weight.
        """
        from transformers import modeling_gguf_pytorch_utils

        loader: Any = modeling_gguf_pytorch_utils
        if not any(can_pack(tensor.kind) for tensor in header.tensors):
            raise CannotPackError("none of its tensors has a type that can stay packed")
        parts = (module for layer in decoder_layers(skeleton) for module in layer.modules())
        if not any(map(can_use_packed_weights, parts)):
            raise CannotPackError("its decoder layers have no linear layers")  # GPT-2 has Conv1D
        processor_of = loader.TENSOR_PROCESSORS.get(header.architecture, loader.TensorProcessor)
        self._skeleton, self._processor = skeleton, processor_of(config=skeleton.config.to_dict())
        try:
            with fast_gguf():
                names = loader.get_gguf_hf_weights_map(skeleton, self._processor)
        except NotImplementedError as error:
            raise CannotPackError(str(error)) from error
        self.by_weight = {names[tensor.name]: tensor for tensor in header.tensors if tensor.name in names}
        if not self.by_weight.keys() >= {name for name, _ in skeleton.named_parameters()}:
            raise CannotPackError("transformers merges several tensors of the file into one weight")

    def _process(self, tensor: GGUFTensor, weights: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Apply transformers' conversion of a tensor, such as a reordering of rows.

        Return None if it yields several weights.
        """
        result = self._processor.process(
            weights=weights, name=tensor.name, tensor_key_mapping=None, parsed_parameters={"tensors": {}}
        )
        return np.asarray(result.weights) if result.name == tensor.name else None

    def format_and_order(self, tensor: GGUFTensor, name: str) -> tuple[PackedFormat, Order] | None:
        """Return the packed format and the row order of a weight, or None if the weight cannot stay packed."""
        module = self._skeleton.get_submodule(name.rpartition(".")[0])
        if not can_use_packed_weights(module) or not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
            return None
        ins, outs = tensor.shape
        form = packed_format(tensor.kind, ins)
        if form is None:
            return None
        # GGUF files of some architectures store rows in another order. Converting a weight of row numbers reveals the
        # order.
        numbers = np.arange(outs, dtype=np.float64)[:, None] + np.array([0, 0.5])
        try:
            result = self._process(tensor, numbers)
        except (KeyError, IndexError, ValueError):  # the conversion changes more than the order of rows
            return None
        if result is None or np.shape(result) != numbers.shape:
            return None
        order, second = result.T
        if not (np.array_equal(np.sort(order), numbers[:, 0]) and np.array_equal(second, order + 0.5)):
            return None
        return form, order.astype(np.int64)

    def packed(self, tensor: GGUFTensor, name: str) -> tuple[torch.Tensor, PackedFormat] | None:
        if (packing := self.format_and_order(tensor, name)) is None:
            return None
        form, order = packing
        rows = packed_rows(torch.from_numpy(np.array(tensor.data)), tensor.kind, form)
        if rows is None:
            return None
        reordered = not np.array_equal(order, np.arange(len(order)))
        return rows[torch.from_numpy(order)] if reordered else rows, form

    def dense(self, tensor: GGUFTensor) -> torch.Tensor:
        from gguf import dequantize

        weights = self._process(tensor, dequantize(tensor.data, tensor.tensor_type))
        if weights is None:
            raise CannotPackError(f"transformers converts the tensor {tensor.name}")
        return torch.from_numpy(np.array(weights, dtype=np.float32, order="C"))  # the conversion may transpose it
