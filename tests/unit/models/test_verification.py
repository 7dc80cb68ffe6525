"""Test the verification of models when they are loaded: it detects faulty adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.architectures import RUNS, architecture
from torch import nn

from offload_rt.errors import ModelError
from offload_rt.models import loading, verification
from offload_rt.models.adapter import ForwardingAdapter
from offload_rt.models.decoder import DecoderAdapter
from offload_rt.models.loading import load_model
from offload_rt.models.recurrent import RecurrentState
from offload_rt.models.registry import adapter_for
from offload_rt.models.rotary import HalfSplit
from offload_rt.models.verification import verify_model
from offload_rt.models.weights import weight_sizes


def faulty_adapter(model: Any, change: Callable[[DecoderAdapter], None]) -> DecoderAdapter:
    adapter = adapter_for(model)
    assert isinstance(adapter, DecoderAdapter)
    change(adapter)
    return adapter


def set_geometry(adapter: DecoderAdapter, **changes: Any) -> None:
    adapter.geometry = replace(adapter.geometry, **changes)


def swap_norms(adapter: DecoderAdapter) -> None:
    layer = adapter._layers[1]
    layer.before_attention, layer._before_mlp = layer._before_mlp, layer.before_attention


def without_norm(rows: torch.Tensor) -> torch.Tensor:
    return rows.transpose(0, 1)


FAULTS: dict[str, tuple[str, Callable[[DecoderAdapter], Any], str]] = {
    "the rotation of the other kind of layer": (
        "gemma3",
        lambda a: setattr(a._rotary, "_kinds", tuple(reversed(RUNS["gemma3"].options["layer_types"][:2])) * 2),
        "layer 0",
    ),
    "positions in a layer that has none": ("smollm3", lambda a: setattr(a._rotary, "_kinds", ("",) * 3), "layer 1"),
    "interleaved rotated as half-split": ("glm4", lambda a: setattr(a._rotary, "_layout", HalfSplit), "layer 0"),
    "no residual multiplier": ("granite", lambda a: setattr(a._layers[2], "_after_mlp", nn.Identity()), "layer 2"),
    "no embedding multiplier": ("granite", lambda a: setattr(a, "_multiplier", 1.0), "the embedding"),
    "another scale of scores": ("granite", lambda a: set_geometry(a, scales=(8**-0.5,) * 3), "layer 0"),
    "no cap of logits": ("gemma3", lambda a: setattr(a, "_logit_cap", None), "the head"),
    "no scale of logits": ("cohere", lambda a: setattr(a, "_logit_factor", 1.0), "the head"),
    "no cap of scores": ("gemma2", lambda a: set_geometry(a, softcap=None), "softcap=1.5 in layer 0"),
    "norms swapped": ("llama3", swap_norms, "layer 1"),
    "no norm after the attention": (
        "olmo2",
        lambda a: setattr(a._layers[1], "_after_attention", nn.Identity()),
        "layer 1",
    ),
    "no norm of queries": ("qwen3", lambda a: setattr(a._projections[0], "_query_norm", without_norm), "layer 0"),
    "no temperature scaling": ("ministral3", lambda a: setattr(a, "_temperatures", [None] * 3), "layer 0"),
    "no norm of latents": ("youtu", lambda a: setattr(a._projections[0], "_kv_a_norm", nn.Identity()), "layer 0"),
    "no norm of low-rank queries": ("deepseek_v3", lambda a: a._projections[1]._query_modules.pop(1), "layer 1"),
    "the scale of latent keys": ("glm4_moe_lite", lambda a: set_geometry(a, scales=(32**-0.5,) * 3), "layer 0"),
    "latent keys rotated as half-split": ("youtu", lambda a: setattr(a._rotary, "_layout", HalfSplit), "layer 0"),
    "no multiplier of residuals": ("minicpm3", lambda a: setattr(a._layers[1], "_after_mlp", nn.Identity()), "layer 1"),
    "no window": ("mistral", lambda a: set_geometry(a, windows=(None,) * 3), "sliding_window=12 in layer 0"),
    "a window too short": ("olmo3", lambda a: set_geometry(a, windows=(11, None, 12)), "sliding_window=12 in layer 0"),
    "no sinks": ("gpt_oss", lambda a: setattr(a, "sinks", [None] * 3), "s_aux in layer 0"),
    "no output gate": ("qwen3_5", lambda a: setattr(a, "_gate", lambda *_: None), "layer 0"),
    "no output gate per head": ("lfm3", lambda a: setattr(a, "_gate", lambda *_: None), "layer 0"),
    "no shared MLP": ("granite_hybrid", lambda a: setattr(a._layers[0], "_shared_mlp", None), "layer 0"),
    "no mixer beside the attention": ("falcon_h1", lambda a: setattr(a._layers[1], "_mixer", None), "layer 1"),
    "no multiplier of keys": ("falcon_h1", lambda a: setattr(a._projections[0], "_key_multiplier", 1.0), "layer 0"),
    "a recurrent layer skipped": ("bamba", lambda a: setattr(a, "_layers_between", [range(0)] * 3), "the embedding"),
    "one after the other": ("gpt_neox", lambda a: setattr(a._layers[1], "_parallel", False), "layer 1"),
}  # fmt: skip
"""For each fault: the model, the change to its adapter, and the part that the error must name."""


class TestVerification:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_large_keys_are_accepted(self, dtype: torch.dtype) -> None:
        """Large key biases give scores of several hundred, as in the first layer of Qwen2.

        Eager attention rounds such scores to half precision, which causes errors above one.
        """
        model = architecture("qwen2", dtype=dtype)
        attention = model.model.layers[0].self_attn
        attention.k_proj.bias[::5] = 150
        attention.q_proj.bias[::5] = 8
        verify_model(model, adapter_for(model))

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_fault_is_detected(self, fault: str, dtype: torch.dtype) -> None:
        name, change, named = FAULTS[fault]
        model = architecture(name, dtype=dtype)
        with pytest.raises(ModelError, match=named) as refused:
            verify_model(model, faulty_adapter(model, change))
        assert refused.value.reason == ("attention_argument" if " in layer" in named else "verification")

    @pytest.mark.parametrize("call", ["update_conv_state", "update_recurrent_state"])
    def test_lost_recurrent_state_is_detected(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(RecurrentState, call, lambda self, given, *_, **__: given)
        model = architecture("qwen3_5")
        with pytest.raises(ModelError, match=r"the embedding .* in prefill"):
            verify_model(model, adapter_for(model))

    def test_faulty_outputs_are_detected_without_comparing_arguments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verification._Verification, "_compare_arguments", lambda *_: None)
        for fault in ("no cap of scores", "no window", "a window too short", "no sinks"):
            name, change, _ = FAULTS[fault]
            model = architecture(name)
            with pytest.raises(ModelError, match="layer 0"):
                verify_model(model, faulty_adapter(model, change))

    def test_unregistered_class_runs_unless_forward_computes_more(self) -> None:
        model = architecture("llama3")
        model.__class__ = type("Custom", (type(model),), {})
        assert load_model(model).name == "Custom"
        with pytest.raises(ModelError, match="Custom is not supported") as refused:
            load_model(model, verify="off")
        assert refused.value.reason == "verification"

        def forward(self: Any, *args: Any, **named: Any) -> Any:
            out = super(type(model), self).forward(*args, **named)
            out.logits = out.logits / 4
            return out

        model.__class__ = type("Quartered", (type(model),), {"forward": forward})
        model.lm_head.weight[0] += 1  # changes the fingerprint
        with pytest.raises(ModelError, match=r"Quartered .* the head") as refused:
            load_model(model)
        assert refused.value.reason == "verification"

    @pytest.mark.parametrize("skipped", [False, True])
    def test_layer_without_attention_belongs_to_the_previous_layer(self, skipped: bool) -> None:
        class Mixer(nn.Module):
            def __init__(self, layer: Any) -> None:
                super().__init__()
                self.norm, self.mlp = layer.post_attention_layernorm, layer.mlp

            def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
                return hidden + self.mlp(self.norm(hidden))

        class Hybrid(ForwardingAdapter):
            def mlp(self, layer: int, residual: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
                out = super().mlp(layer, residual, tokens)
                return mixer(out) if layer == 0 and not skipped else out

        model = architecture("llama3")
        model.model.layers[1] = mixer = Mixer(model.model.layers[1])
        attentions = copy.deepcopy(model)
        del attentions.model.layers[1]
        attentions.config.num_hidden_layers = 2
        adapter = Hybrid(adapter_for(attentions))
        assert adapter.geometry.layers == 2 and len(weight_sizes(model).layers) == 3
        with pytest.raises(ModelError, match="layer 0 differs") if skipped else nullcontext():
            verify_model(model, adapter)

    def test_verification_runs_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verified: list[str] = []
        monkeypatch.setattr(verification, "verify_model", lambda *_: verified.append("auto"))
        monkeypatch.setattr(loading, "verify_model", lambda *_: verified.append("always"))
        model = architecture("qwen3", vocab_size=43)
        for verify in ("auto", "auto", "always", "off", "auto"):
            load_model(model, verify=verify)  # type: ignore[arg-type]
        assert verified == ["auto", "always"]
        model.config.some_option_of_tomorrow = 2.0  # not part of the fingerprint
        load_model(model)
        assert verified == ["auto", "always", "auto"]
