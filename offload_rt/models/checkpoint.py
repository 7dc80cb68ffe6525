"""From a name to a transformers model: where it lies, whether it can run here, and its weights, complete or not at all.

Weights come from safetensors only and remote code is never run. Whatever transformers raises leaves as one ModelError.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from ..config import DType, check_choice
from ..errors import ConfigError, MemoryLimitError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SHIPPED = {"reference": "llama", "reference-opt": "opt"}
"""Names of the checkpoints that ship in the package, and their folders under `offload_rt/reference`."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "spiece.model", "sentencepiece.*", "tekken.json")


def locate(model: str | os.PathLike[str]) -> str:
    """The folder or hub id that `model` means: a shipped name, a folder, else a hub id ("name" or "owner/name").

    Raises ModelError where it is neither; nothing that looks like a path ever reaches the network.
    """
    name = os.fspath(model)
    if name in SHIPPED:
        folder = Path(str(importlib.resources.files("offload_rt"))) / "reference" / SHIPPED[name]
        if not folder.is_dir():
            raise ModelError(f"model {name!r} does not ship with this version; name a folder or a hub id")
        return str(folder)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.exists():
        raise ModelError(f"model {name!r} is a file; name the folder that holds config.json and *.safetensors")
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"model folder {name!r} does not exist")
    return name


def read_config(place: str, supported: Collection[str]) -> PreTrainedConfig:
    """The configuration at `place` (from `locate`).

    Raises ModelError where it cannot be had, is damaged, or is of an architecture not among `supported`.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    folder = Path(place)
    if folder.is_dir() and not (folder / "config.json").is_file():
        hint = "a model folder holds config.json and *.safetensors"
        if (folder / "adapter_config.json").is_file():
            hint = "it is a PEFT adapter: merge it into its model (merge_and_unload) and save that"
        raise ModelError(f"{_quoted(place)} has no config.json; {hint}")
    with _one_error(f"cannot read the configuration of {_quoted(place)}"):
        raw = dict(PreTrainedConfig.get_config_dict(place)[0])
    architecture = next(iter(raw.get("architectures") or ()), None) or f"model type {raw.get('model_type')!r}"
    if architecture not in supported:
        raise ModelError(unsupported(architecture, supported))
    refuse_quantised(raw.get("quantization_config"))
    with _one_error(f"the configuration of {_quoted(place)} is not valid"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(place, trust_remote_code=False)
    if CLASSES.get(config.model_type) != architecture and _registered_class(config) != architecture:
        raise ModelError(f"{_quoted(place)} contradicts itself: {architecture}, but model type {config.model_type!r}")
    return config


def _registered_class(config: PreTrainedConfig) -> str | None:
    """The name of the class that somebody registered with `AutoModelForCausalLM` for this kind of configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return str(found.__name__)


def unsupported(architecture: str, supported: Collection[str]) -> str:
    """The message that refuses `architecture`."""
    return f"{architecture} is not supported; supported are {', '.join(supported)}"


def refuse_quantised(quantisation: Any) -> None:
    """Raises ModelError where a configuration has a quantisation entry."""
    if quantisation:
        method = dict(quantisation).get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise ModelError(f"quantised weights ({method}) are not supported; use the checkpoint they were made from")


def read_weights(
    place: str, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype | None
) -> PreTrainedModel:
    """The model at `place` on `device`, in eval mode, without gradients; `dtype` None keeps the dtype of the weights.

    Raises ModelError where a weight is missing, damaged or of another shape (transformers would draw it at random),
    MemoryLimitError where the device has no room. Weights that the model has no place for are named in a warning.
    """
    from transformers import AutoModelForCausalLM

    _check_weight_files(Path(place))
    with _one_error(f"cannot load the weights of {_quoted(place)}"), _quiet():
        loader: Any = AutoModelForCausalLM
        model, report = loader.from_pretrained(
            place,
            config=config,
            dtype=dtype or "auto",
            device_map=None if device.type == "cpu" else device,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below, with the others
            output_loading_info=True,
        )
    absent = sorted(report["missing_keys"])
    shapes = sorted(str(entry[0]) for entry in report["mismatched_keys"])
    for what, keys in (("lacks", absent), ("has another shape for", shapes)):
        if keys:
            raise ModelError(f"the checkpoint {_quoted(place)} {what} {_some(keys)}; it is not a complete model")
    if report["unexpected_keys"]:
        warnings.warn(f"{_quoted(place)}: unused weights {_some(sorted(report['unexpected_keys']))}", stacklevel=3)
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def build_skeleton(place: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model at `place` without its weights, on the meta device. Raises ModelError where none can be built."""
    from transformers import AutoModelForCausalLM

    builder: Any = AutoModelForCausalLM
    with _one_error(f"the configuration of {_quoted(place)} is not valid"), torch.device("meta"):
        skeleton: PreTrainedModel = builder.from_config(config, dtype=dtype, trust_remote_code=False)
    return skeleton


def _check_weight_files(folder: Path) -> None:
    """Raises ModelError where `folder` is one and holds no safetensors."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickled = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    what = "only pickled weights, which can run code and are never loaded" if pickled else "no weights"
    raise ModelError(f"{_quoted(str(folder))} has {what}; expected *.safetensors, as save_pretrained writes them")


def read_tokenizer(place: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer at `place`, or None in a folder that has none. Raises ModelError where it is damaged."""
    from transformers import AutoTokenizer

    folder = Path(place)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return None
    with _one_error(f"cannot load the tokenizer of {_quoted(place)}; pass tokenizer="):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
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
        raise ConfigError(f"device={str(device)!r} is not supported; use auto, cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={str(device)!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def resolve_dtype(dtype: str | torch.dtype, config: PreTrainedConfig, device: torch.device) -> torch.dtype | None:
    """A dtype by name; None stands for the weights' own, where the configuration does not state it.

    "auto" is the checkpoint's dtype on CUDA, and at least float32 on a CPU. There half precision buys little:
    products of one token with the matrices of a small model, and attention in float16, are slower; float32 is also what
    equals transformers to the last digits. Raises ConfigError for an unknown name.
    """
    name = str(dtype).removeprefix("torch.")
    check_choice("dtype", name, get_args(DType))
    if name != "auto":
        named: torch.dtype = getattr(torch, name)
        return named
    stated: Any = config.dtype  # a torch.dtype or None, once loaded
    if device.type == "cpu":
        return torch.promote_types(stated or torch.float32, torch.float32)
    own: torch.dtype | None = stated
    return own


@contextmanager
def _one_error(what: str) -> Iterator[None]:
    """Turns whatever transformers raises into one ModelError that begins with `what`: files of strangers fail in too
    many ways to list."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryLimitError(f"{what}: the device has no room for it ({_one_line(error)})") from error
    except Exception as error:
        raise ModelError(f"{what}: {_one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from printing its own report of missing weights beside our error."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _one_line(error: BaseException) -> str:
    """The message of `error` on one line of at most 300 characters; a bare word ("KeyError: 'x'") with its type."""
    text = " ".join(str(error).split())
    return text[:300] if " " in text else f"{type(error).__name__} {text}"


def _quoted(place: str) -> str:
    return f"'{place}'" if Path(place).is_dir() else f"'{place}' (no such folder, so sought on the hub)"


def _some(keys: list[str]) -> str:
    """Up to three of `keys`, and how many more there are."""
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more
