"""Build a runner from a configuration: memory plan, weights, policy, KV cache and transfers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import EngineConfig, SkewMethod
from ..core import ModelGeometry
from ..errors import ConfigError, MemoryLimitError
from ..kernels import dispatch
from ..kv_cache.arena import reads_host_addresses
from ..kv_cache.disk.file_layout import DiskTier
from ..kv_cache.pool import HostPool
from ..kv_cache.state_pool import StatePool
from ..kv_cache.system_memory import memory_limit
from ..models.checkpoint import resolve_device
from ..models.loading import LoadedModel, load_model
from ..models.shape import load_shape
from ..models.source import hub_of
from ..models.weights import ON_DEVICE, Placement
from ..planning.device_plan import DevicePlan, check_device_kv, plan_for, requested_placement
from ..planning.host_memory import check_conversion, divide_host_memory
from ..policies.base import Policy
from ..policies.registry import ArtifactLoader, make_policy, options_class, parse_options
from ..skewing.artifact import SkewArtifact
from ..skewing.calibrate import cached_artifact
from ..skewing.tuned import default_options, load_artifact
from ..transfer.base import Transfer
from ..transfer.cpu import CpuTransfer
from ..transfer.cuda import CudaTransfer
from ..transfer.device_copies import copy_bytes
from ..transfer.disk import DiskTransfer
from ..transfer.streams import DeviceStream, InlineStream, on_device
from ..transfer.weights.experts import keep_experts
from ..transfer.weights.host_table import lock_table
from ..transfer.weights.host_weights import HostWeights
from ..transfer.weights.streamed import StreamedAdapter, WeightStream
from ..utils.progress import Progress
from ..utils.units import format_size
from .checks import check_kernels
from .runner import Runner
from .selection_cost import measured_dense_until
from .speculative.draft_model import check_same_tokens

Model = str | os.PathLike[str] | PreTrainedModel
"""A model: its name, its folder, or a loaded transformers model."""

LIMITLESS = 1 << 62


def build(model: Model, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | str | None = None) -> Runner:
    """Return a runner for `model`. For errors, see `LLM`.

    `runner.config.policy_options` contains every option in effect. This includes options that `offload-rt tune` saved
    in the folder `config.skew`.
    """
    device = model.device if isinstance(model, PreTrainedModel) else resolve_device(config.device)
    check_device_kv(config, device)
    # Check the options before loading the model, which takes long.
    parse_options(config.policy, default_options(config.skew, config.policy, config.policy_options, fingerprint=None))
    with on_device(device):  # loading includes verification and calibration, which launch kernels
        _check_launches(device)
        return _build(model, config, tokenizer)


def _build(model: Model, config: EngineConfig, tokenizer: PreTrainedTokenizerBase | str | None) -> Runner:
    plan, placement = _plan_memory(model, config)
    loaded = _load(model, config, tokenizer, placement)
    options = default_options(config.skew, config.policy, config.policy_options, loaded.fingerprint)
    config = replace(config, policy_options=options)
    streamed, weights = _stream_weights(loaded, placement)
    keys_on_host = plan is not None and plan.keys_on_host
    artifact = artifact_loader(streamed, config)
    policy = build_policy(streamed, config.policy, options, artifact, keys_on_host=keys_on_host)
    draft, share = (None, 0.0) if config.exact is None else _build_draft(loaded, config)
    pool = _build_pool(loaded, config, 1 - share)
    geometry, kv_memory = loaded.adapter.geometry, config.device_kv_memory or 0
    transfer = build_transfer(pool, geometry, loaded.adapter.device, config.working_set, kv_memory)
    return Runner(streamed, policy, pool, transfer, config, plan, weights, draft)


def _load(
    model: Model,
    config: EngineConfig,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    placement: Placement = ON_DEVICE,
) -> LoadedModel:
    # A skew artifact from a file was computed for unscaled keys.
    quantised_kv = config.kv_cache_dtype != "auto" and config.skew is None
    loaded = load_model(
        model, tokenizer=config.tokenizer if tokenizer is None else tokenizer, device=config.device,
        dtype=config.dtype, placement=placement, verify=config.verify, hub=hub_of(config),
        max_model_len=config.max_model_len, quantize=config.quantize, quantised_kv=quantised_kv,
    )  # fmt: skip
    check_kernels(loaded.adapter.geometry.head_dim, loaded.adapter.device, loaded.name)
    if loaded.host_table is not None and reads_host_addresses():
        lock_table(loaded.host_table)
    return loaded


def _build_pool(loaded: LoadedModel, config: EngineConfig, share: float) -> HostPool:
    # `share` is the fraction of the configured memory.
    adapter, host, snapshots = loaded.adapter, config.host_memory, 0
    geometry, dtype = adapter.geometry, adapter.dtype
    if share < 1 or divide_host_memory(config, geometry, dtype).snapshot_slots:
        limit, for_snapshots = memory_limit(host, at_most=LIMITLESS), config.snapshot_memory
        own = replace(
            config,
            host_memory=int(limit * share),
            snapshot_memory=None if for_snapshots is None else max(1, int(for_snapshots * share)),
        )
        memory = divide_host_memory(own, geometry, dtype)
        host, snapshots = memory.kv, memory.snapshot_slots
    states = StatePool(geometry, dtype, snapshots, adapter.device) if snapshots else None
    on_disk = None if config.disk_limit is None else int(config.disk_limit * share)
    disk = None if config.disk is None else DiskTier(config.disk, on_disk)
    pin = adapter.device.type == "cuda"
    return HostPool(geometry, dtype, host, kv_cache_dtype=config.kv_cache_dtype, pin=pin, disk=disk, states=states)


def _build_draft(loaded: LoadedModel, config: EngineConfig) -> tuple[Runner | None, float]:
    """Return a runner for the draft model, and the fraction of the configured memory that its KV cache may use.

    The fraction is chosen so that the KV caches of both models hold the same number of tokens.
    """
    assert config.exact is not None
    if config.exact.model is None:
        return None, 0.0
    dtype, device = loaded.adapter.dtype, loaded.adapter.device
    own = replace(
        config, policy="full", policy_options={}, exact=None, skew=None, working_set=0, device_kv_memory=None,
        revision=None, device=str(device), dtype=str(dtype),
    )  # fmt: skip
    small = _load(config.exact.model, own)
    check_same_tokens(loaded, small)
    share = 1 / (1 + loaded.adapter.geometry.kv_bytes(1, dtype) / small.adapter.geometry.kv_bytes(1, dtype))
    pool = _build_pool(small, own, share)
    policy = build_policy(small, own.policy, {}, artifact_loader(small, own))
    return Runner(small, policy, pool, build_transfer(pool, small.adapter.geometry, device), own), share


def build_with_policy(runner: Runner, name: str, options: Mapping[str, Any], exact: object = None) -> Runner:
    """Return a runner that uses another policy but shares the model and the KV cache of `runner`.

    Unless `exact` is None, it replaces the `exact` option of `runner`.

    Raises:
        ConfigError: The options are invalid, or `runner` was built with `device_memory`.
    """
    if runner.plan is not None:
        raise ConfigError("device_memory is planned for one policy only: create another LLM instead")
    model, fingerprint = runner.model, runner.model.fingerprint
    drafts: Any = runner.config.exact if exact is None else exact
    # Both runners share cached prefixes, because prefill is exact under every policy. Copies of KV on the device belong
    # to the first runner, because the two runners share no streams.
    config = replace(runner.config, policy=name, policy_options=options, exact=drafts, device_kv_memory=None)
    model_now, model_then = (None if one.exact is None else one.exact.model for one in (runner.config, config))
    if model_then not in (None, model_now):
        raise ConfigError(f"the draft model {model_then!r} needs its own KV cache: create an LLM with it")
    options = default_options(config.skew, name, config.policy_options, fingerprint)
    config = replace(config, policy_options=options)
    with on_device(model.adapter.device):
        policy = build_policy(model, name, options, artifact_loader(model, config), idle=runner.pool.lock)
        transfer = build_transfer(runner.pool, model.adapter.geometry, model.adapter.device, config.working_set)
    draft = None if model_then is None else runner.draft
    return Runner(model, policy, runner.pool, transfer, config, weights=runner.weights, draft=draft, order=runner.order)


def _plan_memory(model: Model, config: EngineConfig) -> tuple[DevicePlan | None, Placement]:
    quantised = config.quantize in ("int4", "int8") and isinstance(model, (str, os.PathLike))
    placed = config.experts_on_device is not None or config.embedding_on_host
    if config.device_memory is None and not placed and not quantised:
        return None, ON_DEVICE
    options = default_options(config.skew, config.policy, config.policy_options, fingerprint=None)
    shape = load_shape(
        model, device=config.device, dtype=config.dtype, hub=hub_of(config), max_model_len=config.max_model_len,
        quantize=config.quantize,
    )  # fmt: skip
    if isinstance(model, (str, os.PathLike)):
        check_conversion(model, shape.dtype, config)
    if config.device_memory is None:
        return None, requested_placement(config, shape)
    plan = plan_for(replace(config, policy_options=options), shape)
    return plan, plan.placement


def build_policy(
    loaded: LoadedModel,
    name: str,
    options: Mapping[str, Any],
    artifact: ArtifactLoader,
    *,
    keys_on_host: bool = False,
    idle: AbstractContextManager[object] | None = None,
) -> Policy:
    """Return the policy called `name` for a loaded model. Raises ConfigError if the name or the options are invalid.

    Args:
        artifact: Loads the skew artifact. Called only if the policy needs one.
        keys_on_host: Keep scoring keys in host memory, because device memory is too small for them.
        idle: Context manager that keeps all engines of the process from computing while speed is measured.
    """
    adapter = loaded.adapter
    measure = partial(measured_dense_until, geometry=adapter.geometry, dtype=adapter.dtype, idle=idle)
    return make_policy(
        name,
        options,
        geometry=adapter.geometry,
        device=adapter.device,
        dtype=adapter.dtype,
        artifact=artifact,
        keys_on_host=keys_on_host,
        measure=measure if adapter.device.type == "cpu" else None,
    )


def artifact_loader(loaded: LoadedModel, config: EngineConfig) -> ArtifactLoader:
    """Return a function that loads the skew artifact from `config.skew`, or calibrates the model if no path is set."""

    def load(method: SkewMethod) -> SkewArtifact:
        if config.skew is not None:
            return load_artifact(config.skew, loaded.fingerprint, _skew_method(config.policy, config.policy_options))
        # Always show progress, because calibration takes long. Its result is cached.
        with Progress(enabled=True).bar(f"calibrating {loaded.name} (once)") as progress:
            return cached_artifact(loaded, method, progress=progress)

    return load


def _skew_method(policy: str, options: Mapping[str, Any]) -> SkewMethod | None:
    found: SkewMethod | None = options_class(policy).with_preset(options).get("skew")
    return found


def build_transfer(
    pool: HostPool, geometry: ModelGeometry, device: torch.device, working_set: int = 0, kv_memory: int = 0
) -> Transfer:
    """Return the object that copies KV between the pool and the device.

    On a CPU without a working set, nothing is copied: this object reads unquantised KV in place.

    Args:
        working_set: Number of fetched KV entries to keep on the device, per layer and KV head.
        kv_memory: Device memory for copies of KV blocks, in bytes.

    Raises:
        ConfigError, MemoryLimitError: The copies of KV blocks do not fit.
    """
    if pool.file is not None:
        return DiskTransfer(pool, geometry, device)
    if device.type != "cpu":
        blocks, in_place = _device_blocks(pool, device, kv_memory), _reads_in_place(pool)
        return CudaTransfer(
            pool, geometry, device, working_set=working_set, in_place=in_place, device_blocks=blocks
        )  # fmt: skip
    if pool.format.exact and not working_set:
        return CpuTransfer(pool, geometry)
    return CudaTransfer(pool, geometry, device, streams=(InlineStream(), InlineStream()), working_set=working_set)


def _device_blocks(pool: HostPool, device: torch.device, limit: int) -> int:
    if not limit:
        return 0
    size, free = copy_bytes(pool), torch.accelerator.get_memory_info(device)[0]
    if not 0 < size <= limit:
        needed = f"the copy of one block takes {format_size(size)}" if size else "all layers have sliding windows"
        raise ConfigError(f"device_kv_memory={format_size(limit)} holds no KV: {needed}; raise or remove it")
    blocks = min(limit // size, pool.block_count)
    if blocks * size > free:
        raise MemoryLimitError(
            f"device_kv_memory={format_size(limit)} does not fit: {format_size(free)} of device memory are free after "
            "loading the model; lower it"
        )
    return blocks


def _reads_in_place(pool: HostPool) -> bool:
    found = not pool.pins or reads_host_addresses()
    if not found:
        warnings.warn(
            "this device cannot read page-locked host memory at its host address (as on WSL 2): the host gathers KV "
            "before copying it, which is slower, and decode steps are not captured as CUDA graphs",
            stacklevel=2,
        )
    return found


def _stream_weights(loaded: LoadedModel, placement: Placement) -> tuple[LoadedModel, HostWeights | None]:
    """Create the streams that copy weights from host memory.

    The returned model waits for each copy before it uses the weights.
    """
    if not placement:
        return loaded, None
    device, adapter, stream = loaded.adapter.device, loaded.adapter, None
    experts = () if placement.experts is None else keep_experts(loaded.layers, placement.experts, device)
    if placement.layers:
        copies = InlineStream() if device.type == "cpu" else DeviceStream(device)
        stream = WeightStream(loaded.layers, placement.layers, device, copies)
        adapter = StreamedAdapter(adapter, stream)
    return replace(loaded, adapter=adapter), HostWeights(stream, tuple(experts), loaded.embedding)


def _check_launches(device: torch.device) -> None:
    # Launch a small kernel as a test, because Triton compiles C code to launch kernels.
    if device.type == "cpu":
        return
    one = torch.ones(1, 16, device=device)
    try:
        dispatch.rms_norm(one, one[0], 1e-6)
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise ConfigError(
            "Triton finds no C compiler, which it needs for launching kernels: install gcc or clang, or set "
            "the environment variable CC to one"
        ) from error
