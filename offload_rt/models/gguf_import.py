"""Convert a GGUF file to a packed checkpoint, once, in the cache folder."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..kernels.packed_format import PackedFormat
from ..utils.progress import Progress
from .checkpoint import architecture_of, build_skeleton, one_error, read_config, read_tokenizer, require_gguf
from .fingerprint import cache_folder, file_identity
from .gguf_blocks import can_pack, packed_format, packed_rows
from .gguf_header import check_complete
from .linear.packed import can_hold_packed
from .packed_checkpoint import cached_folder, write_checkpoint
from .source import ModelSource

if TYPE_CHECKING:
    from gguf import ReaderTensor
    from transformers import PreTrainedModel

_VERSION = 1
_log = logging.getLogger(__name__)


def packed_source(source: ModelSource) -> ModelSource:
    """Return the packed checkpoint made from a GGUF file, or `source` if its architecture cannot stay packed.

    The first call for a file converts it, at about 10 seconds per GB. Later calls find the result in the cache folder.

    Raises:
        ModelError: The file is damaged, or its model is not supported.
    """
    assert source.gguf is not None
    path = _local_path(source)
    key = hashlib.sha256(repr((_VERSION, version("transformers"), file_identity(path))).encode()).hexdigest()[:32]
    home = cache_folder() / "packed"
    refused = home / f"{key}.refused"  # so that later starts do not try again
    if refused.exists():
        return source
    try:
        folder = cached_folder(home / key, functools.partial(_convert, source=source, path=path))
    except CannotPackError as error:
        _log.info("the weights of %s are dequantised: %s", path.name, error)
        refused.touch()
        return source
    except OSError as error:
        _log.warning("the weights of %s are dequantised, because they cannot be cached: %s", path.name, error)
        return source
    return replace(source, place=str(folder), gguf=None)


class CannotPackError(Exception):
    """The weights cannot stay packed: no type is supported, or transformers does more than permute rows."""


def _local_path(source: ModelSource) -> Path:
    """Return the path of the file, downloaded if it is on the hub."""
    assert source.gguf is not None
    if source.folder is not None:
        return source.folder / source.gguf
    from transformers.utils.hub import cached_file

    options = {name: value for name, value in source.hub.options.items() if name != "trust_remote_code"}
    with one_error(f"cannot download {source}"):
        return Path(str(cached_file(source.place, source.gguf, **options)))


def _convert(folder: Path, *, source: ModelSource, path: Path) -> None:
    """Write the packed checkpoint of a file to `folder`."""
    from transformers.utils import logging as transformers_logging

    logging_: Any = transformers_logging
    require_gguf(source)
    if not any(map(can_pack, check_complete(path))):
        raise CannotPackError("none of its tensors has a supported packed type")
    with _one_reader() as reader_of:
        config = read_config(source)
        tokenizer = read_tokenizer(source)
        with one_error(f"cannot read {source}"):
            reader = reader_of(str(path))
    skeleton = build_skeleton(source, config, torch.bfloat16)
    names, processor = _tensor_names(skeleton, reader)
    tensors: dict[str, torch.Tensor] = {}
    formats: dict[str, PackedFormat] = {}
    with Progress(enabled=logging_.is_progress_bar_enabled()).items("Packing weights", len(reader.tensors)) as advance:
        for tensor in reader.tensors:
            name = names.get(tensor.name)
            if name is not None:
                with one_error(f"cannot read tensor {tensor.name} of {source}"):
                    module = name.removesuffix(".weight")
                    found = _packed(tensor, skeleton.get_submodule(name.rpartition(".")[0]), processor)
                    dense = _dense(tensor, processor) if found is None else None
                if found is not None:
                    tensors[module], formats[module] = found
                elif dense is not None:
                    tensors[name] = dense
                else:
                    raise CannotPackError(f"transformers converts the tensor {tensor.name}")
            advance()
    config.dtype, config.architectures = torch.bfloat16, [architecture_of(config)]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    write_checkpoint(folder, config, tensors, formats)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def _one_reader() -> Iterator[Any]:
    """Let transformers' loaders of configuration, tokenizer and weights share one reader of a file.

    Yields a function that returns the reader of a path.
    """
    import gguf

    module: Any = gguf
    own = module.GGUFReader
    reader_of = functools.cache(lambda path, mode="r": own(path, mode))
    module.GGUFReader = lambda path, mode="r": reader_of(str(path), mode)
    try:
        yield reader_of
    finally:
        module.GGUFReader = own


def _tensor_names(skeleton: PreTrainedModel, reader: Any) -> tuple[dict[str, str], Any]:
    """Return the transformers name of each tensor in the file, and transformers' tensor processor."""
    from transformers import modeling_gguf_pytorch_utils

    loader: Any = modeling_gguf_pytorch_utils
    architecture = loader.read_field(reader, "general.architecture")[0]
    processor = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)(config=skeleton.config.to_dict())
    try:
        names = loader.get_gguf_hf_weights_map(skeleton, processor)
    except NotImplementedError as error:
        raise CannotPackError(str(error)) from error
    known = {each.name for each in reader.tensors} & names.keys()
    parameters = {name for name, _ in skeleton.named_parameters()}
    if not {names[name] for name in known} >= parameters:
        raise CannotPackError("a weight of the model is split into several tensors")
    return {name: names[name] for name in known}, processor


def _packed(tensor: ReaderTensor, module: nn.Module, processor: Any) -> tuple[torch.Tensor, PackedFormat] | None:
    """Return packed rows and their format, or None if this tensor must be dequantised."""
    if not can_hold_packed(module) or not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
        return None
    ins, outs = map(int, tensor.shape)
    form = packed_format(tensor.tensor_type.name, ins)
    if form is None:
        return None
    # The rows of some architectures are permuted in GGUF files. Converting numbered rows shows the permutation.
    numbers = np.arange(outs, dtype=np.float64)[:, None] + np.array([0, 0.5])
    try:
        result = processor.process(
            weights=numbers, name=tensor.name, tensor_key_mapping=None, parsed_parameters={"tensors": {}}
        )
    except (KeyError, IndexError, ValueError):  # it changes more than the order of rows
        return None
    if result.name != tensor.name or np.shape(result.weights) != numbers.shape:
        return None
    order, second = np.asarray(result.weights).T
    if not (np.array_equal(np.sort(order), numbers[:, 0]) and np.array_equal(second, order + 0.5)):
        return None
    data = torch.from_numpy(np.array(tensor.data.reshape(outs, -1)))
    rows = packed_rows(data, tensor.tensor_type.name, form)
    if rows is None:
        return None
    return (rows if np.array_equal(order, numbers[:, 0]) else rows[torch.from_numpy(order.astype(np.int64))]), form


def _dense(tensor: ReaderTensor, processor: Any) -> torch.Tensor | None:
    """Return the dequantised tensor in float32, as transformers computes it, or None if transformers
    stores it under another name or in several parts."""
    from gguf import dequantize

    weights = dequantize(tensor.data, tensor.tensor_type)
    result = processor.process(
        weights=weights, name=tensor.name, tensor_key_mapping=None, parsed_parameters={"tensors": {}}
    )
    if result.name != tensor.name:
        return None
    return torch.from_numpy(np.array(result.weights, dtype=np.float32))
