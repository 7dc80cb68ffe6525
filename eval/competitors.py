"""What the speed benchmark compares: transformers with each of its caches, and this runtime with each policy, all on
one random model and one planted context."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache

from ..config import EngineConfig
from ..core import KVPart, Lease
from ..models.registry import LoadedModel, adapter_for
from ..pool.pool import HostPool
from ..runtime.metrics import Fractions, Trace
from ..runtime.runner import Runner
from ..runtime.sequence import Sequence as Decoded
from ..runtime.sequence import key_reader
from ..runtime.slots import AppendOnly
from ..select.base import Policy
from ..select.full import Full
from ..select.registry import make_policy
from ..transfer.link import Link
from .planted import Given, Planted, PlantedAdapter
from .stages import ADAPTER, REST, STATE, StageClock, Staged, StagedLink

TOKEN = 7
"""The token that every step decodes: speed does not depend on it."""


@dataclass(frozen=True)
class Shape:
    """A Llama of random weights."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    dtype: torch.dtype

    def model(self, positions: int, device: torch.device) -> LlamaForCausalLM:
        """Weights are drawn in the model's own dtype on its device."""
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
    "small": Shape(4, 512, 1376, 8, 8, 64, 4096, torch.float32),
    "llama-8b": Shape(32, 4096, 14336, 32, 8, 128, 128_256, torch.bfloat16),
}
"""small: what a CPU can be measured with. llama-8b: Llama-3.1-8B."""


class Competitor(Protocol):
    """One way to decode."""

    @property
    def name(self) -> str:
        """As printed."""
        ...

    def fill(self, layer: int, kv: KVPart) -> None:
        """Takes the context's K and V `[Hkv, N, d]` of one layer; every layer once, in order, before the first step."""
        ...

    def step(self) -> None:
        """Decodes one token, the context growing by it."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the report says beside the times."""
        ...


class Peer:
    """transformers with one of its caches. The model's own attention (SDPA)."""

    def __init__(self, name: str, model: Any, cache: Cache, length: int) -> None:
        self.name = name
        self._model, self._cache, self._position = model, cache, length
        self._tokens = torch.tensor([[TOKEN]], device=model.device)

    def fill(self, layer: int, kv: KVPart) -> None:
        """Through the cache's own `update`."""
        k, v = (x[None].to(self._model.device, self._model.dtype) for x in (kv.k, kv.v))
        self._cache.update(k, v, layer)

    @torch.inference_mode()
    def step(self) -> None:
        """A forward of the whole model."""
        positions = torch.tensor([[self._position]], device=self._tokens.device)
        self._model(input_ids=self._tokens, position_ids=positions, past_key_values=self._cache, use_cache=True)
        self._position += 1

    def facts(self) -> dict[str, Any]:
        """Every row is attended."""
        return {"attended_fraction": 1.0}


class Context:
    """The planted context in one host pool, filled once; every policy decodes from a fork of it."""

    def __init__(self, pool: HostPool, link: Link, planted: Planted, room: int) -> None:
        self.pool, self.link, self.room = pool, link, room
        self._lease = pool.new_lease(planted.length)
        for layer, kv in enumerate(planted.layers()):
            pool.write(self._lease, layer, 0, kv.k, kv.v)
        pool.commit(self._lease, planted.length)

    def fork(self) -> Lease:
        """Another lease on the same rows."""
        return self.pool.fork(self._lease)

    def blank(self) -> Lease:
        """A lease without rows."""
        return self.pool.new_lease(1)


class Ours:
    """This runtime with one policy on one lease: what `Runner.decode` takes, sampling left out."""

    def __init__(self, name: str, model: LoadedModel, policy: Policy, context: Context, lease: Lease) -> None:
        self.name = name
        self._policy = policy
        config = EngineConfig(missed_mass_every=0)
        self._runner = Runner(model, policy, context.pool, context.link, config)
        context.link.open(lease, policy.sinks, policy.recent)
        keys = key_reader(context.pool, lease)
        trace = Trace(model.adapter.geometry.layers, missed_every=0)
        state, slots = policy.new_state(keys), AppendOnly(context.pool)
        self._sequence = Decoded(0, [TOKEN] * context.room, lease, slots, keys, state, trace, lease.length)

    def fill(self, layer: int, kv: KVPart) -> None:
        """The policy learns the keys; the rows are in the context already."""
        if layer not in self._policy.dense_layers:
            adapter = self._runner.adapter
            self._sequence.state.on_keys(layer, kv.k.to(adapter.device, adapter.dtype), 0)

    def step(self) -> None:
        """One `Runner.decode` of one sequence."""
        self._runner.decode([self._sequence])

    def facts(self) -> dict[str, Any]:
        """Rows and bytes that crossed the link per token, and what the policy keeps on the device."""
        trace, dense = self._sequence.trace, self._policy.dense_layers
        steps = max(1, len(trace.attended))
        shares = Fractions.of(trace, dense)
        return {
            "dense_layers": sorted(dense),
            "attended_fraction": shares.attended,
            "sparse_attended_fraction": shares.sparse_attended,
            "link_fraction": shares.link,
            "link_bytes_per_token": trace.bytes_to_device / steps,
            "scoring_bytes_device": self._sequence.state.device_bytes,
        }

    def stages(self, steps: int, read: Callable[[], float]) -> dict[str, float]:
        """Seconds per step in each stage, over `steps` further steps; `read` gives the time. The clock itself adds
        about a microsecond to each of some ten calls a layer."""
        clock, sequence, runner = StageClock(read), self._sequence, self._runner
        model = runner.model
        staged: Any = Staged(model.adapter, clock, ADAPTER, after=REST)
        link: Any = StagedLink(runner.link, clock)
        state: Any = Staged(sequence.state, clock, STATE)
        other = Runner(replace(model, adapter=staged), self._policy, runner.pool, link, runner.config)
        batch = [replace(sequence, state=state)]
        clock.reset()
        for _ in range(steps):
            other.decode(batch)
        clock.enter("end")
        return {stage: seconds / steps for stage, seconds in clock.seconds.items()}


