"""Baselines for the speed benchmark: transformers with each of its caches, and this runtime with each policy.

All baselines use the same random model and the same synthetic context. The sequences in a batch do not share a prefix.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache

from ...config import EngineConfig
from ...core import BLOCK_SIZE, BlockTable, KVPart
from ...engine.build import build_policy, build_transfer
from ...engine.runner import Runner
from ...engine.stats import Fractions
from ...kv_cache.pool import HostPool
from ...model_runner.sequence import Sequence as Decoded
from ...model_runner.sequence import key_reader
from ...model_runner.slot_table import SlotTable
from ...model_runner.trace import Trace
from ...models.loading import LoadedModel
from ...models.registry import adapter_for
from ...policies.base import Policy
from ...policies.full import Full
from ...policies.options import InfiniGenOptions
from ...transfer.base import Transfer
from ...transfer.device_copies import copy_bytes
from .resident import Resident
from .synthetic_kv import SyntheticAdapter, SyntheticKV

TOKEN = 7
"""Token id that every step decodes. It does not affect the speed."""


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype

    def model(self, positions: int, device: torch.device) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=positions,
            bos_token_id=0,
            eos_token_id=None,
            dtype=self.dtype,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.random.fork_rng(), device:
                torch.manual_seed(0)
                model: LlamaForCausalLM = LlamaForCausalLM(config).requires_grad_(False).eval()
        finally:
            torch.set_default_dtype(before)
        return model


SHAPES = {
    "tiny": Shape(2, 64, 128, 4, 2, 16, 4096, torch.float32),
    "small": Shape(4, 512, 1376, 8, 8, 64, 4096, torch.float32),
    "medium": Shape(8, 1024, 2752, 16, 16, 64, 4096, torch.float32),
    "large": Shape(12, 1536, 4096, 24, 24, 64, 4096, torch.float32),
    "smollm2": Shape(30, 576, 1536, 9, 3, 64, 49_152, torch.bfloat16),
    "qwen-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151_936, torch.bfloat16),
    "llama-1b": Shape(16, 2048, 8192, 32, 8, 64, 128_256, torch.bfloat16),
    "llama-3b": Shape(28, 3072, 8192, 24, 8, 128, 128_256, torch.bfloat16),
    "llama-8b": Shape(32, 4096, 14336, 32, 8, 128, 128_256, torch.bfloat16),
    "llama-13b": Shape(40, 5120, 13824, 40, 40, 128, 32_000, torch.bfloat16),
}
"""Shapes by name.

