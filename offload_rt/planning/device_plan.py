"""What lies on the device under a limit of its bytes (`device_memory`): decided before anything is loaded.

First choice: everything. Then weights give way. Of a mixture, experts: all are in host memory, and each layer has as
many on the device as fit. Then whole decoder layers, spread evenly so that the link never rests, stay in host memory
and stream through two buffers. Last, when not even two layers at a time leave room for them, the scoring
keys: they stay on the host and are scored there (InfiniGen §6.2), which is slower than any link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..config import EngineConfig
from ..core import CHUNK
from ..errors import DeviceFullError, MemoryLimitError
from ..kv_cache.disk.disk_tier import disk_limit
from ..kv_cache.machine import available_memory
from ..models.placement import Placement
from ..models.registry import ModelShape
from ..policies.registry import memory_demand
from ..transfer.weights.streamed import BUFFERS
from ..utils.units import format_size
from .memory_model import DeviceCosts
from .weight_placement import placements


@dataclass(frozen=True)
class DevicePlan:
    """`limit` bytes on the device hold `weights` bytes of weights (buffers for the `streamed` layers among them) and
    what the sequences that run take at most, as `costs` has it. `context` is how many tokens of one sequence the plan
    was made for."""

    limit: int
    costs: DeviceCosts
    context: int
    streamed: tuple[int, ...]

    @property
    def weights(self) -> int:
        """Bytes of weights and their buffers on the device."""
        return _weights(self.costs, self.streamed)

    @property
    def placement(self) -> Placement:
        """What of the weights stays in host memory."""
        return replace(self.costs.shape.placement, layers=self.streamed)

    @property
    def streamed_bytes(self) -> int:
        """What the streamed layers' weights take in host memory, and cross the link for every step of a batch."""
        return sum(self.costs.shape.sizes.layers[layer] for layer in self.streamed)

    @property
    def host_bytes(self) -> int:
        """What the host keeps for the device, besides the pool."""
        weights = self.streamed_bytes + self.costs.shape.host_bytes
        if not self.keys_on_host:
            return weights
        there = replace(self.costs, keys_on_host=False)
        return weights + there.basis() - self.costs.basis() + there.scoring(self.context)

    @property
    def keys_on_host(self) -> bool:
        """Whether scoring keys lie, and score, in host memory."""
        return self.costs.keys_on_host

    @property
    def room(self) -> int:
        """Bytes for everything that is no weight."""
        return self.limit - self.weights

    def beside(self, other: DevicePlan) -> bool:
        """Whether it has the same weights and scoring keys on the device."""
        return self.placement == other.placement and self.keys_on_host == other.keys_on_host

    def check(self, contexts: Sequence[int]) -> None:
        """Raises DeviceFullError where sequences with room for so many tokens could take more than the limit."""
        needed = self.costs.total([_slots(context) for context in contexts]) if contexts else 0
        if needed > self.room:
            who = f"{len(contexts)} sequences" if len(contexts) > 1 else "a sequence"
            raise DeviceFullError(
                f"device_memory={format_size(self.limit)} leaves {format_size(self.room)} beside the weights, and "
                f"{who} of up to {max(contexts):,} tokens may need {format_size(needed)}: raise device_memory, shorten "
                f"the prompt, or give a larger max_model_len, for which more layers' weights would stay on the host "
                f"(this plan is for {self.context:,} tokens)"
            )


def plan_device(limit: int, costs: DeviceCosts, context: int) -> DevicePlan:
    """The plan that keeps most weights on the device for one sequence of `context` tokens within `limit` bytes.

    Raises MemoryLimitError where none holds, with what is missing and what would fit.
    """
    layers = costs.shape.geometry.layers
    for keys_on_host in (False, True) if costs.demand.key_bytes else (False,):
        chosen = replace(costs, keys_on_host=keys_on_host)
        room = limit - chosen.total([_slots(context)])
        for count in (0, *range(BUFFERS + 1, layers + 1)):
            streamed = _spread(count, layers)
            if _weights(chosen, streamed) <= room:
                return DevicePlan(limit, chosen, context, streamed)
    raise MemoryLimitError(_too_small(limit, chosen, context))


