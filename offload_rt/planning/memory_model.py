"""What a model and a context will need, from shapes alone: nothing is loaded. What is said of the device is an upper
bound, part by part, that `--device-memory` plans with (`device_plan.py`) and a test holds against an allocator that
counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..core import CHUNK, bucket, padded_batch
from ..kernels.causal import KEYS_AT_ONCE
from ..kv_cache.layer_groups import LayerGroups
from ..kv_cache.machine import available_memory
from ..models.registry import ModelShape
from ..policies.demand import MemoryDemand
from ..policies.growing import most_slots
from ..policies.infinigen.scoring import LEARNED_AT_ONCE, TOKENS_PER_BYTE
from ..skewing.calibrate import SLICE, TOKENS
from ..transfer.working_set import working_set_bytes
from ..utils.units import format_size

CUDA_WORKSPACE = 64 * 2**20
"""What torch allocates for cuBLAS on two streams of the largest devices."""


@dataclass(frozen=True)
class DeviceCosts:
    """Upper bounds of what lies on the device besides the weights, in bytes.

    `slice` is the number of prompt tokens whose queries, attention and MLP are computed together; `rounded` says that
    rows are stored in a format that has to be decoded, `keys_on_host` that scoring keys, and scoring, are on the
    host, `graphs` that steps of rounded batch sizes are captured, one of which keeps the memory of its step."""

    shape: ModelShape
    demand: MemoryDemand
    slice: int
    rounded: bool = False
    keys_on_host: bool = False
    working_set: int = 0
    """Fetched rows of each KV head and selecting layer that stay."""
    graphs: bool = False

    def basis(self) -> int:
        """What scoring has, whatever the context."""
        return self.demand.guess_bytes + (0 if self.keys_on_host else self.demand.basis_bytes)

    def fixed(self) -> int:
        """What there is whatever runs: bases; cos and sin of a slice; on CUDA the workspaces of cuBLAS."""
        rotation = 2 * self.slice * self.shape.geometry.head_dim * self.shape.dtype.itemsize
        return self.basis() + rotation + (CUDA_WORKSPACE if self.shape.device.type == "cuda" else 0)

    def scoring(self, context: int) -> int:
        """Scoring keys of a sequence, as if it shared none: its pages; or, where they grow, with what they allocate
        ahead, one layer at a time twice."""
        if self.keys_on_host:
            return 0
        if page := self.demand.key_page:
            return self.demand.scoring_bytes(self.shape.geometry.layers, -(-context // page) * page)
        return self.demand.scoring_bytes(self.shape.geometry.layers + 1, most_slots(context, TOKENS_PER_BYTE))

    @property
    def working_set_bytes(self) -> int:
        """The working sets of a sequence, one in each layer that selects."""
        geometry = self.shape.geometry
        selecting = geometry.layers - len(self.demand.dense)
        return selecting * working_set_bytes(self.working_set, geometry, self.shape.dtype)

    @property
    def resident(self) -> int:
        """Sinks, recent window and working set of a sequence; of sliding layers their windows."""
        geometry = self.shape.geometry
        tokens = sum(sum(geometry.resident(layer, 0, self.demand.resident)) for layer in range(geometry.layers))
        return tokens * geometry.kv_bytes(1, self.shape.dtype) // geometry.layers + self.working_set_bytes

    def fetched(self, context: int, layer: int) -> int:
        """The most tokens that a layer of a sequence fetches; past the last layer none, and what slides is resident."""
        if layer == self.shape.geometry.layers or self.shape.geometry.windows[layer] is not None:
            return 0
        if layer in self.demand.dense:
            return context
        return max(1, int(self.demand.share * context), min(context, self.demand.whole))

    def link_bytes(self, context: int) -> int:
        """The most that crosses the link for one step of a sequence: rows as the model has them."""
        geometry = self.shape.geometry
        rows = sum(self.fetched(context, layer) for layer in range(geometry.layers))
        return rows * geometry.kv_bytes(1, self.shape.dtype) // geometry.layers

    def _padded(self, contexts: Sequence[int]) -> Sequence[int]:
        """The slots that a batch takes together (`forward/batched.py`): as many for each as for the longest."""
        if self.shape.device.type == "cpu" or self.keys_on_host or not self.demand.key_bytes:
            return contexts
        sequences = padded_batch(len(contexts)) if self.graphs else len(contexts)
        return sequences * [bucket(max(contexts))]

    def staging(self, contexts: Sequence[int]) -> int:
        """Rows of the layer that attends and of the next, of each of a batch; one sequence's joined with the resident
        ones (and decoded, first), or on CUDA all decoded; with their ids."""
        contexts = self._padded(contexts)
        geometry = self.shape.geometry
        pair = geometry.kv_bytes(1, self.shape.dtype) // geometry.layers + 8 * 8 * geometry.kv_heads
        copies = 2 if self.rounded else 1
        worst = 0
        for layer in range(geometry.layers):
            here = [self.fetched(context, layer) for context in contexts]
            following = sum(self.fetched(context, layer + 1) for context in contexts)
            decoded = (copies - 1) * sum(here) if self.shape.device.type != "cpu" else 0
            copied = max(copies * max(here, default=0), decoded)
            worst = max(worst, sum(here) + following + copied + self.demand.resident)
        return worst * pair

    def prefill(self, context: int) -> int:
        """A prompt's hidden states, one layer's K and V as they are made and joined to what was there, and one slice's
        work."""
        geometry, size, compute = self.shape.geometry, self.shape.dtype.itemsize, self._compute
        rows = context * (2 * geometry.kv_bytes(1, self.shape.dtype) // geometry.layers + geometry.hidden * size + 16)
        heads = geometry.heads * geometry.head_dim
        # Norms widen, an MLP has its gate, both factors and their product at once; attention over what was there
        # before and over the slice are two results, merged in the wider dtype.
        mlp = 4 * geometry.hidden * compute + 4 * self.shape.sizes.widest * size
        attention = 3 * geometry.hidden * compute + heads * (5 * size + 3 * compute)
        if geometry.sinks or geometry.softcap is not None:  # no kernel of torch's: scores, weights, and a mask of each
            at_once = min(context, KEYS_AT_ONCE)
            attention += at_once * (geometry.heads * (2 * compute + size) + geometry.group * (8 + 3))
            attention += 2 * heads * compute
        learned = 0
        if self.demand.key_bytes:
            at_once = min(context, LEARNED_AT_ONCE)
            learned = at_once * geometry.kv_heads * geometry.head_dim * (4 * compute + 4)
        weighed = 0
        if self.demand.weights_at_once:
            queries = min(context, self.slice) * geometry.group
            weighed = min(self.demand.weights_at_once, queries * context) * (2 * compute + 10)
        work = max(min(context, self.slice) * max(mlp, attention), learned)
        return rows + weighed + work + self._logits(1)

    def calibration(self) -> int:
        """What a first start takes, before there is a sequence: a pass over the calibration's text, whose sums in
        float64 take no more of a slice than attention and MLP do. 0 where nothing is calibrated."""
        if not self.demand.guess_bytes + self.demand.basis_bytes:
            return 0
        return replace(self, slice=max(self.slice, SLICE)).prefill(TOKENS)

    def decode(self, contexts: Sequence[int]) -> int:
        """A batch's hidden states and logits, and one sequence's scores and attention weights; on CUDA, where they are
        together, all sequences'."""
        geometry, compute, contexts = self.shape.geometry, self._compute, self._padded(contexts)
        wide = 12 * geometry.hidden + 6 * self.shape.sizes.widest + 12 * geometry.heads * geometry.head_dim
        longest, scored = max(contexts, default=0), 0
        at_once = len(contexts) if self.shape.device.type != "cpu" else 1
        if len(self.demand.dense) < geometry.layers and not self.keys_on_host:
            # Scores, masks of what passes, the group's best, and a sort of them: values and indices.
            scored = longest * (geometry.heads * (3 * compute + 2) + geometry.kv_heads * (3 * compute + 32))
            scored += longest * geometry.kv_heads * geometry.head_dim  # keys under a mask, or unpacked
            scored *= at_once
        scored = max(scored, self.working_set * geometry.kv_heads * 64)  # two sorts of its slots
        resident = (sum(geometry.resident(layer, 0, self.demand.resident)) for layer in range(geometry.layers))
        attended = max(self.fetched(longest, layer) + own for layer, own in enumerate(resident))
        weights = attended * geometry.heads * 4 * compute * at_once
        return len(contexts) * wide * compute + self._logits(len(contexts)) + max(scored, weights)

    def total(self, contexts: Sequence[int]) -> int:
        """All of it for sequences of so many tokens that run together, the longest of them at some time prefilled."""
        lasting = self.fixed() + sum(self.scoring(context) + self.resident for context in contexts)
        step = self.staging(contexts) + self.decode(contexts)
        return lasting + max(self.prefill(max(contexts)), self.calibration(), step) + (step if self.graphs else 0)

    @property
    def _compute(self) -> int:
        """Bytes of a number in the widest dtype that anything is computed in."""
        return torch.promote_types(self.shape.dtype, torch.float32).itemsize

    def _logits(self, sequences: int) -> int:
        """Logits of a batch, widened, and one sequence's on their way through the sampler's filters."""
        vocab = self.shape.geometry.vocab
        return vocab * (sequences * (self.shape.dtype.itemsize + 2 * self._compute) + 6 * self._compute + 16)


