"""Which architectures there are, and how a name, a folder or a loaded model becomes an adapter."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import Verify
from ..core import ModelGeometry
from ..errors import ConfigError, ModelError
from ..sampling_params import SamplingParams
from ..utils.openmp import stop_spinning
from .adapter import ModelAdapter
from .checkpoint import (
    MERGE,
    architecture_of,
    build_skeleton,
    one_error,
    read_config,
    read_tokenizer,
    read_weights,
    resolve_device,
    resolve_dtype,
    unsupported,
)
from .fingerprint import fingerprint
from .fingerprint_cache import FingerprintCache
from .host_embedding import HostEmbedding
from .live_weights import LiveWeights
from .location import OPEN, Hub, Location, locate
from .packed import UNPACKED, held_bytes, keep_layout, moves_packed, packing, packing_of, stays_packed, stored_bytes
from .placement import ON_DEVICE, Placement, lone_embedding
from .proof import prove, prove_once
from .reach import hold_frequencies
from .row_linear import use_row_linear
from .sampling_defaults import sampling_defaults
from .text_part import is_multimodal, text_config
from .weights import WeightSizes, decoder_layers, place_weights, weight_sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_DECODERS = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Ministral", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3",
    "Phi", "Phi3", "Olmo2", "Olmo3", "Granite", "Cohere", "Cohere2", "Starcoder2", "SmolLM3", "Glm", "Glm4",
    "GPTNeoX", "Falcon", "GptOss", "Ministral3", "MiMoV2Flash", "Llama4",
)  # fmt: skip
"""Those of transformers' `...ForCausalLM` that the decoders' adapter is tested with."""

_MULTIMODAL = ("Gemma3", "Llava", "Mistral3", "Qwen2VL", "Qwen2_5_VL")
"""Those of transformers' `...ForConditionalGeneration` whose text part it is tested with."""

_adapters = {
    **{f"{name}ForCausalLM": "offload_rt.models.decoder:DecoderAdapter" for name in _DECODERS},
    **{f"{name}ForConditionalGeneration": "offload_rt.models.decoder:DecoderAdapter" for name in _MULTIMODAL},
    "OPTForCausalLM": "offload_rt.models.opt:OPTAdapter",
    "GPT2LMHeadModel": "offload_rt.models.gpt2:GPT2Adapter",
}
"""transformers class -> its adapter as "module:class", imported when first wanted."""


def register_architecture(architecture: str, adapter: str) -> None:
    """Lets `LLM` run models of the transformers class `architecture` through `adapter`, a `ModelAdapter` written
    "module:class" that takes the loaded model. Folders of a class that transformers itself does not know must also be
    registered with its `AutoConfig` and `AutoModelForCausalLM`. Raises ConfigError where another adapter has the
    name."""
    if _adapters.setdefault(architecture, adapter) != adapter:
        raise ConfigError(f"architecture {architecture!r} has an adapter already: {_adapters[architecture]}")


