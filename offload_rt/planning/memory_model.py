"""Memory requirements of a model and a context, computed from shapes alone. The model is not loaded.

Sizes on the device are upper bounds. `device_plan.py` uses them for `--device-memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..config import EngineConfig
from ..core import BLOCK_SIZE, RowShape, bucket, padded_batch
from ..kernels.causal import KEYS_AT_ONCE
from ..kv_cache.disk.file_layout import FileLayout, MemoryBudget, disk_limit
from ..kv_cache.kv_format import DECODE_BYTES, DECODED_AT_ONCE, make_kv_formats, stored_geometry
from ..kv_cache.layer_groups import LayerGroups
from ..kv_cache.system_memory import available_memory
from ..models.linear.packed import PACKED, TILE_WEIGHTS
from ..models.rotary import MAX_CACHED_POSITIONS
from ..models.shape import ModelShape
from ..policies.demand import MemoryDemand
from ..policies.growing import max_capacity
from ..policies.infinigen.scoring import PROMPT_KEYS_AT_ONCE, TOKENS_PER_BYTE
from ..skewing.calibrate import SLICE, TOKENS
from ..transfer.working_set import working_set_bytes
from ..utils.units import format_size
from .host_memory import divide_host_memory

STATE_COPIES = 6
"""Maximum number of temporary tensors with the size of a layer's recurrent state while one token is computed.

