"""Load a transformers model, its configuration and its tokenizer from a checkpoint.

Weights come from safetensors files or a GGUF file. Incomplete checkpoints are refused. Code in a checkpoint runs only
if `trust_remote_code` is set. Errors from transformers are re-raised as ModelErrors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, get_args

import torch

from ..config import DType
from ..errors import ConfigError, MemoryLimitError, ModelError, OffloadError
from ..utils.config_fields import check_choice
from .gguf_header import fast_gguf
from .linear import backend_of, packing
from .linear.dense import computes_bfloat16
from .linear.packed import PACKED
from .multimodal import belongs_to, is_multimodal, text_config, unused_modules, without_unused
from .packed_checkpoint import read_checkpoint
from .registry import declared_class, has_remote_code, refuse_unknown, unsupported
from .source import ModelSource
from .stored_tensors import check_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def read_config(source: ModelSource) -> PreTrainedConfig:
    """Return the configuration of a checkpoint, from its config.json or the header of a GGUF file.

    Raise ModelError if the configuration is missing or damaged, or if neither this package nor transformers knows the
    architecture.
    """
    from transformers import AutoConfig, PreTrainedConfig

    source.check_files()
    source.check_reachable()
    if source.gguf is not None:
        return _read_gguf_config(source)
    options = source.hub.options
    with as_model_error(f"cannot read the configuration of {source}"):
        raw = dict(PreTrainedConfig.get_config_dict(source.name_or_path, **options)[0])
    architecture, remote = declared_class(raw), has_remote_code(raw, trusted=source.hub.trust_remote_code)
    if not remote:
        refuse_unknown(raw, _names_of_classes)
    with as_model_error(f"the configuration of {source} is not valid"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.name_or_path, **options)
    if not remote and architecture not in [kind.__name__ for kind in _classes_of(config)]:
        raise ModelError(
            f"config.json of {source} is inconsistent: architecture {architecture}, model type {config.model_type!r}"
        )
    return config


def _read_gguf_config(source: ModelSource) -> PreTrainedConfig:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    with as_model_error(f"cannot read the configuration of {source}"), _quiet(), fast_gguf():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source.name_or_path, gguf_file=source.gguf, **source.hub.options
        )
    if config.model_type not in CLASSES:
        raise unsupported(f"model type {config.model_type!r}")
    if config.model_type == "gemma4_text":
        # transformers 5.23 would use defaults instead, and the model would generate wrong text.
        raise ModelError(
            f"{source} is a GGUF file of Gemma 4, from which transformers does not read the types of layers, the "
            "layers that use earlier KV, and the soft cap; pass the checkpoint with safetensors files, and "
            "quantize='int4'",
            reason="gguf",
        )
    return config


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the name of the model class that transformers builds from a configuration."""
    declared = next(iter(config.architectures or ()), None)  # may be the name of a class in the checkpoint's own code
    names = [kind.__name__ for kind in _classes_of(config)]
    return str(declared if declared in names or not names else names[0])


def _classes_of(config: PreTrainedConfig) -> list[type[Any]]:
    from transformers.models.auto import modeling_auto as auto

    mappings: tuple[Any, ...] = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    return [mapping[type(config)] for mapping in mappings if type(config) in mapping]


def _names_of_classes() -> set[str]:
    from transformers.models.auto import modeling_auto as auto

    return {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()}


def _multimodal_class(config: PreTrainedConfig) -> Any:
    if not is_multimodal(config):
        return None
    candidates = [kind for kind in _classes_of(config) if kind.__name__ == architecture_of(config)]
    return next((without_unused(kind) for kind in candidates if kind.config_class is type(config)), None)


def read_weights(
    source: ModelSource,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    offloaded: bool = False,
) -> PreTrainedModel:
    """Load the model of a checkpoint onto `device`, in eval mode and with gradients disabled.

    If the checkpoint contains weights that the model does not use, a warning is issued.

    Args:
        dtype: Dtype of the weights. None keeps the dtype stored in the file.
        offloaded: Whether weights will later be copied between host and device memory.

    Raises:
        ModelError: A weight is missing, damaged or has the wrong shape.
        MemoryLimitError: The device does not have enough memory.
    """
    from transformers import AutoModelForCausalLM

    check_weights(source)
    method = packing(config)
    if method == PACKED.method:
        if source.folder is None:
            raise ModelError(f"{source} has packed weights, which are only read from a folder: download it first")
        with as_model_error(f"cannot load the weights of {source}"):
            compute_dtype = dtype or torch.bfloat16
            return read_checkpoint(source.folder, config, compute_dtype, device, source.hub.trust_remote_code)
    # Without a device map, transformers puts packed weights on a CUDA device even if they must stay in host memory.
    device_map = None if method is None else {"": "cpu"}
    hint = f" (packed by {method}; call transformers' from_pretrained to see which kernel or package is missing)"
    reader = nullcontext() if source.gguf is None else fast_gguf()
    with as_model_error(f"cannot load the weights of {source}{hint if method else ''}"), _quiet(), reader:
        loader: Any = _multimodal_class(config) or AutoModelForCausalLM
        model, report = loader.from_pretrained(
            source.name_or_path,
            config=config,
            dtype=dtype or "auto",
            device_map=device_map if device.type == "cpu" else device,
            **source.hub.options,
            ignore_mismatched_sizes=True,  # reported below, together with missing weights
            output_loading_info=True,
            **_format_options(source),
        )
    _check_report(source, model, report)
    if source.gguf is not None and hasattr(model.config, "quantization_config"):
        # The configuration describes the file, but these weights have been dequantised.
        del model.config.quantization_config
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    if (backend := backend_of(loaded.config)) is not None:
        backend.prepare(loaded, dtype, offloaded)
    return loaded


