"""What a model and a context will need, from shapes alone: nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import InfiniGenOptions, format_size
from ..core import CHUNK, ModelGeometry
from ..pool.machine import available_memory
from ..select.scoring import kept_columns

_BITS = {"int4": 4, "int2": 2}


@dataclass(frozen=True)
class Requirements:
    """Bytes for one sequence of `context` tokens.

    kv_per_token, kv_host: K and V in the host pool, of one token and of the whole chunks of the context.
    weights, scoring, resident, staging: on the device while decoding: weights, scoring keys, sinks and recent window,
        and the rows that a layer attends to, fetched and joined with the resident ones, while the next layer's arrive.
    prefill: on the device while prefilling, beside the weights and scoring keys: one layer's K and V of the context,
        and two hidden states `[N, D]`.
    """

    context: int
    kv_per_token: int
    kv_host: int
    weights: int
    scoring: int
    resident: int
    staging: int
    prefill: int

    @property
    def device(self) -> int:
        """The larger of what prefill and decoding need on the device."""
        return self.weights + self.scoring + max(self.prefill, self.resident + self.staging)


def requirements(
    geometry: ModelGeometry, weight_bytes: int, dtype: torch.dtype, context: int, options: InfiniGenOptions | None
) -> Requirements:
    """What `context` tokens of one sequence need; `options` None is policy "full", which selects nothing."""
    assert context >= 1
    layer_token = geometry.kv_bytes(1, dtype) // geometry.layers
    dense = range(geometry.layers) if options is None else options.dense_layers
    sinks, recent = (0, 1) if options is None else (options.sinks, options.recent)
    share = 1.0 if options is None else options.max_fraction
    fetched = [context if layer in dense else int(share * context) for layer in range(geometry.layers)]
    staged = max(2 * here + following for here, following in zip(fetched, [*fetched[1:], 0], strict=True))
    return Requirements(
        context=context,
        kv_per_token=layer_token * geometry.layers,
        kv_host=geometry.kv_bytes(-(-context // CHUNK) * CHUNK, dtype),
        weights=weight_bytes,
        scoring=0 if options is None else scoring_bytes(geometry, dtype, context, options),
        resident=(sinks + recent) * layer_token * geometry.layers,
        staging=staged * layer_token,
        prefill=context * (layer_token + 2 * geometry.hidden * dtype.itemsize),
    )


def scoring_bytes(geometry: ModelGeometry, dtype: torch.dtype, context: int, options: InfiniGenOptions) -> int:
    """Scoring keys of the layers that select; up to a sixteenth more is allocated as they grow."""
    layers = geometry.layers - len(set(options.dense_layers))
    kept = kept_columns(options.partial_ratio, geometry.head_dim)
    if options.scorer in _BITS:
        head = geometry.head_dim * _BITS[options.scorer] // 8
    else:
        head = kept * (1 if options.scorer == "int8" else dtype.itemsize)
    return layers * geometry.kv_heads * head * context


@dataclass(frozen=True)
class Machine:
    """What is free here, in bytes. `device` is the name of a device with memory of its own; without one, `device_free`
    is None and everything lies in host memory. `pool_limit` is what the host pool may take of `host_free`."""

    host_free: int
    pool_limit: int
    device: str | None = None
    device_free: int | None = None

    @classmethod
    def here(cls, host_memory: int | None, device: torch.device) -> Machine:
        """This machine computing on `device`, with the pool's limit (None: half of what is free, as `LLM` takes it)."""
        free = available_memory()
        limit = free // 2 if host_memory is None else host_memory
        if device.type != "cuda":
            return cls(free, limit)
        return cls(free, limit, torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0])


def obstacles(needed: Requirements, machine: Machine) -> list[str]:
    """Why it does not fit, a sentence each; empty where it fits."""
    found = []
    if needed.kv_host > machine.pool_limit:
        found.append(
            f"The KV cache needs {format_size(needed.kv_host)} and the host pool may take "
            f"{format_size(machine.pool_limit)}: raise --host-memory or shorten the context."
        )
    own_memory = machine.device_free is not None
    host = needed.kv_host + (0 if own_memory else needed.device)
    if host > machine.host_free:
        found.append(
            f"Host memory: {format_size(host)} needed{'' if own_memory else ' (this device shares it)'}, "
            f"{format_size(machine.host_free)} free."
        )
    if machine.device_free is not None and needed.device > machine.device_free:
        found.append(f"{machine.device}: {format_size(needed.device)} needed, {format_size(machine.device_free)} free.")
    return found