def architectures() -> tuple[str, ...]:
    """transformers classes that can run, in the order of registration."""
    return tuple(_adapters)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run. `eos_token_ids` is empty where nothing ends a text; `weight_bytes` counts parameters and
    buffers, tied ones once; `layers` are the decoder layers' modules, in order; `sampling` is how the checkpoint says
    that tokens are chosen; `embedding` is looked up in host memory, where one is."""

    adapter: ModelAdapter
    tokenizer: PreTrainedTokenizerBase | None
    fingerprint: str
    name: str
    eos_token_ids: frozenset[int]
    weight_bytes: int
    layers: tuple[nn.Module, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    embedding: HostEmbedding | None = None
    live: LiveWeights | None = None
    """Of a model that the caller owns, and may change."""

    def weights_provenance(self) -> str:
        """Return the part of the KV provenance that separates KV of the present weights from KV of weights before a
        change in place. Raises ModelError if a module of the model was replaced."""
        changes = 0 if self.live is None else self.live.changes()
        return f"weights-{changes} " if changes else ""

    def check_weights_unchanged(self) -> None:
        """Raise ModelError if the weights are not those of the fingerprint, which stored sessions are named by."""
        if self.weights_provenance():
            raise ModelError(
                "the model's weights were changed since this LLM was made, and its sessions belong to the weights "
                "before; close them and make another LLM of the changed model"
            )


def adapter_for(model: Any) -> ModelAdapter:
    """The adapter of a loaded transformers model: its class decides. A class that nobody declared is recognised from
    its modules, and what is made of it must be proved (`proof`) before it runs.

    Raises ModelError for an architecture that is not recognised or one of its options.
    """
    architecture = type(model).__name__
    if architecture not in _adapters:
        return _recognised(model)
    module, _, name = _adapters[architecture].partition(":")
    adapter: ModelAdapter = getattr(importlib.import_module(module), name)(model)
    return adapter


def _recognised(model: Any) -> ModelAdapter:
    """The decoders' adapter for a model of a class that nobody declared. Raises ModelError where it is another kind of
    model, in whatever way that shows."""
    from .decoder import DecoderAdapter

    name = type(model).__name__
    try:
        return DecoderAdapter(model)
    except ModelError as error:
        raise ModelError(unsupported(name, architectures(), str(error)), reason=error.reason) from error
    except (AttributeError, IndexError, KeyError, RuntimeError, StopIteration, TypeError, ValueError) as error:
        raise ModelError(unsupported(name, architectures()), reason="modules") from error


def load_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    placement: Placement = ON_DEVICE,
    verify: Verify = "auto",
    hub: Hub = OPEN,
    reach: int | None = None,
) -> LoadedModel:
    """Loads "reference" (ships in the package), a local folder, a GGUF file ("model.gguf", a folder that holds one,
    "owner/name/file.gguf" on the hub; dequantised) or a hub id, or takes a loaded transformers model.

    A loaded model is put into eval mode and stays where it is, in its dtype. `tokenizer` is a tokenizer or a name or
    folder to read one from; None takes the checkpoint's own, if it has one. What `placement` says stays in host memory
    (the whole model goes through it, then): it cannot run before it is brought over.
    `verify`: as in `EngineConfig`; weights that stay in host memory are proved there. `hub`: how a checkpoint is
    fetched, and a tokenizer that is named. `reach`: tokens of the longest text, for `hold_frequencies`.
    Raises ModelError (unsupported, not proved, missing, incomplete or damaged), ConfigError (device or dtype; a loaded
    model of which something stays in host memory), MemoryLimitError.
    """
    stop_spinning()
    own_tokenizer: PreTrainedTokenizerBase | None = None
    identify: Callable[[Any], str] = fingerprint
    if isinstance(model, (str, os.PathLike)):
        location, name = locate(model, hub), os.fspath(model)
        config = read_config(location, architectures())
        chosen = resolve_device(device)
        _refuse_early(location, config, verify, reach)
        own_tokenizer = read_tokenizer(location) if tokenizer is None else None
        landing = torch.device("cpu") if placement else chosen
        identify = FingerprintCache(location).fingerprint
        loaded = read_weights(location, config, landing, resolve_dtype(dtype, location, config, chosen))
        hold_frequencies(loaded, reach)
        if placement:
            keep_layout(loaded)
        if chosen.type == "cpu":
            use_row_linear(loaded)
    else:
        loaded = _as_given(model, str(device), str(dtype).removeprefix("torch."), placement, verify)
        chosen = loaded.device
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
    used = own_tokenizer if tokenizer is None else _given_tokenizer(tokenizer, hub)
    strange = one_error(f"the checkpoint {name!r} says what no model can be") if loaded is not model else nullcontext()
    with strange:
        identity, weight_bytes = _proved(loaded, verify, identify), _weight_bytes(loaded)
        embedding = None
        if placement:
            place_weights(loaded, chosen, placement)
            embedding = _keep_embedding(loaded, chosen) if placement.embedding else None
        return LoadedModel(
            adapter=adapter_for(loaded),
            tokenizer=used,
            fingerprint=identity,
            name=name,
            eos_token_ids=_eos_token_ids(loaded, used),
            weight_bytes=weight_bytes,
            layers=tuple(decoder_layers(loaded)),
            sampling=sampling_defaults(getattr(loaded, "generation_config", None)),
            embedding=embedding,
            live=LiveWeights(loaded) if loaded is model and not placement else None,
        )


def _proved(model: Any, verify: Verify, identify: Callable[[Any], str]) -> str:
    """Return the fingerprint of a model after the verification that `verify` requests. Raises ModelError."""
    adapter = adapter_for(model)  # refuses strange models before anything else looks at them
    identity = identify(model)
    if verify == "always" or (verify == "auto" and not _is_of_transformers(model)):
        prove(model, adapter)
    elif verify == "auto":
        prove_once(model, adapter, identity)
    return identity


def _keep_embedding(model: Any, device: torch.device) -> HostEmbedding:
    """Puts in the place of the embedding of `model`, which is in host memory, what looks it up there."""
    embedding = lone_embedding(model)
    assert embedding is not None, "a tied head reads all of it on the device"
    kept = HostEmbedding(embedding, device)
    model.set_input_embeddings(kept)
    return kept


def _as_given(model: PreTrainedModel, device: str, dtype: str, placement: Placement, verify: Verify) -> PreTrainedModel:
    """A loaded model where it is, in eval mode. Raises ConfigError and ModelError where it cannot run so."""
    if placement:
        raise ConfigError(
            "the weights of a loaded model stay where they are, and some were to be in host memory (they do not all "
            "fit device_memory, or experts_on_device or embedding_on_host says so): pass the model's folder or hub id"
        )
    _check_is_model(model)
    _check_loaded(model, device, dtype)
    _refuse_unproved(type(model).__name__, verify)
    if packing(model.config) == "gguf" and packing_of(model) is None:
        warnings.warn(UNPACKED, stacklevel=3)
    model.train(False)
    return model


def _is_of_transformers(model: PreTrainedModel) -> bool:
    """Whether its class comes with transformers: the code of any other may have changed since it was proved."""
    return type(model).__module__.startswith("transformers.")


def _given_tokenizer(tokenizer: PreTrainedTokenizerBase | str, hub: Hub) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or the one of the model with this name. Raises ConfigError for anything else, ModelError."""
    if isinstance(tokenizer, str):
        return read_tokenizer(locate(tokenizer, replace(hub, revision=None)))
    if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ConfigError(f"tokenizer={tokenizer!r:.80} is {type(tokenizer).__name__}; it must be a tokenizer")
    return tokenizer


