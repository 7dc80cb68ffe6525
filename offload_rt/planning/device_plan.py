"""Plan how to use the device memory within a limit (`device_memory`), before the model is loaded.

If not all data fits, the plan moves data to host memory in this order:

1. Experts of mixture-of-experts layers. Each layer caches as many experts on the device as fit.
2. Decoder layers. Their weights are streamed through two buffers.
3. Scoring keys, if they do not fit on the device together with two decoder layers. The host then computes the scores
   (InfiniGen §6.2), which is slower than any transfer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..config import EngineConfig
from ..core import BLOCK_SIZE, ModelGeometry
from ..errors import ConfigError, DeviceFullError, MemoryLimitError
from ..kv_cache.disk.file_layout import disk_limit
from ..kv_cache.kv_format import make_kv_formats, stored_geometry
from ..kv_cache.layer_groups import LayerGroups
from ..models.shape import ModelShape
from ..models.weights import Placement
from ..policies.registry import memory_demand
from ..transfer.weights.streamed import BUFFERS
from ..utils.units import format_size
from .host_memory import divide_host_memory
from .memory_model import DeviceCosts


@dataclass(frozen=True)
class DevicePlan:
    """How `limit` bytes of device memory are divided between weights and running sequences (see `plan_device`)."""

    limit: int
    costs: DeviceCosts
    context: int  # the plan was made for a sequence of this many tokens
    streamed: tuple[int, ...]  # layers whose weights are streamed from host memory

    @property
    def weights(self) -> int:
        """Size in bytes of the weights, expert slots and streaming buffers on the device."""
        return _weights(self.costs, self.streamed)

    @property
    def placement(self) -> Placement:
        return replace(self.costs.shape.placement, layers=self.streamed)

    @property
    def streamed_bytes(self) -> int:
        """Size in bytes of the weights that every step copies to the device."""
        return sum(self.costs.shape.sizes.layers[layer] for layer in self.streamed)

    @property
    def host_bytes(self) -> int:
        weights = self.streamed_bytes + self.costs.shape.host_bytes
        if not self.keys_on_host:
            return weights
        on_device = replace(self.costs, keys_on_host=False)
        return weights + on_device.basis() - self.costs.basis() + on_device.scoring(self.context)

    @property
    def keys_on_host(self) -> bool:
        return self.costs.keys_on_host

    @property
    def free_bytes(self) -> int:
        return self.limit - self.weights

    def check(self, contexts: Sequence[int]) -> None:
        """Raise DeviceFullError if concurrent sequences with these lengths could exceed the limit."""
        needed = self.costs.total([_round_to_blocks(context) for context in contexts]) if contexts else 0
        if needed > self.free_bytes:
            subject = f"{len(contexts)} sequences" if len(contexts) > 1 else "a sequence"
            raise DeviceFullError(
                f"device_memory={format_size(self.limit)} leaves {format_size(self.free_bytes)} after the weights, and "
                f"{subject} of up to {max(contexts):,} tokens may need {format_size(needed)}: raise device_memory, "
                f"shorten the prompt, or set a larger max_model_len, so that more weights stay in host memory (this "
                f"plan is for {self.context:,} tokens)"
            )


def plan_device(limit: int, costs: DeviceCosts, context: int) -> DevicePlan:
    """Return the plan that keeps the most weights on the device and fits one sequence of `context` tokens.

    Raises MemoryLimitError if no plan fits in `limit` bytes.
    """
    layers = len(costs.shape.sizes.layers)
    for keys_on_host in (False, True) if costs.demand.key_bytes else (False,):
        chosen = replace(costs, keys_on_host=keys_on_host)
        available = limit - chosen.total([_round_to_blocks(context)])
        for count in (0, *range(BUFFERS + 1, layers + 1)):
            streamed = _evenly_spaced(count, layers, costs.shape.geometry)
            if _weights(chosen, streamed) <= available:
                return DevicePlan(limit, chosen, context, streamed)
    raise MemoryLimitError(_too_small_message(limit, chosen, context))


def prefill_slices(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """Return the prefill chunk sizes, in tokens, that a plan may use.

    The largest, which is the fastest, comes first.
    """
    if config.prefill_chunk_size is not None:
        return (config.prefill_chunk_size,)
    return (512,) if device.type == "cpu" else (2048, 1024, 512)


def costs_for(config: EngineConfig, shape: ModelShape) -> DeviceCosts:
    """Return the memory costs with the largest prefill chunk size. Raise ConfigError if an option is invalid."""
    check_device_kv(config, shape.device)
    demand = memory_demand(config.policy, config.policy_options, shape.geometry, shape.dtype)
    return DeviceCosts(
        shape,
        demand,
        slice_tokens=prefill_slices(config, shape.device)[0],
        kv_quantised=config.kv_cache_dtype != "auto",
        working_set=config.working_set,
        graphs=config.replays(shape.device.type),
        draft_tokens=None if config.exact is None else config.exact.tokens,
        device_kv=config.device_kv_memory or 0,
    )


def check_device_kv(config: EngineConfig, device: torch.device) -> None:
    if config.device_kv_memory is not None and device.type == "cpu":
        raise ConfigError(
            "device_kv_memory keeps copies of KV in the memory of a GPU, and this device is a CPU, which reads KV in "
            "host memory: remove device_kv_memory"
        )


def plan_for(config: EngineConfig, shape: ModelShape) -> DevicePlan:
    """Return the plan for the device memory limit in `config`.

    Raises MemoryLimitError if no plan fits, and ConfigError if a policy option or the placement is invalid.
    """
    assert config.device_memory is not None
    geometry = shape.geometry
    pool = divide_host_memory(config, geometry, shape.dtype).kv
    if config.disk is not None:
        pool = disk_limit(config.disk, config.disk_limit, pool)
    limit, context = config.device_memory, config.max_model_len or _capacity(config, shape, pool)
    *larger_slices, smallest_slice = prefill_slices(config, shape.device)
    costs = replace(costs_for(config, shape), slice_tokens=smallest_slice)
    candidates = [replace(costs, shape=shape.with_placement(placement)) for placement in _placements(config, shape)]
    plans = (plan for plan in _plans_within(limit, candidates, context) if not (plan.streamed or plan.keys_on_host))
    plan = next(plans, None) or plan_device(limit, candidates[-1], context)
    faster = [replace(plan.costs, slice_tokens=size, keys_on_host=False) for size in larger_slices]
    plans = (other for other in _plans_within(limit, faster, context) if other.placement == plan.placement)
    plan = next((other for other in plans if other.keys_on_host == plan.keys_on_host), plan)
    if plan.streamed and not shape.streams:
        raise MemoryLimitError(
            f"device_memory={format_size(plan.limit)} does not hold all weights and {plan.context:,} tokens, and "
            f"packed weights ({shape.packing}, {format_size(shape.weight_bytes)}) cannot be streamed layer by layer: "
            "raise device_memory, or give a smaller max_model_len"
        )
    return plan


def _capacity(config: EngineConfig, shape: ModelShape, pool: int) -> int:
    """Return how many tokens of one sequence fit in a pool of `pool` bytes, at most the model's context length."""
    formats = make_kv_formats(config.kv_cache_dtype, shape.dtype, shape.geometry)
    stored = stored_geometry(shape.geometry, formats)
    groups = LayerGroups.from_geometry(stored)
    blocks = pool // (groups.layers * BLOCK_SIZE * stored.full_rows.bytes(formats[0].storage))
    return max(1, bisect_right(range(1, stored.max_positions + 1), blocks, key=groups.blocks))