def _check_report(source: ModelSource, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    missing = sorted(report["missing_keys"])
    shapes = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    for problem, keys in (("lacks", missing), ("has another shape for", shapes)):
        if keys:
            raise ModelError(f"the checkpoint {source} {problem} {_list_some(keys)}; it is not a complete model")
    modules = unused_modules(model)
    unused = sorted(key for key in report["unexpected_keys"] if not any(belongs_to(module, key) for module in modules))
    if unused:
        warnings.warn(f"{source}: unused weights {_list_some(unused)}", stacklevel=4)
    if modules:
        warnings.warn(f"{source}: only the language model is loaded; images and audio are not supported", stacklevel=4)


def _format_options(source: ModelSource) -> dict[str, Any]:
    if source.gguf is None:
        return {"use_safetensors": True}
    import transformers

    # Older versions of transformers have no GgufConfig and always dequantise.
    options = getattr(transformers, "GgufConfig", None)
    dequantised = {} if options is None else {"quantization_config": options(dequantize=True)}
    return {"gguf_file": source.gguf, **dequantised}


def build_skeleton(source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a checkpoint on the meta device. Raise ModelError if the configuration is invalid."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = copy.deepcopy(config)  # transformers and `fix_rope_scaling` modify the configuration
    with as_model_error(f"the configuration of {source} is not valid"), init_empty_weights(include_buffers=True):
        kind = _multimodal_class(config)
        skeleton: PreTrainedModel = (
            auto.from_config(config, dtype=dtype, trust_remote_code=source.hub.trust_remote_code)
            if kind is None
            else kind._from_config(config, dtype=dtype)
        )
    return skeleton


def read_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a checkpoint, or None if the folder has none. Raise ModelError if it is damaged."""
    from transformers import AutoTokenizer

    if not source.has_tokenizer:
        return None
    source.check_tokenizer()
    gguf_options, reader = ({}, nullcontext()) if source.gguf is None else ({"gguf_file": source.gguf}, fast_gguf())
    with as_model_error(f"cannot load the tokenizer of {source}; pass tokenizer="), reader:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name_or_path, **source.hub.options, **gguf_options
        )
    return tokenizer


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the torch device. "auto" prefers CUDA. Raise ConfigError if the device does not exist."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a device; use auto, cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device={str(device)!r} is not supported, because kernels read host memory that is page-locked through "
            "CUDA (or ROCm, which torch calls cuda); use auto, cpu, cuda or cuda:N"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={str(device)!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def declared_dtype(source: ModelSource, config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype that the configuration declares, or None if it declares none.

    For GGUF files, return bfloat16.
    """
    declared: Any = config.dtype or text_config(config).dtype  # a torch.dtype, as transformers has read it
    return torch.bfloat16 if source.gguf is not None else declared


def resolve_dtype(
    dtype: str | torch.dtype, source: ModelSource, checkpoint_dtype: torch.dtype | None, device: torch.device
) -> torch.dtype | None:
    """Return the torch dtype that `dtype` names, or None to keep the dtype of the weights.

    Raise ConfigError for other names.

    On CUDA, "auto" means the checkpoint's dtype. On a CPU, it means bfloat16 if the checkpoint has half precision and
    the CPU computes bfloat16 fast. Otherwise, it means float32 or wider.
    """
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, get_args(DType))
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type != "cpu":
        return checkpoint_dtype
    # bfloat16 halves the time to read the weights. Shipped models use float32, which gives the same results on every
    # machine.
    if checkpoint_dtype in (torch.bfloat16, torch.float16) and computes_bfloat16() and not source.shipped:
        return torch.bfloat16
    return torch.promote_types(checkpoint_dtype or torch.float32, torch.float32)


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Convert errors raised in the `with` block to a ModelError whose message begins with `what`.

    Errors of this package are not converted. Out-of-memory errors of the device become MemoryLimitError.
    """
    try:
        yield
    except OffloadError:
        raise
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(f"{what}: the device does not have enough memory ({_one_line(error)})") from error
    except Exception as error:  # Damaged files raise too many types of errors to list them.
        raise ModelError(f"{what}: {_one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    reader: Any = modeling_gguf_pytorch_utils
    verbosity, bar = logging.get_verbosity(), reader.tqdm
    logging.set_verbosity_error()
    reader.tqdm = logging.tqdm
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        reader.tqdm = bar


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] if " " in text else f"{type(error).__name__} {text}"  # one word does not explain the error


def _list_some(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more
