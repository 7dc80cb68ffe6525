"""Load a model by name or folder, or prepare a model that is already loaded, and create its adapter."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import Quantize, Verify
from ..errors import ConfigError, ModelError
from ..sampling_params import SamplingParams
from ..utils.openmp import stop_spinning
from ..utils.progress import report
from .adapter import ModelAdapter
from .checkpoint import (
    architecture_of,
    as_model_error,
    build_skeleton,
    declared_dtype,
    read_config,
    read_tokenizer,
    read_weights,
    resolve_device,
    resolve_dtype,
)
from .checkpoint_cache import CheckpointCache
from .fingerprint import WeightChangeDetector, cached_fingerprint, fingerprint
from .importing import conversion_of, packed_source
from .key_balance import balance_keys, can_balance_keys
from .linear import GGUF_NOTE, backend_of, packing, packing_of, use_backends
from .linear.quantize import quantize_layers
from .multimodal import is_multimodal, text_config
from .registry import adapter_for, architectures, refuse_unverified
from .rotary import fix_rope_scaling
from .source import DEFAULT_HUB, MERGE, Hub, ModelSource, find_source
from .verification import verify_model, verify_once
from .weights import (
    ON_DEVICE,
    HostEmbedding,
    HostTable,
    Placement,
    decoder_layers,
    keep_table_on_host,
    layer_table,
    place_weights,
    table_stays_on_host,
    untied_embedding,
    weight_bytes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Maps sampling parameters in transformers' generation configuration to their names in `SamplingParams`.

As in vLLM, `do_sample` is ignored.
"""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run, returned by `load_model`.

    Attributes:
        fingerprint: Digest of configuration and weights.
        name: Name of the model in messages.
        weight_bytes: Size in bytes of parameters and buffers. Tied weights count once.
        layers: Modules of the decoder layers, in order.
        sampling: Default sampling parameters of the checkpoint.
        embedding, host_table: The embedding module and the table of `LayerEmbeddings`. Each is None unless it stays in
            host memory.
        weight_changes: Detects changes to the weights. None unless the caller passed a model that was already loaded.
    """

    adapter: ModelAdapter
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: str
    name: str
    eos_token_ids: frozenset[int]
    weight_bytes: int
    layers: tuple[nn.Module, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    embedding: HostEmbedding | None = None
    host_table: HostTable | None = None
    weight_changes: WeightChangeDetector | None = None

    def weights_provenance(self) -> str:
        """Return the part of the KV provenance key that identifies changes that the caller made to the weights.

        Return "" if there has been no change. Raise ModelError if a module of the model was replaced.
        """
        changes = 0 if self.weight_changes is None else self.weight_changes.changes()
        return f"weights-{changes} " if changes else ""

    @property
    def found_weight_changes(self) -> int:
        """Number of changes that calls of `weights_provenance` have found. A change may move weights in memory."""
        return 0 if self.weight_changes is None else self.weight_changes.found

    def check_weights_unchanged(self) -> None:
        if self.weights_provenance():
            raise ModelError(
                "the model's weights were changed after this LLM was created, and its sessions belong to the previous "
                "weights; close them, and create a new LLM from the changed model"
            )


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    placement: Placement = ON_DEVICE,
    verify: Verify = "auto",
    hub: Hub = DEFAULT_HUB,
    max_model_len: int | None = None,
    quantize: Quantize = "auto",
    quantised_kv: bool = False,
) -> LoadedModel:
    """Load a model, or prepare a loaded transformers model. For `device`, `dtype` and `quantize`, see `EngineConfig`.

    Args:
        model: "reference" (ships with the package), a local folder, a hub id, or a GGUF file. A GGUF file is given as a
            path, as a folder with one GGUF file, or as "owner/name/file.gguf" on the hub. If `model` is a loaded model,
            it is put into eval mode and keeps its device and dtype.
        tokenizer: A tokenizer, or its name or folder. None uses the checkpoint's tokenizer, if there is one.
        placement: Weights that stay in host memory. The caller copies them to the device when they are used.
        verify: See `EngineConfig`. If any weights stay in host memory, the model is verified on the CPU.
        hub: Options for downloading the checkpoint, and the tokenizer if it is given by name.
        max_model_len: Length of the longest text in tokens, for `fix_rope_scaling`.
        quantised_kv: Whether the KV cache will be quantised. The keys of some checkpoints are then scaled
            (`key_balance.py`).

    Raises:
        ModelError: The model is unsupported, missing, incomplete or damaged, or fails verification.
        ConfigError: The device or the dtype is invalid, or `placement` was given for a loaded model.
        MemoryLimitError: The device does not have enough memory.
    """
    stop_spinning()
    source, identify = None, fingerprint
    if isinstance(model, (str, os.PathLike)):
        name, target = os.fspath(model), resolve_device(device)
        source = find_source(model, hub)
        if (conversion := conversion_of(source, quantize, target)) is not None:
            source = packed_source(conversion)
        cache = CheckpointCache(source)
        model, balanced = _read_checkpoint(
            source, target, dtype, placement, verify, max_model_len, quantize, quantised_kv
        )
        identify = partial(cached_fingerprint, cache=cache, balanced=balanced)
    else:
        if quantize in ("int4", "int8"):
            raise ConfigError(f"quantize={quantize!r} changes weights while they are loaded: pass the model's folder")
        _prepare_loaded(model, str(device), str(dtype).removeprefix("torch."), placement, verify)
        name, target = getattr(model.config, "name_or_path", "") or type(model).__name__, model.device
    if tokenizer is not None:
        tokenizer = _resolve_tokenizer(tokenizer, hub)
    elif source is not None:
        report("reading the tokenizer")
        tokenizer = read_tokenizer(source)
    with nullcontext() if source is None else as_model_error(f"the checkpoint {name!r} is not a valid model"):
        loaded = _verify(model, name, tokenizer, verify, identify)
        if source is None:
            return replace(loaded, weight_changes=WeightChangeDetector(model))
        return _move_to_device(loaded, model, target, placement) if placement else loaded


def _read_checkpoint(
    source: ModelSource,
    device: torch.device,
    dtype: str | torch.dtype,
    placement: Placement,
    verify: Verify,
    max_model_len: int | None,
    quantize: Quantize,
    quantised_kv: bool,
) -> tuple[PreTrainedModel, bool]:
    """Return the model, and whether its keys were balanced."""
    config = read_config(source)
    _refuse_early(source, config, verify, max_model_len)
    report("reading the weights")
    keeps_table = table_stays_on_host(config, device, packing(config))
    # If weights are quantised here, they are first loaded to host memory, because the device may be too small for
    # 16-bit weights.
    on_host, offloaded = placement or quantize in ("int4", "int8") or keeps_table, bool(placement)
    load_device = torch.device("cpu") if on_host else device
    torch_dtype = resolve_dtype(dtype, source, declared_dtype(source, config), device)
    loaded = read_weights(source, config, load_device, torch_dtype, offloaded=offloaded)
    fix_rope_scaling(loaded, max_model_len)
    if balanced := quantised_kv and can_balance_keys(loaded):
        balance_keys(loaded)
    with as_model_error(f"cannot quantise the weights of {source}"):
        quantize_checkpoint(loaded, quantize, device)
        if keeps_table:
            keep_table_on_host(loaded)
        if on_host and not placement:
            loaded.to(device)  # type: ignore[arg-type]
    use_backends(loaded, device)
    return loaded, balanced


def quantize_checkpoint(model: PreTrainedModel, quantize: Quantize, device: torch.device) -> None:
    """If `quantize` is "int4" or "int8", quantise the linear layers in place on `device`.

    Raise ConfigError if the model is already quantised, or if it has no layer that can be quantised.
    """
    if quantize not in ("int4", "int8"):
        return
    if (method := packing(model.config)) is not None:
        raise ConfigError(f"quantize={quantize!r} is for 16-bit checkpoints, and this one is packed ({method}) already")
    quantize_layers(model, int(quantize.removeprefix("int")), device)
    if packing_of(model) is None:  # GPT-2 and Falcon have classes of their own for linear layers
        raise ConfigError(
            f"quantize={quantize!r} has no effect on {type(model).__name__}, because no layer of this model can be "
            "quantised: remove quantize"
        )


def _refuse_early(source: ModelSource, config: PreTrainedConfig, verify: Verify, max_model_len: int | None) -> None:
    name = architecture_of(config)
    refuse_unverified(name, verify)
    if name not in architectures() or is_multimodal(config):
        skeleton = build_skeleton(source, config, torch.float32)
        fix_rope_scaling(skeleton, max_model_len)
        adapter_for(skeleton)


def _prepare_loaded(model: PreTrainedModel, device: str, dtype: str, placement: Placement, verify: Verify) -> None:
    """Prepare a model that the caller loaded: put it into eval mode, and raise ConfigError or ModelError if it cannot
    be used.
    """
    if placement:
        raise ConfigError(
            "weights of a loaded model cannot be placed in host memory, which device_memory, experts_on_device or "
            "embedding_on_host requires here: pass the model's folder or hub id instead"
        )
    check_loaded(model, device, dtype)
    refuse_unverified(type(model).__name__, verify)
    if packing(model.config) == "gguf" and packing_of(model) is None:
        warnings.warn(GGUF_NOTE, stacklevel=3)
    model.train(False)
    if (backend := backend_of(model.config)) is not None:
        backend.prepare(model, None, offloaded=False)


def check_loaded(model: PreTrainedModel, device: str, dtype: str) -> None:
    """Raise an error if a model that the caller loaded cannot run.

    Raises:
        ConfigError: `model` is not a loaded transformers model.
        ModelError: The model has PEFT adapters, is on several devices, or does not have the requested `device` or
            `dtype`.
    """
    if not (hasattr(model, "config") and hasattr(model, "device")):
        raise ConfigError(
            f"model={model!r:.80} has type {type(model).__name__}; expected the name of a shipped model, a folder, a "
            "GGUF file, a hub id or a loaded transformers model"
        )
    if getattr(model, "_hf_peft_config_loaded", False) or type(model).__module__.partition(".")[0] == "peft":
        raise ModelError(f"the model has PEFT adapters; {MERGE}", reason="peft")
    devices = sorted({str(weight.device) for weight in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ModelError(
            f"the weights are on {', '.join(devices)}; they must be on one device: load the model without device_map"
        )
    actual = str(next(model.parameters()).dtype).removeprefix("torch.")
    if device not in ("auto", devices[0], devices[0].partition(":")[0]) or dtype not in ("auto", actual):
        raise ModelError(
            f"the loaded model is on {devices[0]} in {actual}; to run it on {device} in {dtype}, "
            "move it first (model.to(...)) or pass its folder"
        )


def _verify(
    model: Any,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    verify: Verify,
    identify: Callable[[Any], str],
) -> LoadedModel:
    """Create the adapter, and verify it unless `verify` is "off". `identify` computes the fingerprint."""
    adapter = adapter_for(model)  # This refuses unsupported models before their weights are digested.
    report("computing the fingerprint of the weights")
    identity = identify(model)
    # The checkpoint's own code may change after the model was verified.
    has_remote_code = not type(model).__module__.startswith("transformers.")
    if verify == "always" or (verify == "auto" and has_remote_code):
        verify_model(model, adapter)
    elif verify == "auto":
        verify_once(model, adapter, identity)
    table = layer_table(model)
    return LoadedModel(
        adapter=adapter,
        tokenizer=tokenizer,
        fingerprint=identity,
        name=name,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        weight_bytes=weight_bytes(model),
        layers=tuple(decoder_layers(model)),
        sampling=sampling_defaults(getattr(model, "generation_config", None)),
        host_table=table if isinstance(table, HostTable) else None,
    )


def _move_to_device(loaded: LoadedModel, model: Any, device: torch.device, placement: Placement) -> LoadedModel:
    place_weights(model, device, placement)
    host_embedding = None
    if placement.embedding:
        embedding = untied_embedding(model)
        assert embedding is not None, "the device needs all of a tied head"
        host_embedding = HostEmbedding(embedding, device)
        model.set_input_embeddings(host_embedding)
    return replace(loaded, adapter=adapter_for(model), embedding=host_embedding)


def _resolve_tokenizer(tokenizer: PreTrainedTokenizerBase | str, hub: Hub) -> PreTrainedTokenizerBase | None:
    if isinstance(tokenizer, str):
        loaded = read_tokenizer(find_source(tokenizer, replace(hub, revision=None)))
        if loaded is None:
            raise ModelError(f"the folder {tokenizer!r} has no tokenizer: it needs tokenizer.json or its model file")
        return loaded
    if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ConfigError(f"tokenizer={tokenizer!r:.80} is {type(tokenizer).__name__}; it must be a tokenizer")
    return tokenizer


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    sources: tuple[Any, ...] = (generation, model.config, text_config(model.config), tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def sampling_defaults(generation_config: Any) -> SamplingParams:
    """Return the sampling parameters in a generation configuration. Warn about invalid values."""
    parameters: dict[str, Any] = {}
    for name, parameter in _SAMPLING.items():
        value = getattr(generation_config, name, None)
        if value is None:
            continue
        try:
            SamplingParams(**{parameter: value})
        except ConfigError as error:
            warnings.warn(f"{name} of the model's generation_config is ignored: {error}", stacklevel=2)
        else:
            parameters[parameter] = value
    return SamplingParams(**parameters)
