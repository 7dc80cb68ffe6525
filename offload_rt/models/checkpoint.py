"""From the place of a checkpoint to a transformers model: whether it can run here, and its weights, complete or not at
all.

Weights come from safetensors or a GGUF file; code of a checkpoint runs only where that was asked for. Whatever
transformers raises leaves as one ModelError. GGUF weights are dequantised: transformers' own reader gives the
configuration, weights and tokenizer. Weights that are packed in safetensors stay so: transformers makes the modules
that compute with them.
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
"""What is to be done with an adapter."""

MULTIMODAL = "it takes more than text, and this version of transformers has no class of which the text part could run"
"""Why a multimodal checkpoint is refused before its weights are read."""

_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "sentencepiece.*", "tekken.json")


def read_config(location: Location, supported: Collection[str]) -> PreTrainedConfig:
    """The configuration of a checkpoint; of a GGUF file, from its header.

    Raises ModelError where it cannot be had, is damaged, or is of an architecture that is neither among `supported` nor
    one of transformers' causal language models, multimodal ones included.
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
    """The configuration in the header of a GGUF file. Raises what `read_config` raises, and ModelError where the
    package that reads such files is missing."""
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
    """The name of the class that transformers makes of a configuration."""
    named = next(iter(config.architectures or ()), None)  # maybe a class of the checkpoint's own code
    found = [kind.__name__ for kind in _classes_of(config)]
    return str(named if named in found or not found else found[0])


def _classes_of(config: PreTrainedConfig) -> list[type[Any]]:
    """The classes that transformers, or whoever registered one with `AutoModelForCausalLM`, has for this kind of
    configuration: of language models, and of those that take more than text."""
    from transformers.models.auto import modeling_auto as auto

    mappings: tuple[Any, ...] = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    return [mapping[type(config)] for mapping in mappings if type(config) in mapping]


def _names_of_classes() -> set[str]:
    """Names of all classes of `_classes_of`."""
    from transformers.models.auto import modeling_auto as auto

    return {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()}


def _text_part(config: PreTrainedConfig) -> Any:
    """The class that makes the text part of a model that takes more than text; None for any other."""
    if not is_multimodal(config):
        return None
    named = [kind for kind in _classes_of(config) if kind.__name__ == architecture_of(config)]
    return next((text_only(kind) for kind in named if kind.config_class is type(config)), None)


def unsupported(architecture: str, supported: Collection[str], why: str = "") -> str:
    """The message that refuses `architecture`."""
    return f"{architecture} is not supported{why and f': {why}'}; supported are {', '.join(supported)}"


def read_weights(
    location: Location, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype | None
) -> PreTrainedModel:
    """The model of a checkpoint on `device`, in eval mode, without gradients; `dtype` None keeps the weights' own.

    Raises ModelError where a weight is missing, damaged or of another shape (transformers would draw it at random),
    MemoryLimitError where the device has no room. Weights that the model has no place for are named in a warning.
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
    """What puts weights on `device`. Told nothing, transformers puts packed ones on a CUDA device, where there is one,
    though they are to stay in host memory."""
    if device.type != "cpu":
        return device
    return None if packing(config) is None else {"": "cpu"}


def _format_options(location: Location) -> dict[str, Any]:
    """What `from_pretrained` is told of the format of the weights. Older versions of transformers dequantise every GGUF
    file, and have no option for it."""
    if location.gguf is None:
        return {"use_safetensors": True}
    import transformers

    options = getattr(transformers, "GgufConfig", None)
    dequantised = {} if options is None else {"quantization_config": options(dequantize=True)}
    return {"gguf_file": location.gguf, **dequantised}


def build_skeleton(location: Location, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a checkpoint without its weights, on the meta device, with a configuration of its own: transformers
    writes the dtype into it, and `reach` what is held. Raises ModelError where none can be built."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = copy.deepcopy(config)
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
    """Raises ModelError where the place is a folder and holds no safetensors."""
    folder = location.folder
    if folder is None or any(folder.glob("*.safetensors")):
        return
    pickled = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    what = "only pickled weights, which can run code and are never loaded" if pickled else "no weights"
    raise ModelError(f"{location} has {what}; expected *.safetensors, as save_pretrained writes them")


def read_tokenizer(location: Location) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint, chat template included, or None in a folder that has none. Raises ModelError
    where it is damaged."""
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
    """CUDA for "auto" where there is a CUDA device, else the CPU. Raises ConfigError for a device that is not there."""
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
    """A dtype by name; None stands for the weights' own, where the configuration does not state it.

    "auto" is the checkpoint's dtype on CUDA (of a GGUF file, whose weights are coarser in any case, bfloat16). On a CPU
    it is bfloat16 where the checkpoint is in half precision and the processor multiplies bfloat16 itself (AVX512-BF16,
    AMX), else at least float32: without such instructions half precision is slower. What ships with the package is
    always computed in float32 on a CPU, so that its results, and what was stored with it, are the same on every
    machine. Raises ConfigError for an unknown name.
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
    if stated in (torch.bfloat16, torch.float16) and multiplies_bfloat16() and not location.shipped:
        return torch.bfloat16
    return torch.promote_types(stated or torch.float32, torch.float32)


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16 (AVX512-BF16 or AMX)."""
    asks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, ask, bool)() for ask in asks)


@contextmanager
def one_error(what: str) -> Iterator[None]:
    """Turns whatever is raised, but our own errors, into one ModelError that begins with `what`: files of strangers
    fail in too many ways to list."""
    try:
        yield
    except OffloadError:
        raise
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(f"{what}: the device has no room for it ({_one_line(error)})") from error
    except Exception as error:
        raise ModelError(f"{what}: {_one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from printing its own report of missing weights beside our error, and its reader of GGUF files
    from showing a bar of its own where transformers' bars are switched off."""
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
    """The message of `error` on one line of at most 300 characters; a bare word ("KeyError: 'x'") with its type."""
    text = " ".join(str(error).split())
    return text[:300] if " " in text else f"{type(error).__name__} {text}"


def _some(keys: list[str]) -> str:
    """Up to three of `keys`, and how many more there are."""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more