def _refuse_early(location: Location, config: PreTrainedConfig, verify: Verify, reach: int | None) -> None:
    """Raises ModelError where a checkpoint of a class that nobody declared, or whose text part may be of any, cannot
    run, before its weights are read."""
    name = architecture_of(config)
    _refuse_unproved(name, verify)
    if name not in _adapters or is_multimodal(config):
        skeleton = build_skeleton(location, config, torch.float32)
        hold_frequencies(skeleton, reach)
        adapter_for(skeleton)


def _refuse_unproved(architecture: str, verify: Verify) -> None:
    """Raises ModelError where nobody declared `architecture` and it shall not be proved either."""
    if verify == "off" and architecture not in _adapters:
        why = "nobody declared it, and with verify='off' it would not be proved"
        raise ModelError(unsupported(architecture, architectures(), why), reason="proof")


@dataclass(frozen=True)
class ModelShape:
    """What is known of a model before its weights are read: `weight_bytes` as in `LoadedModel`, `sizes` what they are
    made of, `packing` what keeps them packed, if anything does, `streams` whether layers may be brought over one by
    one. `placement`: what besides layers stays in host memory; `weight_bytes` and `sizes` are then of what is on the
    device, `host_bytes` of what is not."""

    geometry: ModelGeometry
    weight_bytes: int
    sizes: WeightSizes
    dtype: torch.dtype
    device: torch.device
    packing: str | None = None
    streams: bool = True
    placement: Placement = ON_DEVICE
    host_bytes: int = 0

    def placed(self, placement: Placement) -> ModelShape:
        """With experts and embedding where `placement` says."""
        assert not self.placement and not placement.layers, "layers are a plan's to place"
        sizes, on_host, slots = self.sizes.on_device(placement), self.sizes.on_host(placement), placement.experts
        weights = self.weight_bytes - on_host
        if slots is not None and self.sizes.experts is not None:
            weights += slots * sum(self.sizes.experts.each)
        return replace(self, weight_bytes=weights, sizes=sizes, placement=placement, host_bytes=on_host)


