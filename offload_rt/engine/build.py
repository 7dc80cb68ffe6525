"""The one place that puts a runtime together: weights, a plan for the device, policy, pool, link, runner."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import EngineConfig, SkewMethod
from ..core import ModelGeometry
from ..errors import ConfigError
from ..kv_cache.arena import read_in_place
from ..kv_cache.disk.disk_tier import DiskTier
from ..kv_cache.machine import memory_limit
from ..kv_cache.pool import HostPool
from ..models.checkpoint import resolve_device
from ..models.location import hub_of
from ..models.placement import ON_DEVICE, Placement
from ..models.registry import LoadedModel, load_model, load_shape
from ..planning.device_plan import DevicePlan, plan_for
from ..planning.weight_placement import asked_placement
from ..policies.base import Policy
from ..policies.registry import ArtifactLoader, make_policy, options_class
from ..skewing.artifact import SkewArtifact
from ..skewing.calibrate import cached_artifact
from ..skewing.tuned import default_options, load_artifact
from ..transfer.cpu import CpuLink
from ..transfer.cuda import CudaLink
from ..transfer.disk import DiskLink
from ..transfer.link import Link
from ..transfer.streams import DeviceStream, InlineStream, on_device
from ..transfer.weights.experts import keep_experts
from ..transfer.weights.host_weights import HostWeights
from ..transfer.weights.streamed import StreamedAdapter, WeightStream
from ..utils.progress import Progress
from .checks import check_launches
from .runner import Runner
from .speculative.draft_model import check_same_tokens

Model = str | os.PathLike[str] | PreTrainedModel
"""A model's name, its folder, or the model itself."""

LIMITLESS = 1 << 62
"""Bytes that no machine has."""


