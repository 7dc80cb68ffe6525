"""Load a transformers model, its configuration and its tokenizer from a checkpoint.

Weights come from safetensors or a GGUF file, and incomplete checkpoints are refused. Code of a checkpoint runs only if
this was requested. Errors of transformers are converted to ModelError. GGUF weights are dequantised by transformers.
Packed weights in safetensors stay packed; transformers provides the modules that compute with them.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch

from ..config import DType
from ..errors import ConfigError, MemoryLimitError, ModelError, OffloadError
from ..kernels import row_products
from ..kernels.native import has_tiles
from ..utils.config_fields import check_choice
from .location import Location
from .packed import cast_numbers, packing
from .text_part import is_multimodal, is_of, other_parts, text_config, text_only

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MERGE = (
    "merge it into its weights: pass what peft.PeftModel.from_pretrained(model, ADAPTER).merge_and_unload() returns, "
    "or save that and name its folder"
)
"""Advice for PEFT adapters, for error messages."""

MULTIMODAL = "it takes more than text, and this version of transformers has no class of which the text part could run"
"""Reason in the error for an unsupported multimodal checkpoint."""

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "sentencepiece.*", "tekken.json")


def read_config(location: Location, supported: Collection[str]) -> PreTrainedConfig:
    """Return the configuration of a checkpoint, or the one in the header of a GGUF file.

    Raises:
        ModelError: The configuration is missing or damaged, or its architecture is neither in `supported` nor a causal
            language model of transformers (multimodal ones included).
    """
    from transformers import AutoConfig, PreTrainedConfig

    if location.gguf is not None:
        return _read_gguf_config(location, supported)
    place, folder = location.place, location.folder
    if folder is not None and not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise ModelError(f"{location} is a PEFT adapter, and no model; {MERGE}", reason="peft")
        hint = "a model folder holds config.json and *.safetensors, or one GGUF file"
        raise ModelError(f"{location} has no config.json; {hint}")
    options, trusted = location.hub.options, location.hub.trust_remote_code
    with one_error(f"cannot read the configuration of {location}"):
        raw = dict(PreTrainedConfig.get_config_dict(place, **options)[0])
    architecture = next(iter(raw.get("architectures") or ()), None) or f"model type {raw.get('model_type')!r}"
    own_code = trusted and "AutoModelForCausalLM" in (raw.get("auto_map") or {})
    if architecture not in supported and architecture not in _names_of_classes() and not own_code:
        more = "text_config" in raw
        why, reason = (MULTIMODAL, "multimodal") if more else ("", "architecture")
        raise ModelError(unsupported(architecture, supported, why), reason=reason)
    with one_error(f"the configuration of {location} is not valid"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(place, **options)
    if not own_code and architecture not in [kind.__name__ for kind in _classes_of(config)]:
        raise ModelError(f"{location} contradicts itself: {architecture}, but model type {config.model_type!r}")
    return config


def _read_gguf_config(location: Location, supported: Collection[str]) -> PreTrainedConfig:
    """Return the configuration in the header of a GGUF file. Raise ModelError also if the package gguf is missing."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{location} needs the package gguf to be read: pip install 'offload-rt[gguf]'")
    with one_error(f"cannot read the configuration of {location}"), _quiet():
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            location.place, gguf_file=location.gguf, **location.hub.options
        )
    if config.model_type not in CLASSES:
        raise ModelError(unsupported(f"model type {config.model_type!r}", supported))
    return config


def architecture_of(config: PreTrainedConfig) -> str:
    """Return the name of the class that transformers builds from a configuration."""
    named = next(iter(config.architectures or ()), None)  # maybe a class of the checkpoint's own code
    found = [kind.__name__ for kind in _classes_of(config)]
    return str(named if named in found or not found else found[0])


def _classes_of(config: PreTrainedConfig) -> list[type[Any]]:
    """Return the language model classes registered for this type of configuration, including multimodal ones."""
    from transformers.models.auto import modeling_auto as auto

    mappings: tuple[Any, ...] = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    return [mapping[type(config)] for mapping in mappings if type(config) in mapping]


def _names_of_classes() -> set[str]:
    """Return the names of all language model classes of transformers, including multimodal ones."""
    from transformers.models.auto import modeling_auto as auto

    return {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()}


def _text_part(config: PreTrainedConfig) -> Any:
    """Return the class of the language model of a multimodal model, or None for other models."""
    if not is_multimodal(config):
        return None
    named = [kind for kind in _classes_of(config) if kind.__name__ == architecture_of(config)]
    return next((text_only(kind) for kind in named if kind.config_class is type(config)), None)


def unsupported(architecture: str, supported: Collection[str], why: str = "") -> str:
    """Return the error message for an unsupported `architecture`."""
    return f"{architecture} is not supported{why and f': {why}'}; supported are {', '.join(supported)}"