def prefill_slices(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """How many prompt tokens may be computed together, the best number first: a device wants many, and products of a
    CPU gain nothing from more than 512."""
    if config.prefill_chunk_size is not None:
        return (config.prefill_chunk_size,)
    return (512,) if device.type == "cpu" else (2048, 1024, 512)


def costs_for(config: EngineConfig, shape: ModelShape) -> DeviceCosts:
    """What sequences take of the device under `config`, in slices of the best size. Raises ConfigError for the policy's
    options."""
    demand = memory_demand(config.policy, config.policy_options, shape.geometry, shape.dtype)
    rounded, best = config.kv_cache_dtype != "auto", prefill_slices(config, shape.device)[0]
    graphs = config.replays(shape.device.type)
    return DeviceCosts(shape, demand, best, rounded=rounded, working_set=config.working_set, graphs=graphs)


def plan_for(config: EngineConfig, shape: ModelShape) -> DevicePlan:
    """The plan of a runtime with `config.device_memory`. Raises ConfigError for the policy's options,
    MemoryLimitError."""
    assert config.device_memory is not None
    geometry = shape.geometry
    pool = config.host_memory or available_memory() // 2
    if config.disk is not None:
        pool = disk_limit(config.disk, config.disk_limit, pool)
    held = max(1, min(geometry.max_positions, pool // geometry.kv_bytes(1, shape.dtype)))
    limit, context = config.device_memory, config.max_model_len or held
    *larger, least = prefill_slices(config, shape.device)
    costs = replace(costs_for(config, shape), slice=least)
    several = [replace(costs, shape=shape.placed(placement)) for placement in placements(config, shape)]
    whole = (found for found in _plans(limit, several, context) if not (found.streamed or found.keys_on_host))
    plan = next(whole, None) or plan_device(limit, several[-1], context)
    sliced = [replace(plan.costs, slice=size, keys_on_host=False) for size in larger]
    plan = next((found for found in _plans(limit, sliced, context) if found.beside(plan)), plan)
    if plan.streamed and not shape.streams:
        raise MemoryLimitError(
            f"device_memory={format_size(plan.limit)} does not hold all weights beside {plan.context:,} tokens, and "
            f"packed ones ({shape.packing}, {format_size(shape.weight_bytes)}) are not brought over layer by layer: "
            "raise device_memory, or give a smaller max_model_len"
        )
    return plan


def _plans(limit: int, several: Sequence[DeviceCosts], context: int) -> Iterator[DevicePlan]:
    """The plans of those that have one."""
    for costs in several:
        with suppress(MemoryLimitError):
            yield plan_device(limit, costs, context)


def _spread(count: int, layers: int) -> tuple[int, ...]:
    """`count` of `layers` layers, evenly."""
    return tuple((2 * i + 1) * layers // (2 * count) for i in range(count))


def _slots(context: int) -> int:
    """The slots of whole chunks that so many tokens take."""
    return -(-context // CHUNK) * CHUNK


def _weights(costs: DeviceCosts, streamed: Sequence[int]) -> int:
    sizes = costs.shape.sizes
    staying = sum(size for layer, size in enumerate(sizes.layers) if layer not in streamed)
    return sizes.fixed + staying + (BUFFERS * max(sizes.layers[layer] for layer in streamed) if streamed else 0)


def _too_small(limit: int, costs: DeviceCosts, context: int) -> str:
    """The message of a limit under which nothing holds: `costs` with as little on the device as there can be."""
    layers = costs.shape.geometry.layers
    least = min(_weights(costs, _spread(count, layers)) for count in {0, layers} if count == 0 or count > BUFFERS)
    rest = costs.total([_slots(context)])
    where = ", scoring keys on the host" if costs.keys_on_host else ""
    message = (
        f"device_memory={format_size(limit)} cannot hold {context:,} tokens: even with as few weights on the device as "
        f"possible ({format_size(least)}: embeddings, head and {BUFFERS} layers at a time){where}, the tokens take "
        f"{format_size(rest)}; {format_size(least + rest - limit)} are missing"
    )
    fits = _longest(limit - least, costs, context)
    if fits:
        return f"{message}. Up to {fits:,} tokens would fit: pass max_model_len, or raise device_memory"
    return f"{message}. Not even one token fits: raise device_memory"


def _longest(room: int, costs: DeviceCosts, context: int) -> int:
    """The most tokens of one sequence, below `context`, that `room` bytes hold; 0 where none."""
    low, high = 0, context
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if costs.total([_slots(middle)]) <= room else (low, middle)
    return low