def build(model: Model, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> Runner:
    """A runner for `model` as `config` says; `runner.config.policy_options` are the options in force, with those that
    `offload-rt tune` chose where `config.skew` is its folder.

    Raises ConfigError, ModelError, ArtifactError, MemoryLimitError.
    """
    device = model.device if isinstance(model, PreTrainedModel) else resolve_device(config.device)
    with on_device(device):  # a model that is loaded, proved and calibrated launches kernels too
        check_launches(device)
        return _build(model, config, tokenizer)


def _build(model: Model, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | None) -> Runner:
    plan, placement = _plan(model, config)
    loaded = load_model(
        model,
        tokenizer=tokenizer,
        device=config.device,
        dtype=config.dtype,
        placement=placement,
        verify=config.verify,
        hub=hub_of(config),
        reach=config.max_model_len,
    )
    options = default_options(config.skew, config.policy, config.policy_options, loaded.fingerprint)
    config = replace(config, policy_options=options)
    streamed, weights = _bring_weights(loaded, placement)
    keys_on_host = plan is not None and plan.keys_on_host
    artifact = artifact_loader(streamed, config)
    policy = build_policy(streamed, config.policy, options, artifact, keys_on_host=keys_on_host)
    draft, share = (None, 0.0) if config.exact is None else _build_draft(loaded, config)
    pool = _build_pool(loaded, config, 1 - share)
    link = build_link(pool, loaded.adapter.geometry, loaded.adapter.device, config.working_set)
    return Runner(streamed, policy, pool, link, config, plan, weights, draft)


def _build_pool(loaded: LoadedModel, config: EngineConfig, share: float) -> HostPool:
    """A host pool for the model, with that share of what `config` gives."""
    adapter, host, on_disk = loaded.adapter, config.host_memory, config.disk_limit
    if share < 1:
        host = int(memory_limit(host, at_most=LIMITLESS) * share)
        on_disk = None if on_disk is None else int(on_disk * share)
    disk = None if config.disk is None else DiskTier(config.disk, on_disk)
    pin = adapter.device.type == "cuda"
    return HostPool(adapter.geometry, adapter.dtype, host, kv_cache_dtype=config.kv_cache_dtype, pin=pin, disk=disk)


def _build_draft(loaded: LoadedModel, config: EngineConfig) -> tuple[Runner | None, float]:
    """A runner of the model that drafts for `loaded`, if `config` names one, and its share of the memory for KV: both
    pools hold as many tokens. Raises ConfigError where its tokens are others, and what loading a model raises."""
    assert config.exact is not None
    if config.exact.model is None:
        return None, 0.0
    dtype, device = loaded.adapter.dtype, loaded.adapter.device
    own = replace(
        config, policy="full", policy_options={}, exact=None, skew=None, working_set=0, revision=None,
        device=str(device), dtype=str(dtype),
    )  # fmt: skip
    small = load_model(
        config.exact.model,
        device=own.device,
        dtype=own.dtype,
        verify=own.verify,
        hub=hub_of(own),
        reach=own.max_model_len,
    )
    check_same_tokens(loaded, small)
    share = 1 / (1 + loaded.adapter.geometry.kv_bytes(1, dtype) / small.adapter.geometry.kv_bytes(1, dtype))
    pool = _build_pool(small, own, share)
    policy = build_policy(small, own.policy, {}, artifact_loader(small, own))
    return Runner(small, policy, pool, build_link(pool, small.adapter.geometry, device), own), share


def build_beside(runner: Runner, name: str, options: Mapping[str, Any], exact: object = None) -> Runner:
    """A runner of `runner`'s model and host pool under another policy, with another `exact` where that is not None:
    what a prompt's prefill leaves in the pool is exact, so each finds what the other has computed. Raises ConfigError,
    also where `runner` has a plan for its device: that is made for one policy."""
    if runner.plan is not None:
        raise ConfigError("device_memory is planned for one policy: make a runtime of its own for another")
    model, fingerprint = runner.model, runner.model.fingerprint
    drafts: Any = runner.config.exact if exact is None else exact
    config = replace(runner.config, policy=name, policy_options=options, exact=drafts)
    model_now, model_then = (None if one.exact is None else one.exact.model for one in (runner.config, config))
    if model_then not in (None, model_now):
        raise ConfigError(f"the draft model {model_then!r} needs a host pool of its own: make a runtime with it")
    options = default_options(config.skew, name, config.policy_options, fingerprint)
    config = replace(config, policy_options=options)
    with on_device(model.adapter.device):
        policy = build_policy(model, name, options, artifact_loader(model, config))
    link = build_link(runner.pool, model.adapter.geometry, model.adapter.device, config.working_set)
    draft = None if model_then is None else runner.draft
    return Runner(model, policy, runner.pool, link, config, weights=runner.weights, draft=draft, order=runner.order)


def plan_device_memory(model: Model, config: EngineConfig) -> DevicePlan | None:
    """What lies on the device under `config.device_memory`, from shapes alone; None without such a limit.

    Raises ConfigError, ModelError, ArtifactError, MemoryLimitError.
    """
    return _plan(model, config)[0]


def _plan(model: Model, config: EngineConfig) -> tuple[DevicePlan | None, Placement]:
    """`plan_device_memory`, and with or without a plan what of the weights stays in host memory. Raises the same."""
    if config.device_memory is None and config.experts_on_device is None and not config.embedding_on_host:
        return None, ON_DEVICE
    options = default_options(config.skew, config.policy, config.policy_options, fingerprint=None)
    shape = load_shape(model, device=config.device, dtype=config.dtype, hub=hub_of(config), reach=config.max_model_len)
    if config.device_memory is None:
        return None, asked_placement(config, shape)
    plan = plan_for(replace(config, policy_options=options), shape)
    return plan, plan.placement


def build_policy(
    loaded: LoadedModel,
    name: str,
    options: Mapping[str, Any],
    artifact: ArtifactLoader,
    *,
    keys_on_host: bool = False,
) -> Policy:
    """The policy `name` for a loaded model; `artifact` is asked for the skew artifact where the policy needs one.
    Raises ConfigError for a name or an option that does not exist or does not fit the model."""
    adapter = loaded.adapter
    return make_policy(
        name,
        options,
        geometry=adapter.geometry,
        device=adapter.device,
        dtype=adapter.dtype,
        artifact=artifact,
        keys_on_host=keys_on_host,
    )


def artifact_loader(loaded: LoadedModel, config: EngineConfig) -> ArtifactLoader:
    """Gives the skew artifact at `config.skew`; without one, the model's own, calibrated once and cached, which says so
    where somebody may be waiting (whatever `config.progress` is: it comes once, and unasked)."""

    def load(method: SkewMethod) -> SkewArtifact:
        if config.skew is not None:
            return load_artifact(config.skew, loaded.fingerprint, named_method(config.policy, config.policy_options))
        with Progress(enabled=True).counted(f"calibrating {loaded.name} for selection, once") as progress:
            return cached_artifact(loaded, method, progress=progress)

    return load


def named_method(policy: str, options: Mapping[str, Any]) -> SkewMethod | None:
    """The skew's method that options name, themselves or by a preset; None where an artifact's own is taken."""
    found: SkewMethod | None = options_class(policy).given(options).get("skew")
    return found


def build_link(pool: HostPool, geometry: ModelGeometry, device: torch.device, working_set: int = 0) -> Link:
    """What brings rows to the device. They are used in place where host memory is the device's, they are stored as
    numbers and none are to be kept; else they are staged, or read from a disk."""
    if pool.file is not None:
        return DiskLink(pool, geometry, device)
    if device.type != "cpu":
        return CudaLink(pool, geometry, device, working_set=working_set, in_place=_reads_in_place(pool))
    if pool.format.exact and not working_set:
        return CpuLink(pool, geometry)
    return CudaLink(pool, geometry, device, streams=(InlineStream(), InlineStream()), working_set=working_set)


def _reads_in_place(pool: HostPool) -> bool:
    """Whether kernels may read the pool; where not, it is said: steps are slower."""
    found = not pool.pins or read_in_place()
    if not found:
        warnings.warn(
            "this device does not find page-locked host memory at the host's addresses (WSL 2 is such a machine): rows "
            "are copied together by the host before they cross the link, which is slower, and steps are not captured "
            "as CUDA graphs",
            stacklevel=2,
        )
    return found


def _bring_weights(loaded: LoadedModel, placement: Placement) -> tuple[LoadedModel, HostWeights | None]:
    """The model as it runs with weights in host memory as `placement` says, and what brings them; as it is, where
    everything is on the device."""
    if not placement:
        return loaded, None
    device, adapter, stream = loaded.adapter.device, loaded.adapter, None
    experts = () if placement.experts is None else keep_experts(loaded.layers, placement.experts, device)
    if placement.layers:
        copies = InlineStream() if device.type == "cpu" else DeviceStream(device)
        stream = WeightStream(loaded.layers, placement.layers, device, copies)
        adapter = StreamedAdapter(adapter, stream)
    return replace(loaded, adapter=adapter), HostWeights(stream, tuple(experts), loaded.embedding)