"tiny" only checks that the benchmark runs. "small", "medium" and "large" suit a CPU. "llama-1b", "llama-3b" and
"llama-8b" are Llama 3.x; "llama-13b" is Llama 2 with multi-head attention.
"""


class Baseline(Protocol):
    """Interface of a baseline whose decode steps are timed."""

    @property
    def name(self) -> str: ...

    def fill(self, layer: int, kv: KVPart) -> None:
        """Load K and V `[Hkv, N, d]` of one layer. Before the first step, this is called for every layer, in order."""
        ...

    def step(self) -> None: ...

    def facts(self) -> dict[str, Any]: ...


class TransformersBaseline:
    def __init__(self, name: str, model: Any, cache: Cache, length: int, tokens: torch.Tensor) -> None:
        self.name = name
        self._model, self._cache, self._position, self._tokens = model, cache, length, tokens

    def fill(self, layer: int, kv: KVPart) -> None:
        batch = len(self._tokens)
        k, v = (x[None].to(self._tokens.device, self._model.dtype).repeat(batch, 1, 1, 1) for x in (kv.k, kv.v))
        self._cache.update(k, v, layer)

    @torch.inference_mode()
    def step(self) -> None:
        positions = torch.full_like(self._tokens, self._position)
        self._model(input_ids=self._tokens, position_ids=positions, past_key_values=self._cache, use_cache=True)
        self._position += 1

    def facts(self) -> dict[str, Any]:
        return {"exact_fraction": 1.0}


class SyntheticContext:
    """A synthetic context in a host pool.

    Its sequences share no blocks. Every policy decodes forks of these sequences.
    """

    def __init__(
        self, pool: HostPool, transfer: Transfer, synthetic: SyntheticKV, room: int, batch: int, device: torch.device
    ) -> None:
        """Write the context to the pool, and reserve slots for `room` tokens per sequence."""
        self.pool, self.transfer, self.room = pool, transfer, room
        self._block_tables = [pool.new_block_table(synthetic.length) for _ in range(batch)]
        for layer, kv in enumerate(synthetic.layers(device)):
            for blocks in self._block_tables:
                pool.write(blocks, layer, 0, kv.k, kv.v)
        for blocks in self._block_tables:
            pool.commit(blocks, synthetic.length)

    def forks(self) -> list[BlockTable]:
        return [self.pool.fork(blocks) for blocks in self._block_tables]

    def blank(self) -> list[BlockTable]:
        return [self.pool.new_block_table(1) for _ in self._block_tables]


class OffloadBaseline:
    """This runtime with one policy. A step is one call of `Runner.decode` and does not sample."""

    def __init__(
        self,
        name: str,
        model: LoadedModel,
        policy: Policy,
        context: SyntheticContext,
        block_tables: list[BlockTable],
        transfer: Transfer | None = None,
    ) -> None:
        """Open `block_tables`. If `transfer` is None, use the transfer of `context`."""
        self.name = name
        self._policy = policy
        config = EngineConfig(missed_mass_every=0)
        self.runner = Runner(model, policy, context.pool, transfer or context.transfer, config)
        self._batch = [self._sequence(model, context, blocks) for blocks in block_tables]

    def _sequence(self, model: LoadedModel, context: SyntheticContext, blocks: BlockTable) -> Decoded:
        storage = self.runner.transfer.storage
        storage.open(blocks, self._policy.sinks, self._policy.recent)
        keys = key_reader(context.pool, storage, blocks)
        trace = Trace(model.adapter.geometry.layers, missed_every=0)
        state, slots = self._policy.new_state(keys), SlotTable(context.pool)
        return Decoded(
            id=0, tokens=[TOKEN] * context.room, blocks=blocks, slots=slots, keys=keys, state=state, trace=trace,
            position=blocks.length,
        )  # fmt: skip

    def fill(self, layer: int, kv: KVPart) -> None:
        if layer not in self._policy.dense_layers:
            adapter = self.runner.adapter
            keys, values = (rows.to(adapter.device, adapter.dtype) for rows in (kv.k, kv.v))
            for sequence in self._batch:
                sequence.state.on_kv(layer, keys, values, 0)

    def step(self) -> None:
        self.runner.decode(self._batch)

    def facts(self) -> dict[str, Any]:
        first, dense = self._batch[0], self._policy.dense_layers
        trace, steps = first.trace, max(1, len(first.trace.attended))
        shares = Fractions.of(trace, dense)
        return {
            "dense_layers": sorted(dense),
            "exact_fraction": shares.attended,
            "sparse_exact_fraction": shares.sparse_attended,
            "fetched_fraction": shares.fetched,
            "h2d_bytes_per_token": trace.bytes_to_device / steps,
            "scoring_bytes_device": first.state.device_bytes,
        }


@dataclass(frozen=True)
class BenchInputs:
    model: Any  # model for the transformers baselines
    own: Any  # for this runtime: a model with the same weights in the memory layout that `load_model` creates
    synthetic: SyntheticKV
    context: SyntheticContext  # the synthetic context in a pool
    room: int  # number of slots, in tokens, that preallocated caches have
    batch: int = 1

    @property
    def loaded(self) -> LoadedModel:
        """The model as this runtime uses it. Its adapter adds a constant vector to all queries (see `synthetic_kv`)."""
        adapter = SyntheticAdapter(adapter_for(self.own), self.synthetic)
        return LoadedModel(adapter, None, "planted", "random", frozenset(), 0)

    @property
    def tokens(self) -> torch.Tensor:
        return torch.full((self.batch, 1), TOKEN, device=self.model.device)

    def transformers(self, name: str, cache: Cache) -> TransformersBaseline:
        return TransformersBaseline(name, self.model, cache, self.synthetic.length, self.tokens)

    def offload(self, name: str, policy: str, options: Mapping[str, Any]) -> OffloadBaseline:
        return OffloadBaseline(name, self.loaded, self.policy(policy, options), self.context, self.context.forks())

    def policy(self, policy: str, options: Mapping[str, Any]) -> Policy:
        artifact = self.synthetic.artifact()
        return build_policy(self.loaded, policy, options, lambda method: artifact)


class Skipped(Exception):  # noqa: N818 - a result, not an error
    """Raised if a baseline cannot run on this machine. The message says why."""


def _static(inputs: BenchInputs) -> Baseline:
    return inputs.transformers("StaticCache", StaticCache(config=inputs.model.config, max_cache_len=inputs.room))


def _dynamic(inputs: BenchInputs) -> Baseline:
    return inputs.transformers("DynamicCache", DynamicCache(config=inputs.model.config))


def _offloaded(inputs: BenchInputs) -> Baseline:
    if inputs.model.device.type != "cuda":
        raise Skipped("offloads from a CUDA device, and this is a CPU")
    return inputs.transformers("OffloadedCache", DynamicCache(config=inputs.model.config, offloading=True))


def _quantized(inputs: BenchInputs) -> Baseline:
    backends = {"quanto": "optimum.quanto", "hqq": "hqq"}
    found = [name for name, module in backends.items() if _installed(module)]
    if not found:
        raise Skipped("needs optimum-quanto (pip install offload-rt[bench]) or hqq, and neither is installed")
    return inputs.transformers("QuantizedCache", QuantizedCache(found[0], inputs.model.config))


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


SELECTION: dict[str, Any] = {"preset": "rows", "dense_layers": ()}
"""Options of the baseline "infinigen". It has no dense layers and no approximate KV."""


def _infinigen(label: str = "", **options: Any) -> Callable[[BenchInputs], Baseline]:
    name = f"infinigen, {label}" if label else "infinigen"
    options = SELECTION | options
    preset_fraction = InfiniGenOptions.presets[options["preset"]]["max_fraction"]

    def make(inputs: BenchInputs) -> Baseline:
        # The limit must include all planted tokens. Their number may be rounded up.
        max_fraction = max(preset_fraction, 1.1 * inputs.synthetic.fraction)
        return inputs.offload(name, "infinigen", options | {"max_fraction": max_fraction})

    return make


def _default(inputs: BenchInputs) -> Baseline:
    return inputs.offload("infinigen, default", "infinigen", {})


def _resident(inputs: BenchInputs) -> Baseline:
    return Resident(inputs.model, inputs.synthetic.length, inputs.tokens)


def _full(inputs: BenchInputs) -> Baseline:
    return inputs.offload("full", "full", {})


def _full_device(inputs: BenchInputs) -> Baseline:
    device, context = inputs.model.device, inputs.context
    if device.type != "cuda":
        raise Skipped("keeps copies of KV on a CUDA device, and this is a CPU")
    torch.cuda.empty_cache()  # memory that earlier baselines have freed
    geometry, blocks = inputs.synthetic.geometry, inputs.batch * -(-inputs.room // BLOCK_SIZE)
    transfer = build_transfer(context.pool, geometry, device, kv_memory=blocks * copy_bytes(context.pool))
    name, policy = "full, KV on the device", inputs.policy("full", {})
    return OffloadBaseline(name, inputs.loaded, policy, context, context.forks(), transfer)


def _floor_peer(inputs: BenchInputs) -> Baseline:
    cache = DynamicCache(config=inputs.model.config)
    return _WithoutContext("floor: transformers", inputs.model, cache, 0, inputs.tokens)


def _floor_ours(inputs: BenchInputs) -> Baseline:
    policy = Full(inputs.synthetic.geometry.layers)
    return OffloadBaseline("floor: ours", inputs.loaded, policy, inputs.context, inputs.context.blank())


class _WithoutContext(TransformersBaseline):
    def fill(self, layer: int, kv: KVPart) -> None: ...


MAKERS: dict[str, Callable[[BenchInputs], Baseline]] = {
    "static": _static,
    "resident": _resident,
    "dynamic": _dynamic,
    "offloaded": _offloaded,
    "quantized": _quantized,
    "full": _full,
    "full-device": _full_device,
    "infinigen": _infinigen(),
    "infinigen-default": _default,
    "infinigen-paper": _infinigen("paper", preset="paper"),
    "infinigen-tail4": _infinigen("int4 tail", approximate_kv="int4"),
    "floor": _floor_peer,
    "floor-ours": _floor_ours,
}
"""Baselines by name, in the order of the report. "floor" decodes without a context."""
