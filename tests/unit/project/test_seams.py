"""Test that a single file outside the package can add a policy, an engine option or an architecture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.outputs import completed
from support.tiny_models import tiny_model, tiny_prompt
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.auto import AutoModelForCausalLM

from offload_rt import LLM, SamplingParams
from offload_rt.cli import main
from offload_rt.cli.flags import add_engine_flags, engine_config
from offload_rt.config import EngineConfig, EvictionOptions, Size
from offload_rt.core import ModelGeometry, Selection, VisibleTokens
from offload_rt.errors import ConfigError
from offload_rt.models import registry as model_registry
from offload_rt.models.decoder import DecoderAdapter
from offload_rt.models.recurrent import Stage
from offload_rt.models.registry import register_architecture
from offload_rt.policies import registry
from offload_rt.policies.base import KeyReader, PolicyState, QuerySource
from offload_rt.policies.demand import MemoryDemand
from offload_rt.policies.options import BudgetOptions
from offload_rt.policies.registry import memory_demand, options_class, parse_options, policy_names, register_policy
from offload_rt.policies.scorer import ScorerPolicy
from offload_rt.storage.options import StoreOptions
from offload_rt.utils.config_fields import check, option, option_of

# -------------------------------------------------------------------------------------------------- an external policy


@dataclass(frozen=True)
class EveryNthOptions(BudgetOptions):
    stride: int = option(2, help="every how many-th candidate is attended", metavar="N")

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.stride >= 1, f"stride={self.stride} must be at least 1")


class EveryNthState(PolicyState):
    def __init__(self, policy: EveryNth) -> None:
        self._policy = policy

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        chosen = visible.candidates[:: self._policy.stride]
        return Selection(torch.tensor(chosen, device=q.device).expand(self._policy.geometry.kv_heads, -1).contiguous())

    def fork(self, keys: KeyReader) -> EveryNthState:
        return self


class EveryNth(ScorerPolicy[EveryNthOptions]):
    name = "every-nth"
    query_source: QuerySource = "attention_input"

    def __init__(
        self, options: EveryNthOptions, geometry: ModelGeometry, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(options, geometry, device, dtype)
        self.stride = options.stride

    @classmethod
    def memory_demand(cls, options: EveryNthOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        return replace(super().memory_demand(options, geometry, dtype), fetched_fraction=1 / options.stride)

    def new_state(self, keys: KeyReader) -> EveryNthState:  # type: ignore[override]
        return EveryNthState(self)


@pytest.fixture
def registered_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "every-nth" not in policy_names()
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register_policy("every-nth", f"{__name__}:EveryNth")(EveryNthOptions)


@pytest.mark.usefixtures("registered_policy")
def test_external_policy_runs() -> None:
    settings: dict[str, Any] = {"policy": "every-nth", "host_memory": "16MiB", "device": "cpu", "dtype": "float32"}
    prompt, greedy = tiny_prompt(90), SamplingParams(max_tokens=6, temperature=0)
    model = tiny_model("llama", dtype=torch.float32)
    [dense] = completed(LLM(model, policy="full", host_memory="16MiB", dtype="float32").generate([prompt], greedy))
    options = {"sinks": 2, "recent": 4, "dense_layers": ()}
    [every] = completed(LLM(model, policy_options=options | {"stride": 1}, **settings).generate([prompt], greedy))
    assert every.token_ids == dense.token_ids and every.stats.exact_fraction == 1
    [third] = completed(LLM(model, policy_options=options | {"stride": 3}, **settings).generate([prompt], greedy))
    assert third.stats.policy == "every-nth"
    assert third.stats.exact_fraction == pytest.approx((2 + 4 + 84 / 3) / 90, abs=0.02)


@pytest.mark.usefixtures("registered_policy")
def test_command_line_and_info_know_an_external_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(("generate", "--help"))
    text = " ".join(capsys.readouterr().out.split())
    assert "options of policy every-nth" in text and "--stride N every how many-th candidate is attended" in text
    info = ("info", "reference", "--context", "1000", "--device", "cpu", "--policy", "every-nth")
    needed = []
    for stride in ("1", "4"):
        assert main((*info, "--stride", stride)) == 0
        out = capsys.readouterr().out
        assert "policy every-nth, 1,000 tokens" in out
        needed.append(next(line for line in out.splitlines() if "fetched KV" in line))
    assert needed[0] != needed[1]
    assert main((*info, "--stride", "0")) == 2
    assert "--stride 0 must be at least 1" in capsys.readouterr().err
    assert main(("info", "reference", "--context", "9", "--policy", "quest", "--stride", "2")) == 2
    assert "--stride is an option of" in capsys.readouterr().err


@pytest.mark.usefixtures("registered_policy")
def test_policy_name_can_be_registered_once() -> None:
    register_policy("every-nth", f"{__name__}:EveryNth")(EveryNthOptions)
    with pytest.raises(ConfigError, match="registered already, by test_seams:EveryNth"):
        register_policy("every-nth", f"{__name__}:Other")(EveryNthOptions)
    with pytest.raises(ConfigError, match="did you mean 'every-nth'"):
        parse_options("every-mth", {})


# -------------------------------------------------------------------------------------------- an option of the engine


@dataclass(frozen=True)
class ToyConfig(EngineConfig):
    cushion: Size = option(1024, help="bytes left free", group="pool", plans=True)
    colour: Literal["red", "blue"] = option("red", help="what colour", group="toys")
    secret: int = option(0, help="not a flag")


@pytest.mark.parametrize(("plan", "flags"), [(False, 2), (True, 1)])
def test_field_of_the_configuration_becomes_a_flag(plan: bool, flags: int) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, ToyConfig, plan=plan)
    text = " ".join(parser.format_help().split())
    assert "--cushion SIZE bytes left free" in text
    assert ("toys: --colour red|blue what colour" in text) == (flags == 2)
    assert "secret" not in text
    config = engine_config(parser.parse_args(["--working-set", "7"]), ToyConfig)
    assert (config, config.working_set) == (ToyConfig(working_set=7), 7)
    given = parser.parse_args(["--cushion", "4096", *["--colour", "blue"][: 2 * flags - 2]])
    assert engine_config(given, ToyConfig) == ToyConfig(cushion="4096", colour="blue" if flags == 2 else "red")  # type: ignore[arg-type]


def test_llm_accepts_a_configuration_and_overrides() -> None:
    model, config = tiny_model("llama"), ToyConfig(policy="full", host_memory="8MiB", max_num_seqs=2)  # type: ignore[arg-type]
    llm = LLM(model, config, colour="blue", max_num_seqs=3)
    assert llm.config == replace(config, colour="blue", max_num_seqs=3) == llm.runner.config
    assert (llm.config.host_memory, llm.runner.pool.limit_bytes) == (8 * 2**20, 8 * 2**20)
    with pytest.raises(ConfigError, match="did you mean 'host_memory'"):
        LLM(model, host_memroy="8MiB")
    with pytest.raises(ConfigError, match="'colour' is unknown"):
        LLM(model, EngineConfig(), colour="blue")


def test_configuration_converts_common_notations() -> None:
    config = EngineConfig(
        host_memory="1GiB", device_memory="2GB", eviction="lru", skew="x", swap="~/y", dtype=torch.bfloat16,
        device=torch.device("cpu"), policy_options=None,
    )  # type: ignore[arg-type]  # fmt: skip
    assert (config.host_memory, config.device_memory, config.eviction) == (2**30, 2 * 10**9, EvictionOptions("lru"))
    assert (config.skew, config.swap, config.dtype, config.device) == (Path("x"), Path.home() / "y", "bfloat16", "cpu")
    assert EngineConfig(eviction={"protect": "none"}).eviction == EvictionOptions(protect="none")  # type: ignore[arg-type]
    for wrong in (
        {"host_memory": 0}, {"device_memory": "much"}, {"max_model_len": 0}, {"prefill_chunk_size": 0},
        {"max_num_batched_tokens": 0}, {"max_num_seqs": 0}, {"device_kv_memory": 0},
        {"missed_mass_every": -1}, {"working_set": -1}, {"kv_cache_dtype": "int3"}, {"eviction": "lfu"},
        {"disk": "~nobody-here/kv"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EngineConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [EngineConfig, StoreOptions, EvictionOptions])
def test_every_field_has_help(kind: type) -> None:
    for field in fields(kind):
        assert option_of(field).help
        shown = field.type if option_of(field).group and option_of(field).metavar is None else ""
        assert "int" not in str(shown) and "float" not in str(shown), f"{field.name} needs a metavar: its unit"


# -------------------------------------------------------------------------------------------------------- KV provenance


@pytest.mark.parametrize(
    ("policy", "options", "provenance_key"),
    [  # KV stored under a provenance key must be found again on every processor
        ("full", {}, "exact"),
        ("infinigen", {"preset": "rows", "source": "residual"}, "infinigen-291670f59291f28a"),
        ("infinigen", {"source": "residual"}, "infinigen-614c5f9e0ea278ea"),
        ("infinigen", {"preset": "paper"}, "infinigen-b0d6ce6015005ded"),
        ("quest", {}, "quest-a44754105a65c424"),
        ("h2o", {}, "h2o-14c4124bb13ca6ef"),
        ("oracle", {"budget": 0.2, "dense_layers": (0, 1)}, "oracle-5e04522763efaeaf"),
        ("streaming", {}, "streaming-14c4124bb13ca6ef"),
    ],
)
def test_provenance_keys_equal_those_of_existing_stores(
    reference_policy: Callable[..., Any], policy: str, options: dict[str, Any], provenance_key: str
) -> None:
    assert reference_policy(policy, options).provenance_key == provenance_key


@pytest.fixture(scope="module")
def reference_policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Yield a function that creates a policy for the reference model.

    The cache folder is empty, because an existing artifact might have been calibrated in a different dtype.
    """
    from offload_rt.models.loading import load_model
    from offload_rt.policies.registry import make_policy
    from offload_rt.skewing.calibrate import cached_artifact

    loaded = load_model("reference", device="cpu", dtype="auto")
    adapter = loaded.adapter

    def make(policy: str, options: dict[str, Any]) -> Any:
        return make_policy(
            policy, options, geometry=adapter.geometry, device=adapter.device, dtype=adapter.dtype,
            artifact=lambda method: cached_artifact(loaded, method),
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OFFLOAD_RT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield make


@dataclass(frozen=True)
class _ExtendedOptions(BudgetOptions):
    since: int = option(0, help="an option that was added later", neutral=0)
    always: int = option(0, help="an option that was always there")


def test_provenance_text_omits_neutral_values_of_new_options() -> None:
    text = "_ExtendedOptions(budget=0.1, sinks=4, recent=64, dense_layers=(0,), "
    assert _ExtendedOptions().provenance_text() == f"{text}always=0)"
    assert _ExtendedOptions(since=3).provenance_text() == f"{text}since=3, always=0)"
    for policy in policy_names():
        for options in ({}, *({"preset": preset} for preset in options_class(policy).presets)):
            chosen = parse_options(policy, options)
            whole = repr(chosen).replace("scorer='auto'", "scorer='int8'").replace("source='auto'", "source='residual'")
            stored = whole.replace(", approximate_kv='off'", "").replace("approximate_kv=", "tail=")
            stored = stored.replace(", ahead=None", "")
            assert chosen.provenance_text() == stored


def test_memory_demand_follows_the_options_of_a_policy() -> None:
    from offload_rt.models.shape import load_shape

    shape = load_shape(tiny_model("llama"))  # 3 layers, 2 KV heads of 16
    for policy in ("auto", "full", "h2o", "infinigen", "oracle", "quest", "streaming"):
        demand = memory_demand(policy, {}, shape.geometry, torch.float32)
        assert demand.scoring_bytes(2, 100) == int(2 * demand.key_bytes * 100)
        assert (demand.key_bytes > 0) == (policy in ("infinigen", "auto", "h2o", "quest"))


# ------------------------------------------------------------------------------------------ an external architecture


class ScaledConfig(LlamaConfig):
    model_type = "scaled-llama"


class ScaledForCausalLM(LlamaForCausalLM):
    """A Llama whose logits are divided by 4. No built-in adapter does this."""

    config_class = ScaledConfig

    def forward(self, *args: Any, **named: Any) -> Any:
        out = super().forward(*args, **named)
        out.logits = out.logits / 4
        return out


class ScaledAdapter(DecoderAdapter):
    """Adapter that divides the logits, and computes each MLP in a separate stage after its layer."""

    def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return residual

    def stages(self, layer: int) -> Sequence[Stage]:
        return [] if layer < 0 else [Stage(layer, partial(super().mlp, layer, tokens=torch.empty(0)))]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) / 4