@dataclass(frozen=True)
class Requirements:
    """Bytes for one sequence of `context` tokens.

    kv_per_token, kv_host: K and V in the host pool, of one token more (in layers that see everything) and of the whole
        chunks of the context.
    weights, scoring, resident, working_set, staging: on the device while decoding: weights, scoring keys and their
        bases, sinks and recent window, the working set, and the rows that a layer attends to, fetched and joined with
        the resident ones, while the next layer's arrive.
    decode: hidden states, scores, attention weights and logits while decoding.
    prefill: all of that while prefilling, in place of `staging` and `decode`.
    graphs: what captured steps keep beside the one that runs, each the memory of its step.
    """

    context: int
    kv_per_token: int
    kv_host: int
    weights: int
    scoring: int
    resident: int
    working_set: int
    staging: int
    decode: int
    prefill: int
    graphs: int = 0

    @property
    def device(self) -> int:
        """The larger of what prefill and decoding need on the device."""
        lasting = self.weights + self.scoring + self.resident + self.working_set + self.graphs
        return lasting + max(self.prefill, self.staging + self.decode)


def requirements(costs: DeviceCosts, weights: int, context: int, most_graphs: int = 1) -> Requirements:
    """What `context` tokens of one sequence need, with so many bytes of `weights` on the device, and where steps are
    captured so many graphs at most at a time."""
    assert context >= 1
    geometry, dtype = costs.shape.geometry, costs.shape.dtype
    groups, staging, decode = LayerGroups.of(geometry), costs.staging([context]), costs.decode([context])
    return Requirements(
        context=context,
        kv_per_token=(geometry.layers - len(geometry.sliding)) * geometry.kv_bytes(1, dtype) // geometry.layers,
        kv_host=groups.chunks(context) * groups.layers * geometry.kv_bytes(CHUNK, dtype) // geometry.layers,
        weights=weights,
        scoring=costs.fixed() + costs.scoring(context),
        resident=costs.resident - costs.working_set_bytes,
        working_set=costs.working_set_bytes,
        staging=staging,
        decode=decode,
        prefill=costs.prefill(context),
        graphs=most_graphs * (staging + decode) if costs.graphs else 0,
    )