This holds for Mamba-2 without its package: the state from the slots, two discretised factors, their product with the
input, the decayed state and the new state.
"""

CUDA_WORKSPACE = 64 * 2**20  # bytes that cuBLAS allocates through torch on the largest devices, for two streams


@dataclass(frozen=True)
class DeviceCosts:
    """Upper bounds, in bytes, on the device memory that sequences use (weights not included)."""

    shape: ModelShape
    demand: MemoryDemand  # memory demand of the policy
    slice_tokens: int  # number of prompt tokens that are computed at once
    kv_quantised: bool = False  # whether fetched KV must be decoded
    keys_on_host: bool = False  # whether scoring keys are in host memory, so that the host scores tokens
    working_set: int = 0  # in each layer that selects tokens, fetched KV entries per KV head that stay on the device
    graphs: bool = False  # whether CUDA graphs of padded batches are captured; `total` then includes a second graph
    draft_tokens: int | None = None  # maximum number of draft tokens per sequence; None if lossless mode is off
    device_kv: int = 0  # memory for copies of KV blocks

    def basis(self) -> int:
        """Return the total size of the matrices that all scoring keys share and of the query corrections."""
        return self.demand.correction_bytes + (0 if self.keys_on_host else self.demand.basis_bytes)

    def fixed(self) -> int:
        """Return the size of everything that does not depend on the context: `basis`, RoPE of one slice, cuBLAS
        workspaces.
        """
        workspace = CUDA_WORKSPACE if self.shape.device.type == "cuda" else 0
        return self.basis() + self._rope_bytes(self.slice_tokens) + workspace

    def _rope_bytes(self, tokens: int) -> int:
        return 2 * tokens * self.shape.geometry.head_dim * self.shape.dtype.itemsize

    @cached_property
    def _largest_rows(self) -> RowShape:
        geometry, size = self.shape.geometry, self.shape.dtype
        return max((geometry.rows(layer) for layer in range(geometry.layers)), key=lambda rows: rows.bytes(size))

    def scoring(self, context: int) -> int:
        """Return the size of one sequence's scoring keys, assuming that it shares none with other sequences."""
        if self.keys_on_host:
            return 0
        layers = self.demand.scored_layers(self.shape.geometry)
        if page := self.demand.page_tokens:
            return self.demand.scoring_bytes(layers, -(-context // page) * page)
        # Each layer has a growing buffer with spare capacity. While one buffer grows, its old memory is still
        # allocated.
        capacity = max_capacity(context, max(TOKENS_PER_BYTE, self.demand.slot_tokens))
        return self.demand.scoring_bytes(layers + 1, capacity) + self.demand.sequence_bytes

    @property
    def working_set_bytes(self) -> int:
        geometry = self.shape.geometry
        return self.demand.scored_layers(geometry) * working_set_bytes(self.working_set, geometry, self.shape.dtype)

    @property
    def resident(self) -> int:
        """Size of a sequence's sinks, recent window, sliding windows and working sets."""
        geometry = self.shape.geometry
        rows = (
            sum(geometry.resident(layer, 0, self.demand.resident)) * geometry.rows(layer).bytes(self.shape.dtype)
            for layer in geometry.kv_layers
        )
        return sum(rows) + self.working_set_bytes

    def states(self, sequences: int) -> int:
        """Return the size of the recurrent state of `sequences` sequences.

        In lossless mode, this includes a second state per sequence (`RollbackState`) and recorded inputs.
        """
        geometry, itemsize = self.shape.geometry, self.shape.dtype.itemsize
        # The number of slots grows by a quarter at a time (`StateSlots`).
        slots = (sequences + sequences // 4) * geometry.state_bytes(self.shape.dtype)
        if self.draft_tokens is None:
            return slots
        return 2 * slots + sequences * (self.draft_tokens + 1) * len(geometry.states) * geometry.hidden * itemsize

    def fetched(self, context: int, layer: int) -> int:
        """Return the maximum number of tokens that `layer` fetches: 0 for sliding layers, and if `layer` is past the
        last layer.
        """
        if layer == self.shape.geometry.layers or self.shape.geometry.windows[layer] is not None:
            return 0
        if layer in self.demand.dense:
            return context
        return max(1, int(self.demand.fetched_fraction * context), min(context, self.demand.always_dense_until))

    def h2d_bytes(self, context: int) -> int:
        """Return the maximum size of the KV that is copied to the device in one step of one sequence."""
        geometry = self.shape.geometry
        rows = sum(self.fetched(context, layer) for layer in range(geometry.layers))
        return rows * geometry.full_rows.bytes(self.shape.dtype)

    def _padded(self, contexts: Sequence[int]) -> Sequence[int]:
        if self.shape.device.type == "cpu" or self.keys_on_host or len(self.demand.dense) == self.shape.geometry.layers:
            return contexts
        sequences = padded_batch(len(contexts)) if self.graphs else len(contexts)
        return sequences * [bucket(max(contexts))]

    def staging(self, contexts: Sequence[int]) -> int:
        """Return the size of the KV fetched for the current and the next layer, including its indices.

        The size includes a buffer for the fetched and resident KV of one sequence. If the KV cache is quantised, it
        also includes the decoded KV of this sequence (on CUDA, of all sequences), and temporary memory for decoding.
        """
        contexts = self._padded(contexts)
        geometry = self.shape.geometry
        index_bytes = 8 * 8 * geometry.kv_heads
        stored, used = self._stored_bytes + index_bytes, geometry.full_rows.bytes(self.shape.dtype) + index_bytes
        most = 0
        for layer in range(geometry.layers):
            fetched = [self.fetched(context, layer) for context in contexts]
            next_fetched = sum(self.fetched(context, layer + 1) for context in contexts)
            merged = max(fetched, default=0) * used
            if self.kv_quantised:
                decoded = max(fetched, default=0) if self.shape.device.type == "cpu" else sum(fetched)
                merged = decoded * used + max(merged, self._decoding(decoded))
            most = max(most, (sum(fetched) + next_fetched) * stored + self.demand.resident * used + merged)
        return most

    @cached_property
    def _stored_bytes(self) -> int:
        """Size in bytes of a token's KV in a full-attention layer of the KV cache, with at most 8 bits if quantised."""
        geometry, dtype = self.shape.geometry, self.shape.dtype
        if not self.kv_quantised:
            return geometry.full_rows.bytes(dtype)
        return stored_geometry(geometry, make_kv_formats("int8", dtype, geometry)).full_rows.bytes(torch.uint8)

    def _decoding(self, tokens: int) -> int:
        """Return the size of the temporary memory for decoding quantised KV of `tokens` tokens of one layer."""
        elements = tokens * self._largest_rows.bytes(self.shape.dtype) // self.shape.dtype.itemsize
        return min(elements, DECODED_AT_ONCE) * DECODE_BYTES if self.kv_quantised else 0

    def prefill(self, context: int) -> int:
        return self._prefill_layer_bytes(context) + self._rope_bytes(  # `fixed` contains the RoPE of one slice
            max(0, min(context, MAX_CACHED_POSITIONS * self.slice_tokens) - self.slice_tokens)
        )

    def _prefill_layer_bytes(self, context: int) -> int:
        geometry, size, compute = self.shape.geometry, self.shape.dtype.itemsize, self._widest_itemsize
        rows = context * (2 * self._largest_rows.bytes(self.shape.dtype) + geometry.hidden * size + 16)
        # KV that later layers use stays in memory until the last layer.
        rows += context * sum(geometry.rows(layer).bytes(self.shape.dtype) for layer in geometry.shared_kv)
        heads = geometry.heads * geometry.head_dim
        # Norms use a wider dtype. An MLP has its gate, both factors and their product in memory at once. Attention to
        # earlier tokens and attention to the slice are merged in the wider dtype.
        mlp = 4 * geometry.hidden * compute + 4 * self.shape.sizes.widest * size
        attention = 3 * geometry.hidden * compute + heads * (5 * size + 3 * compute)
        # torch has no fused kernel for sinks and soft caps, so scores, attention weights and a mask of that size are in
        # memory.
        if geometry.sinks or geometry.softcap is not None:
            key_count = min(context, KEYS_AT_ONCE)
            group = max(geometry.group, geometry.heads // self._largest_rows.kv_heads)
            attention += key_count * (geometry.heads * (2 * compute + size) + group * (8 + 3))
            attention += 2 * heads * compute
        else:
            attention += self._mask_bytes(context)
        policy_bytes = 0
        if self.demand.key_bytes:
            key_count = min(context, PROMPT_KEYS_AT_ONCE)
            policy_bytes = key_count * geometry.kv_heads * geometry.head_dim * (4 * compute + 4)
        weight_bytes = 0
        if self.demand.max_prefill_weights:
            queries = min(context, self.slice_tokens) * geometry.group
            weight_bytes = min(self.demand.max_prefill_weights, queries * context) * (2 * compute + 10)
        work = max(min(context, self.slice_tokens) * max(mlp, attention), policy_bytes)
        work += self._decoding(context)
        return rows + weight_bytes + work + self._logits_bytes(1) + self._unpacked_bytes()

    def _mask_bytes(self, context: int) -> int:
        """Return the size of one token's row in the mask of the longest sliding window, on a GPU."""
        geometry = self.shape.geometry
        longest = max((window for window in geometry.windows if window is not None and window < context), default=0)
        if not longest or geometry.chunked or self.shape.device.type == "cpu":
            return 0
        # torch converts the mask to the model's dtype and copies it once more to align its rows.
        return min(context, longest + self.slice_tokens) * (1 + 2 * self.shape.dtype.itemsize)

    def _unpacked_bytes(self) -> int:
        """Return the size of one tile of unpacked weights on a GPU and of its products."""
        shape = self.shape
        if shape.packing != PACKED.method or shape.device.type == "cpu":
            return 0
        largest = max(shape.sizes.widest, shape.geometry.vocab) * shape.geometry.hidden
        tile = min(TILE_WEIGHTS, largest)
        return (tile + self.slice_tokens * -(-tile // shape.geometry.hidden)) * shape.dtype.itemsize

    def calibration(self) -> int:
        """Return the size of the memory that calibration uses, or 0 if there is no calibration."""
        # The float64 sums of a slice need no additional memory, because attention and MLP need more.
        if not self.demand.correction_bytes + self.demand.basis_bytes:
            return 0
        return replace(self, slice_tokens=max(self.slice_tokens, SLICE))._prefill_layer_bytes(TOKENS)

    def decode(self, contexts: Sequence[int]) -> int:
        """Return the size of a decode step's hidden states, logits, scores, attention weights and copies of state."""
        geometry, compute, contexts = self.shape.geometry, self._widest_itemsize, self._padded(contexts)
        elements = 12 * geometry.hidden + 6 * self.shape.sizes.widest + 12 * geometry.heads * geometry.head_dim
        longest, scored = max(contexts, default=0), 0
        scored_sequences = len(contexts) if self.shape.device.type != "cpu" else 1  # at a time
        if len(self.demand.dense) < geometry.layers and not self.keys_on_host:
            # Scores, selection masks, maxima per group, their sorted values and indices.
            scored = longest * (geometry.heads * (3 * compute + 2) + geometry.kv_heads * (3 * compute + 32))
            scored += longest * geometry.kv_heads * geometry.head_dim  # masked or unpacked keys
            scored += int(longest * self.demand.scratch_bytes)
            scored *= scored_sequences
        scored = max(scored, self.working_set * geometry.kv_heads * 64)  # A working set sorts its slots twice.
        resident = (sum(geometry.resident(layer, 0, self.demand.resident)) for layer in range(geometry.layers))
        attended = max(self.fetched(longest, layer) + resident_tokens for layer, resident_tokens in enumerate(resident))
        weights = attended * geometry.heads * 4 * compute * scored_sequences
        state_bytes = max((state.bytes(self.shape.dtype) for state in geometry.states), default=0)
        return (
            len(contexts) * (elements * compute + STATE_COPIES * state_bytes)
            + self._logits_bytes(len(contexts))
            + max(scored, weights)
            + self._unpacked_bytes()
        )

    def total(self, contexts: Sequence[int]) -> int:
        """Return the total size for concurrent sequences of the lengths `contexts`, including a prefill of the
        longest.
        """
        permanent = self.fixed() + sum(self.scoring(context) + self.resident for context in contexts)
        permanent += self.states(len(contexts)) + self.device_kv
        step = self.staging(contexts) + self.decode(contexts)
        return permanent + max(self.prefill(max(contexts)), self.calibration(), step) + (step if self.graphs else 0)

    @property
    def _widest_itemsize(self) -> int:
        return torch.promote_types(self.shape.dtype, torch.float32).itemsize

    def _logits_bytes(self, sequences: int) -> int:
        vocab, wide = self.shape.geometry.vocab, self._widest_itemsize
        return vocab * (sequences * (self.shape.dtype.itemsize + 2 * wide) + 6 * wide + 16)


@dataclass(frozen=True)
class Requirements:
    """Memory requirements of one sequence of `context` tokens.

    All sizes are in bytes and refer to the device unless noted.
    """

    context: int
    kv_per_token: int  # KV cache per token in host memory or on disk, full-attention layers only
    kv_host: int  # KV cache of the context in host memory or on disk, in whole blocks
    weights: int
    scoring: int  # scoring keys, their bases and constant buffers
    resident: int  # sinks, recent window and sliding windows
    working_set: int
    staging: int  # fetched KV of the current layer (merged with the resident KV) and of the next layer
    decode: int  # hidden states, scores, attention weights and logits while decoding
    prefill: int  # temporary memory of a prefill, which needs neither `staging` nor `decode`
    graphs: int = 0  # captured CUDA graphs, except the graph that is running
    states: int = 0  # recurrent state of a hybrid model, which does not depend on the context
    snapshots: int = 0  # limit on snapshots of recurrent state in host memory
    device_kv: int = 0  # memory for copies of KV blocks

    @property
    def device(self) -> int:
        """Required device memory, for either prefill or decoding, whichever needs more."""
        permanent = self.weights + self.scoring + self.resident + self.working_set + self.graphs + self.states
        permanent += self.device_kv
        return permanent + max(self.prefill, self.staging + self.decode)


def requirements(costs: DeviceCosts, weights: int, context: int, max_graphs: int = 1) -> Requirements:
    """Return the memory requirements of one sequence of `context` tokens.

    `weights` is the size in bytes of the weights on the device. `max_graphs` is the maximum number of CUDA graphs.
    """
    assert context >= 1
    geometry, dtype = costs.shape.geometry, costs.shape.dtype
    groups, staging, decode = LayerGroups.from_geometry(geometry), costs.staging([context]), costs.decode([context])
    return Requirements(
        context=context,
        kv_per_token=len(set(geometry.kv_layers) - set(geometry.sliding)) * geometry.full_rows.bytes(dtype),
        kv_host=groups.blocks(context) * groups.layers * BLOCK_SIZE * geometry.full_rows.bytes(dtype),
        weights=weights,
        scoring=costs.fixed() + costs.scoring(context),
        resident=costs.resident - costs.working_set_bytes,
        working_set=costs.working_set_bytes,
        staging=staging,
        decode=decode,
        prefill=costs.prefill(context),
        graphs=max_graphs * (staging + decode) if costs.graphs else 0,
        states=costs.states(1),
        device_kv=costs.device_kv,
    )


@dataclass(frozen=True)
class DiskPlan:
    limit: int  # maximum file size in bytes
    budget: MemoryBudget  # division of host memory


def disk_plan(config: EngineConfig, shape: ModelShape) -> DiskPlan | None:
    """Return the plan for the KV cache on disk, or None if there is none.

    Raise MemoryLimitError if a limit does not fit.
    """
    if config.disk is None:
        return None
    host = divide_host_memory(config, shape.geometry, shape.dtype).kv
    formats = make_kv_formats(config.kv_cache_dtype, shape.dtype, shape.geometry)
    limit = disk_limit(config.disk, config.disk_limit, host)
    layout = FileLayout.fit(limit, stored_geometry(shape.geometry, formats), formats[0])
    return DiskPlan(limit, MemoryBudget.divide(host, layout))


@dataclass(frozen=True)
class SystemMemory:
    host_free: int
    pool_limit: int  # maximum size of the KV cache in host memory
    device: str | None = None  # name of a device with separate memory
    device_free: int | None = None
    disk_limit: int | None = None  # maximum size of the KV cache on disk; None if it is in memory

    @classmethod
    def measure(cls, host_memory: int | None, device: torch.device, disk_limit: int | None = None) -> SystemMemory:
        """Return the free memory. If `host_memory` is None, `pool_limit` is half of the free host memory."""
        free = available_memory()
        limit = free // 2 if host_memory is None else host_memory
        if device.type == "cpu":
            return cls(free, limit, disk_limit=disk_limit)
        name = torch.get_device_module(device).get_device_name(device)
        return cls(free, limit, name, torch.accelerator.get_memory_info(device)[0], disk_limit)


def obstacles(needed: Requirements, memory: SystemMemory, on_host: int = 0) -> list[str]:
    """Return a sentence for each kind of memory that is too small.

    `on_host` is the size in bytes of the weights and scoring keys that are kept in host memory.
    """
    reasons = []
    host_kv = needed.kv_host
    if memory.disk_limit is not None:
        host_kv = memory.pool_limit
        if needed.kv_host > memory.disk_limit:
            reasons.append(
                f"The KV cache needs {format_size(needed.kv_host)} and the pool on disk may take "
                f"{format_size(memory.disk_limit)}: raise --disk-limit or shorten the context."
            )
    elif needed.kv_host > memory.pool_limit:
        reasons.append(
            f"The KV cache needs {format_size(needed.kv_host)} and the host pool may take "
            f"{format_size(memory.pool_limit)}: raise --host-memory, shorten the context, or put it on a disk "
            f"with --disk."
        )
    has_device_memory = memory.device_free is not None
    host = host_kv + needed.snapshots + on_host + (0 if has_device_memory else needed.device)
    if host > memory.host_free:
        reasons.append(
            f"Host memory: {format_size(host)} needed{'' if has_device_memory else ' (this device shares it)'}, "
            f"{format_size(memory.host_free)} free."
        )
    if memory.device_free is not None and needed.device > memory.device_free:
        reasons.append(
            f"{memory.device}: {format_size(needed.device)} needed, {format_size(memory.device_free)} free; with "
            f"--device-memory {format_size(memory.device_free).replace(' ', '')} weights that do not fit are streamed."
        )
    return reasons