@pytest.fixture
def scaled_model(monkeypatch: pytest.MonkeyPatch) -> ScaledForCausalLM:
    monkeypatch.setattr(model_registry, "_adapters", dict(model_registry._adapters))
    register_architecture("ScaledForCausalLM", f"{__name__}:ScaledAdapter")
    model = ScaledForCausalLM(
        ScaledConfig(**tiny_model("llama").config.to_diff_dict() | {"model_type": "scaled-llama"})
    )
    model.load_state_dict(tiny_model("llama").state_dict())
    return model.eval()


def test_external_architecture_equals_transformers(scaled_model: ScaledForCausalLM, tmp_path: Path) -> None:
    prompt = tiny_prompt(70)
    with torch.no_grad():
        expected = scaled_model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        decoded = scaled_model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[
            0, len(prompt) :
        ].tolist()
    AutoConfig.register("scaled-llama", ScaledConfig)
    AutoModelForCausalLM.register(ScaledConfig, ScaledForCausalLM)
    scaled_model.save_pretrained(tmp_path)
    for given in (scaled_model, tmp_path):
        llm = LLM(given, policy="full", host_memory="16MiB", device="cpu", dtype="float32")
        token = int(expected.argmax())
        [score] = llm.score([prompt], [[token]])
        assert score.is_greedy == [True]
        assert score.logprobs[0] == pytest.approx(float(expected[token]), abs=1e-5)
        [output] = completed(llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0)))
        assert output.token_ids == decoded


def test_architecture_has_one_adapter(scaled_model: ScaledForCausalLM) -> None:
    register_architecture("ScaledForCausalLM", f"{__name__}:ScaledAdapter")
    with pytest.raises(ConfigError, match="is already registered"):
        register_architecture("LlamaForCausalLM", f"{__name__}:ScaledAdapter")