def read_weights(
    location: Location, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype | None
) -> PreTrainedModel:
    """Load the model of a checkpoint onto `device`, in eval mode and without gradients.

    Unused weights are named in a warning. If `dtype` is None, the dtype of the weights is kept.

    Raises:
        ModelError: A weight is missing, damaged or has the wrong shape. (transformers would initialise it randomly.)
        MemoryLimitError: The device does not have enough memory.
    """
    from transformers import AutoModelForCausalLM

    if location.gguf is None:
        _check_weight_files(location)
    method = packing(config)
    needs = f" ({method} has packed them; from_pretrained itself says which kernel or package is missing)"
    with one_error(f"cannot load the weights of {location}{needs if method else ''}"), _quiet():
        loader: Any = _text_part(config) or AutoModelForCausalLM
        model, report = loader.from_pretrained(
            location.place,
            config=config,
            dtype=dtype or "auto",
            device_map=_device_map(config, device),
            **location.hub.options,
            ignore_mismatched_sizes=True,  # reported below, with the others
            output_loading_info=True,
            **_format_options(location),
        )
    absent = sorted(report["missing_keys"])
    shapes = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    for what, keys in (("lacks", absent), ("has another shape for", shapes)):
        if keys:
            raise ModelError(f"the checkpoint {location} {what} {_some(keys)}; it is not a complete model")
    others = other_parts(model)
    unused = sorted(key for key in report["unexpected_keys"] if not any(is_of(part, key) for part in others))
    if unused:
        warnings.warn(f"{location}: unused weights {_some(unused)}", stacklevel=3)
    if others:
        warnings.warn(f"{location}: its text part runs; pictures and sound are not read", stacklevel=3)
    if location.gguf is not None and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # of the file: the weights are numbers now
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    cast_numbers(loaded, dtype)
    return loaded


def _device_map(config: PreTrainedConfig, device: torch.device) -> Any:
    """Return the `device_map` that loads all weights onto `device`."""
    # Without a map, transformers puts packed weights on a CUDA device even if they must stay in host memory.
    if device.type != "cpu":
        return device
    return None if packing(config) is None else {"": "cpu"}


def _format_options(location: Location) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for the format of the weights."""
    if location.gguf is None:
        return {"use_safetensors": True}
    import transformers

    # Older versions of transformers have no GgufConfig and always dequantise.
    options = getattr(transformers, "GgufConfig", None)
    dequantised = {} if options is None else {"quantization_config": options(dequantize=True)}
    return {"gguf_file": location.gguf, **dequantised}


def build_skeleton(location: Location, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a checkpoint on the meta device, without weights.

    Raises:
        ModelError: The configuration is not valid.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = copy.deepcopy(config)  # transformers and `reach` write into it
    with one_error(f"the configuration of {location} is not valid"), init_empty_weights(include_buffers=True):
        kind = _text_part(config)
        if kind is not None:
            part: PreTrainedModel = kind._from_config(config, dtype=dtype)
            return part
        skeleton: PreTrainedModel = auto.from_config(
            config, dtype=dtype, trust_remote_code=location.hub.trust_remote_code
        )
    return skeleton


def _check_weight_files(location: Location) -> None:
    """Raise ModelError if the checkpoint is a folder without safetensors files."""
    folder = location.folder
    if folder is None or any(folder.glob("*.safetensors")):
        return
    pickled = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    what = "only pickled weights, which can run code and are never loaded" if pickled else "no weights"
    raise ModelError(f"{location} has {what}; expected *.safetensors, as save_pretrained writes them")


def read_tokenizer(location: Location) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a checkpoint with its chat template, or None if the folder has none.

    Raises:
        ModelError: The tokenizer is damaged.
    """
    from transformers import AutoTokenizer

    folder, gguf = location.folder, location.gguf
    if gguf is None and folder is not None and not any(any(folder.glob(each)) for each in _TOKENIZER_FILES):
        return None
    of_file = {} if gguf is None else {"gguf_file": gguf}
    with one_error(f"cannot load the tokenizer of {location}; pass tokenizer="):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            location.place, **location.hub.options, **of_file
        )
    return tokenizer


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device; "auto" is CUDA if available, else the CPU. Raise ConfigError for a missing device."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is no device; use auto, cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"device={str(device)!r} is not supported: host memory is page-locked through CUDA's runtime (or ROCm's, "
            "which torch calls cuda), and kernels read it there; use auto, cpu, cuda or cuda:N"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={str(device)!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def resolve_dtype(
    dtype: str | torch.dtype, location: Location, config: PreTrainedConfig, device: torch.device
) -> torch.dtype | None:
    """Return the dtype, or None for that of the weights if the configuration does not state one.

    "auto" is the checkpoint's dtype on CUDA (bfloat16 for GGUF files). On a CPU it is bfloat16 for half-precision
    checkpoints, because decoding is bound by reading weights, and at least float32 for others. Without compiled code it
    is float32, because torch alone is slow in half precision. Models in the package are always computed in float32 on a
    CPU, so that their results are the same on every machine. Raises ConfigError for an unknown name.
    """
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, get_args(DType))
    if name != "auto":
        named: torch.dtype = getattr(torch, name)
        return named
    own: Any = config.dtype or text_config(config).dtype  # a torch.dtype or None, once loaded
    stated: torch.dtype | None = torch.bfloat16 if location.gguf is not None else own
    if device.type != "cpu":
        return stated
    if stated in (torch.bfloat16, torch.float16) and computes_bfloat16() and not location.shipped:
        return torch.bfloat16
    return torch.promote_types(stated or torch.float32, torch.float32)


def computes_bfloat16() -> bool:
    """Return whether bfloat16 models are fast on this CPU: there is compiled code, or torch has instructions for it."""
    return row_products.takes(torch.empty(32, 32, dtype=torch.bfloat16)) is not None or has_tiles()


@contextmanager
def one_error(what: str) -> Iterator[None]:
    """Convert all errors except this package's own into a ModelError that begins with `what`."""
    try:
        yield
    except OffloadError:
        raise
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(f"{what}: the device has no room for it ({_one_line(error)})") from error
    except Exception as error:  # damaged files fail in too many ways to list
        raise ModelError(f"{what}: {_one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' report of missing weights, and the GGUF progress bar if progress bars are disabled."""
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
    """Return the message on one line of at most 300 characters, with the error type if it is a single word."""
    text = " ".join(str(error).split())
    return text[:300] if " " in text else f"{type(error).__name__} {text}"


def _some(keys: list[str]) -> str:
    """Return up to three of `keys` and the number of the others."""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more