def requested_placement(config: EngineConfig, shape: ModelShape) -> Placement:
    """Return the placement that `config` requests.

    Raise ConfigError if the model does not have the weights to place.
    """
    sizes, slots = shape.sizes, config.experts_on_device
    if slots is not None and sizes.experts is None:
        packed = f" with separate weights (they are packed: {shape.packing})" if shape.packing else ""
        raise ConfigError(
            f"experts_on_device={slots}, but this model has no mixture of experts{packed}: remove experts_on_device"
        )
    if config.embedding_on_host and not sizes.embedding:
        raise ConfigError(
            "embedding_on_host is not possible, because this model's head is its embedding (tied weights), which every "
            "token reads on the device: remove embedding_on_host"
        )
    resident_experts = None if slots is None or sizes.experts is None or slots >= sizes.experts.count else slots
    return Placement(experts=resident_experts, embedding=config.embedding_on_host)


def _placements(config: EngineConfig, shape: ModelShape) -> Iterator[Placement]:
    requested, experts = requested_placement(config, shape), shape.sizes.experts
    yield requested
    if config.experts_on_device is None and experts is not None:
        for slots in range(experts.count - 1, 0, -1):
            yield replace(requested, experts=slots)


def _plans_within(limit: int, candidates: Sequence[DeviceCosts], context: int) -> Iterator[DevicePlan]:
    for costs in candidates:
        with suppress(MemoryLimitError):
            yield plan_device(limit, costs, context)