def load_shape(
    model: str | os.PathLike[str] | PreTrainedModel,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    hub: Hub = OPEN,
    reach: int | None = None,
) -> ModelShape:
    """What `load_model` would give, from the configuration alone (config.json, or the header of a GGUF file), or of a
    loaded model. Raises what `load_model` raises."""
    if isinstance(model, (str, os.PathLike)):
        location = locate(model, hub)
        config = read_config(location, architectures())
        where = resolve_device(device)
        chosen = resolve_dtype(dtype, location, config, where) or torch.float32
        skeleton = build_skeleton(location, config, chosen)
        with one_error(f"the checkpoint {location} says what no model can be"):
            hold_frequencies(skeleton, reach)
            geometry, sizes = adapter_for(skeleton).geometry, weight_sizes(skeleton)
        if stays_packed(config, where):
            fixed, layers = stored_bytes(location, skeleton, chosen)
            sizes = replace(sizes, fixed=fixed, layers=layers, experts=None)
            return ModelShape(
                geometry, fixed + sum(layers), sizes, chosen, where, packing(config), streams=moves_packed(config)
            )
        packed = None
    else:
        _check_is_model(model)
        skeleton, where, chosen = model, model.device, model.dtype
        _check_loaded(skeleton, str(device), str(dtype).removeprefix("torch."))
        geometry, sizes, packed = adapter_for(skeleton).geometry, weight_sizes(skeleton), packing_of(skeleton)
    return ModelShape(geometry, _weight_bytes(skeleton), sizes, chosen, where, packed, streams=packed is None)


def _check_is_model(model: object) -> None:
    """Raises ConfigError for anything but a loaded transformers model."""
    if not (hasattr(model, "config") and hasattr(model, "device")):
        raise ConfigError(
            f"model={model!r:.80} is {type(model).__name__}; it must be a shipped name, a folder, a GGUF file, a hub "
            "id or a loaded transformers model"
        )


def _check_loaded(model: PreTrainedModel, device: str, dtype: str) -> None:
    """Raises ModelError where a loaded model cannot run as it is, or is not where it was asked to be."""
    if getattr(model, "_hf_peft_config_loaded", False) or type(model).__module__.partition(".")[0] == "peft":
        raise ModelError(f"the model has PEFT adapters; {MERGE}", reason="peft")
    places = sorted({str(weight.device) for weight in model.parameters()})
    if len(places) > 1 or places == ["meta"]:
        raise ModelError(f"the weights are on {', '.join(places)}; all must be on one device: load without device_map")
    actual = str(next(model.parameters()).dtype).removeprefix("torch.")
    if device not in ("auto", places[0], places[0].partition(":")[0]) or dtype not in ("auto", actual):
        raise ModelError(
            f"the loaded model is on {places[0]} in {actual}; to run it on {device} in {dtype}, "
            "move it first (model.to(...)) or pass its folder"
        )


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """What ends a text: the generation configuration says, else the model's, else the tokenizer."""
    generation = getattr(model, "generation_config", None)
    sources: tuple[Any, ...] = (generation, model.config, text_config(model.config), tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones counted once."""
    return sum(held_bytes(tensor) for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