@dataclass(frozen=True)
class Field:
    """What competitors are made from. `model` is for transformers, as transformers makes it; `own`, the same weights,
    is for us, in the memory order that `load_model` gives a checkpoint."""

    model: Any
    own: Any
    planted: Planted
    context: Context
    room: int
    """Tokens that preallocated caches hold: the context and all that will be decoded."""

    @property
    def loaded(self) -> LoadedModel:
        """The model with planted queries."""
        adapter = PlantedAdapter(adapter_for(self.own), self.planted)
        return LoadedModel(adapter, None, "planted", "random", frozenset(), 0)

    def peer(self, name: str, cache: Cache) -> Peer:
        """transformers with `cache`."""
        return Peer(name, self.model, cache, self.planted.length)

    def ours(self, name: str, policy: str, options: Mapping[str, Any]) -> Ours:
        """This runtime with a policy of the registry."""
        adapter = adapter_for(self.model)
        artifact = self.planted.artifact()
        made = make_policy(
            policy,
            options,
            geometry=adapter.geometry,
            device=adapter.device,
            dtype=adapter.dtype,
            artifact=lambda method: artifact,
        )
        return Ours(name, self.loaded, made, self.context, self.context.fork())


class Skipped(Exception):  # noqa: N818 - an answer, not an error
    """Why a competitor cannot run here."""


def _static(field: Field) -> Competitor:
    return field.peer("StaticCache", StaticCache(config=field.model.config, max_cache_len=field.room))


def _dynamic(field: Field) -> Competitor:
    return field.peer("DynamicCache", DynamicCache(config=field.model.config))


def _offloaded(field: Field) -> Competitor:
    if field.model.device.type != "cuda":
        raise Skipped("offloads from a CUDA device, and this is a CPU")
    return field.peer("OffloadedCache", DynamicCache(config=field.model.config, offloading=True))


def _quantized(field: Field) -> Competitor:
    backends = {"quanto": "optimum.quanto", "hqq": "hqq"}
    found = [name for name, module in backends.items() if _installed(module)]
    if not found:
        raise Skipped("needs optimum-quanto or hqq, and neither is installed")
    return field.peer("QuantizedCache", QuantizedCache(found[0], field.model.config))


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _infinigen(label: str = "", **options: Any) -> Callable[[Field], Competitor]:
    name = f"infinigen, {label}" if label else "infinigen"
    return lambda field: field.ours(name, "infinigen", {"dense_layers": ()} | options)


def _full(field: Field) -> Competitor:
    return field.ours("full", "full", {})


def _ideal(field: Field) -> Competitor:
    policy = Given(field.planted, field.model.device)
    return Ours("ideal", field.loaded, policy, field.context, field.context.fork())


def _floor_peer(field: Field) -> Competitor:
    cache = DynamicCache(config=field.model.config)
    return _Blank("floor: transformers", field.model, cache, 0)


def _floor_ours(field: Field) -> Competitor:
    policy = Full(field.planted.geometry.layers)
    return Ours("floor: ours", field.loaded, policy, field.context, field.context.blank())


class _Blank(Peer):
    """A peer that starts without a context."""

    def fill(self, layer: int, kv: KVPart) -> None:
        """Takes nothing."""


MAKERS: dict[str, Callable[[Field], Competitor]] = {
    "static": _static,
    "dynamic": _dynamic,
    "offloaded": _offloaded,
    "quantized": _quantized,
    "full": _full,
    "infinigen": _infinigen(),
    "infinigen-paper": _infinigen("paper", preset="paper"),
    "infinigen-dense0": _infinigen("layer 0 dense", dense_layers=(0,)),
    "infinigen-int8": _infinigen("int8", scorer="int8"),
    "infinigen-int4": _infinigen("int4", scorer="int4"),
    "infinigen-int2": _infinigen("int2", scorer="int2"),
    "ideal": _ideal,
    "floor": _floor_peer,
    "floor-ours": _floor_ours,
}
"""By name, in the order of the report. "floor" decodes without a context: all but long attention."""