def _evenly_spaced(count: int, layers: int, geometry: ModelGeometry) -> tuple[int, ...]:
    """Choose `count` evenly spaced layers to stream. Layers without attention are preferred."""
    # If streamed layers are evenly spaced, their transfers overlap with computation. The weights of an attention layer
    # are already needed several layers earlier, to predict its query. If they were streamed, they would replace the
    # weights of an earlier layer, and both would be copied twice.
    attention = geometry.attention_at or tuple(range(layers))
    chosen, remaining = list[int](), count
    for kind in ([layer for layer in range(layers) if layer not in attention], attention):
        selected = min(remaining, len(kind))
        chosen += [kind[(2 * i + 1) * len(kind) // (2 * selected)] for i in range(selected)]
        remaining -= selected
    return tuple(sorted(chosen))


def _round_to_blocks(context: int) -> int:
    return -(-context // BLOCK_SIZE) * BLOCK_SIZE


def _weights(costs: DeviceCosts, streamed: Sequence[int]) -> int:
    sizes = costs.shape.sizes
    resident = sum(size for layer, size in enumerate(sizes.layers) if layer not in streamed)
    return sizes.fixed + resident + (BUFFERS * max(sizes.layers[layer] for layer in streamed) if streamed else 0)


def _too_small_message(limit: int, costs: DeviceCosts, context: int) -> str:
    layers = len(costs.shape.sizes.layers)
    counts = {0, layers} if layers > BUFFERS else {0}
    min_weights = min(_weights(costs, _evenly_spaced(count, layers, costs.shape.geometry)) for count in counts)
    other_bytes = costs.total([_round_to_blocks(context)])
    keys_note = ", scoring keys on the host" if costs.keys_on_host else ""
    message = (
        f"device_memory={format_size(limit)} cannot hold {context:,} tokens: even with as few weights on the device as "
        f"possible ({format_size(min_weights)}: embeddings, head and {BUFFERS} layers at a time){keys_note}, the "
        f"tokens take {format_size(other_bytes)}; {format_size(min_weights + other_bytes - limit)} are missing"
    )
    longest = _longest_fitting(limit - min_weights, costs, context)
    if longest:
        return f"{message}. Up to {longest:,} tokens would fit: pass max_model_len, or raise device_memory"
    return f"{message}. Not even one token fits: raise device_memory"


def _longest_fitting(available: int, costs: DeviceCosts, context: int) -> int:
    low, high = 0, context
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs.total([_round_to_blocks(middle)]) <= available else (low, middle)
    return low