@dataclass(frozen=True)
class Machine:
    """What is free here, in bytes. `device` is the name of a device with memory of its own; without one, `device_free`
    is None and everything lies in host memory. `pool_limit` is what the host pool may take of `host_free`; where rows
    lie on disk, `disk_limit` is what they may take there."""

    host_free: int
    pool_limit: int
    device: str | None = None
    device_free: int | None = None
    disk_limit: int | None = None

    @classmethod
    def here(cls, host_memory: int | None, device: torch.device, disk_limit: int | None = None) -> Machine:
        """This machine computing on `device`, with the pool's limit (None: half of what is free, as `LLM` takes it)."""
        free = available_memory()
        limit = free // 2 if host_memory is None else host_memory
        if device.type == "cpu":
            return cls(free, limit, disk_limit=disk_limit)
        name = torch.get_device_module(device).get_device_name(device)
        return cls(free, limit, name, torch.accelerator.get_memory_info(device)[0], disk_limit)


def obstacles(needed: Requirements, machine: Machine, on_host: int = 0) -> list[str]:
    """Why it does not fit, a sentence each; empty where it fits. `on_host`: bytes of weights and scoring keys that the
    host keeps for the device."""
    found = []
    in_memory = needed.kv_host
    if machine.disk_limit is not None:
        in_memory = machine.pool_limit
        if needed.kv_host > machine.disk_limit:
            found.append(
                f"The KV cache needs {format_size(needed.kv_host)} and the pool on disk may take "
                f"{format_size(machine.disk_limit)}: raise --disk-limit or shorten the context."
            )
    elif needed.kv_host > machine.pool_limit:
        found.append(
            f"The KV cache needs {format_size(needed.kv_host)} and the host pool may take "
            f"{format_size(machine.pool_limit)}: raise --host-memory, shorten the context, or put it on a disk "
            f"with --disk."
        )
    own_memory = machine.device_free is not None
    host = in_memory + on_host + (0 if own_memory else needed.device)
    if host > machine.host_free:
        found.append(
            f"Host memory: {format_size(host)} needed{'' if own_memory else ' (this device shares it)'}, "
            f"{format_size(machine.host_free)} free."
        )
    if machine.device_free is not None and needed.device > machine.device_free:
        found.append(
            f"{machine.device}: {format_size(needed.device)} needed, {format_size(machine.device_free)} free; with "
            f"--device-memory {format_size(machine.device_free).replace(' ', '')} weights that do not fit stream."
        )
    return found
