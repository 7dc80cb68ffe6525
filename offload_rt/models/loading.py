"""Load a model by name or folder, or prepare a loaded one, and build its adapter."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import Verify
from ..errors import ConfigError, ModelError
from ..sampling_params import SamplingParams
from ..utils.openmp import stop_spinning
from .adapter import ModelAdapter
from .checkpoint import (
    architecture_of,
    build_skeleton,
    one_error,
    read_config,
    read_tokenizer,
    read_weights,
    resolve_device,
    resolve_dtype,
)
from .fingerprint import fingerprint
from .fingerprint_cache import FingerprintCache
from .given import as_given
from .host_embedding import HostEmbedding
from .live_weights import LiveWeights
from .location import OPEN, Hub, Location, locate
from .packed import keep_layout
from .placement import ON_DEVICE, Placement, lone_embedding
from .proof import prove, prove_once
from .reach import hold_frequencies
from .registry import adapter_for, architectures, refuse_unproved
from .row_linear import use_row_linear
from .sampling_defaults import sampling_defaults
from .text_part import is_multimodal, text_config
from .weights import decoder_layers, place_weights, weight_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run.

    Attributes:
        eos_token_ids: Token ids that end a text; empty if there are none.
        weight_bytes: Bytes of parameters and buffers; tied ones count once.
        layers: Modules of the decoder layers, in order.
        sampling: Sampling defaults of the checkpoint.
        embedding: The embedding in host memory, or None if it is on the device.
        live: Tracks changes to the weights of a model that the caller owns; None otherwise.
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
    live: LiveWeights | None = None

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
    """Load a model, or prepare a loaded transformers model.

    Args:
        model: "reference" (ships with the package), a local folder, a hub id, or a GGUF file, which is dequantised
            ("model.gguf", a folder that holds one, or "owner/name/file.gguf" on the hub). A loaded model is put into
            eval mode and keeps its device and dtype.
        tokenizer: A tokenizer, or a name or folder to read one from. None reads the checkpoint's own, if it has one.
        placement: Weights that stay in host memory. They must be copied to the device before they can run.
        verify: As in `EngineConfig`. Weights in host memory are verified there.
        hub: Options for fetching the checkpoint and a named tokenizer.
        reach: Length of the longest text in tokens, for `hold_frequencies`.

    Raises:
        ModelError: The model is unsupported, missing, incomplete or damaged, or fails verification.
        ConfigError: Invalid device or dtype, or `placement` was given for a loaded model.
        MemoryLimitError: The device does not have enough memory.
    """
    stop_spinning()
    if isinstance(model, (str, os.PathLike)):
        checkpoint = _read_checkpoint(model, resolve_device(device), dtype, placement, verify, hub, reach)
    else:
        loaded = as_given(model, str(device), str(dtype).removeprefix("torch."), placement, verify)
        name = getattr(model.config, "name_or_path", "") or type(model).__name__
        checkpoint = _Checkpoint(loaded, name, loaded.device, None)
    if tokenizer is not None:
        used = _given_tokenizer(tokenizer, hub)
    else:
        used = read_tokenizer(checkpoint.location) if checkpoint.location is not None else None
    return _prepared(checkpoint, used, placement, verify)


@dataclass(frozen=True, eq=False)
class _Checkpoint:
    """A model with its weights. Without a location, the caller loaded it."""

    model: PreTrainedModel
    name: str
    device: torch.device
    location: Location | None


def _read_checkpoint(
    model: str | os.PathLike[str],
    device: torch.device,
    dtype: str | torch.dtype,
    placement: Placement,
    verify: Verify,
    hub: Hub,
    reach: int | None,
) -> _Checkpoint:
    """Read the weights. Arguments and errors are those of `load_model`."""
    location = locate(model, hub)
    config = read_config(location, architectures())
    _refuse_early(location, config, verify, reach)
    landing = torch.device("cpu") if placement else device
    loaded = read_weights(location, config, landing, resolve_dtype(dtype, location, config, device))
    hold_frequencies(loaded, reach)
    if placement:
        keep_layout(loaded)
    if device.type == "cpu":
        use_row_linear(loaded)
    return _Checkpoint(loaded, os.fspath(model), device, location)


def _prepared(
    checkpoint: _Checkpoint, tokenizer: PreTrainedTokenizerBase | None, placement: Placement, verify: Verify
) -> LoadedModel:
    """Verify the model and place its weights. Raise ModelError, MemoryLimitError."""
    model, location = checkpoint.model, checkpoint.location
    given = location is None
    identify = fingerprint if location is None else FingerprintCache(location).fingerprint
    with nullcontext() if given else one_error(f"the checkpoint {checkpoint.name!r} says what no model can be"):
        identity, size, embedding = _proved(model, verify, identify), weight_bytes(model), None
        if placement:
            place_weights(model, checkpoint.device, placement)
            embedding = _keep_embedding(model, checkpoint.device) if placement.embedding else None
        return LoadedModel(
            adapter=adapter_for(model),
            tokenizer=tokenizer,
            fingerprint=identity,
            name=checkpoint.name,
            eos_token_ids=_eos_token_ids(model, tokenizer),
            weight_bytes=size,
            layers=tuple(decoder_layers(model)),
            sampling=sampling_defaults(getattr(model, "generation_config", None)),
            embedding=embedding,
            live=LiveWeights(model) if given else None,
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
    """Replace the embedding of `model` by one that is looked up in host memory."""
    embedding = lone_embedding(model)
    assert embedding is not None, "a tied head reads all of it on the device"
    kept = HostEmbedding(embedding, device)
    model.set_input_embeddings(kept)
    return kept


def _is_of_transformers(model: PreTrainedModel) -> bool:
    """Return whether the class is part of transformers. Other code may change after it was verified."""
    return type(model).__module__.startswith("transformers.")


def _given_tokenizer(tokenizer: PreTrainedTokenizerBase | str, hub: Hub) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer, or load it by model name. Raise ConfigError for other types, ModelError on failure."""
    if isinstance(tokenizer, str):
        return read_tokenizer(locate(tokenizer, replace(hub, revision=None)))
    if not (callable(tokenizer) and hasattr(tokenizer, "decode")):
        raise ConfigError(f"tokenizer={tokenizer!r:.80} is {type(tokenizer).__name__}; it must be a tokenizer")
    return tokenizer


def _refuse_early(location: Location, config: PreTrainedConfig, verify: Verify, reach: int | None) -> None:
    """Raise ModelError before the weights are read if an unregistered or multimodal checkpoint cannot run."""
    name = architecture_of(config)
    refuse_unproved(name, verify)
    if name not in architectures() or is_multimodal(config):
        skeleton = build_skeleton(location, config, torch.float32)
        hold_frequencies(skeleton, reach)
        adapter_for(skeleton)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the end-of-text ids of the generation configuration, else of the model's, else of the tokenizer."""
    generation = getattr(model, "generation_config", None)
    sources: tuple[Any, ...] = (generation, model.config, text_config(model.config), tokenizer)
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
