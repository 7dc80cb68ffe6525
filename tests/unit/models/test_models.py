"""Test adapters against transformers, loading of models, and fingerprints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import NAMES, VOCAB, edit_config, tiny_model, tiny_prompt
from torch import nn

from offload_rt.errors import ConfigError, ModelError
from offload_rt.models import checkpoint
from offload_rt.models.adapter import ModelAdapter
from offload_rt.models.fingerprint import fingerprint
from offload_rt.models.loading import load_model
from offload_rt.models.registry import adapter_for
from offload_rt.models.shape import load_shape
from offload_rt.models.source import ModelSource

LENGTH = 80  # longer than Mistral's window of 48
ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in NAMES} | {
    "llama-yarn": ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        },
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3-layer-types": (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "opt-no-final-norm": ("opt", {"_remove_final_layer_norm": True}),
    "opt-no-biases": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt2-inverse-layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False}),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str, dtype: torch.dtype = torch.float32) -> Any:
    name, overrides = VARIANTS[variant]
    return tiny_model(name, dtype=dtype, **overrides)


def forward(adapter: ModelAdapter, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits `[T, V]` of one sequence, computed with the adapter and a plain masked softmax."""
    geometry = adapter.geometry
    x = adapter.embed(tokens, positions)
    distance = positions[:, None] - positions[None, :]
    for layer in range(geometry.layers):
        q, k, v = adapter.qkv(layer, adapter.attention_input(layer, x), positions)
        scores = q @ k.repeat_interleave(geometry.group, 0).mT * geometry.scales[layer]
        hidden = (distance < 0) | (distance >= (geometry.windows[layer] or len(tokens)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = (weights @ v.repeat_interleave(geometry.group, 0)).transpose(0, 1).flatten(1)
        x = adapter.mlp(layer, adapter.after_attention(layer, x, attended), tokens)
    return adapter.logits(x)


def assert_logits_equal_transformers(model: Any, start: int, tolerance: float) -> None:
    """Compare logits at positions from `start` on. `tolerance` is relative to the largest logit."""
    tokens = torch.tensor(tiny_prompt(LENGTH))
    positions = torch.arange(start, start + LENGTH)
    expected = model(tokens[None], position_ids=positions[None]).logits[0]
    actual = forward(adapter_for(model), tokens, positions)
    assert actual.dtype == torch.promote_types(model.dtype, torch.float32)
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance


def widen_norms(model: nn.Module) -> None:
    """Replace transformers' RMSNorm, which rounds to float32, with torch's in float64."""
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight = module.weight
            model.set_submodule(path, norm)


class TestAgainstTransformers:
    @variants
    @pytest.mark.parametrize("start", [0, 37])
    def test_float64_logits_equal_transformers(self, variant: str, start: int) -> None:
        model = build(variant, torch.float64)
        widen_norms(model)
        assert_logits_equal_transformers(model, start, 1e-10)

    @variants
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_kv_of_the_first_layer_equals_transformers_bit_for_bit(self, variant: str, dtype: torch.dtype) -> None:
        model = build(variant, dtype)
        adapter = adapter_for(model)
        tokens, positions = torch.tensor(tiny_prompt(LENGTH)), torch.arange(LENGTH)
        # A sliding-window layer's cache holds one token less than the window.
        held = (adapter.geometry.windows[0] or LENGTH + 1) - 1
        cached = model(tokens[None], use_cache=True).past_key_values.layers[0]
        _, k, v = adapter.qkv(0, adapter.attention_input(0, adapter.embed(tokens, positions)), positions)
        assert torch.equal(k[:, -held:], cached.keys[0])
        assert torch.equal(v[:, -held:], cached.values[0])

    def test_yarn_attention_factor_is_not_one(self) -> None:
        """If the factor were 1, the variant "llama-yarn" would not test it."""
        assert build("llama-yarn").model.rotary_emb.attention_scaling > 1.1


class TestAdapterMethods:
    @variants
    def test_query_and_key_value_equal_qkv(self, variant: str) -> None:
        adapter = adapter_for(build(variant))
        geometry = adapter.geometry
        tokens, positions = torch.tensor(tiny_prompt(9)), torch.arange(5, 14)
        x = adapter.embed(tokens, positions)
        for layer in range(geometry.layers):
            a = adapter.attention_input(layer, x + layer)
            q, k, v = adapter.qkv(layer, a, positions)
            assert q.shape == (geometry.heads, 9, geometry.head_dim)
            assert k.shape == v.shape == (geometry.kv_heads, 9, geometry.head_dim)
            # GPT-2 multiplies by slices of one matrix, so the order of additions may differ.
            torch.testing.assert_close(adapter.query(layer, a, positions), q, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(adapter.key_value(layer, a, positions), (k, v), rtol=1e-5, atol=1e-5)

    @variants
    def test_permuted_tokens_give_permuted_results(self, variant: str) -> None:
        adapter = adapter_for(build(variant))
        tokens, positions = torch.tensor(tiny_prompt(12)), torch.tensor([3, 900, 7, 7, 0, 55, 54, 300, 2, 1, 11, 1023])
        order = torch.randperm(12, generator=torch.Generator().manual_seed(1))

        def run(tokens: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
            x = adapter.embed(tokens, positions)
            kept = x.clone()
            a = adapter.attention_input(1, x)
            q, k, v = adapter.qkv(1, a, positions)
            attended = q.transpose(0, 1).flatten(1)
            residual = adapter.after_attention(1, x, attended)
            out = adapter.mlp(1, residual, tokens)
            assert torch.equal(x, kept)
            return [*(rows.transpose(0, 1) for rows in (q, k, v)), residual, out, adapter.logits(out)]

        for plain, shuffled in zip(run(tokens, positions), run(tokens[order], positions[order]), strict=True):
            torch.testing.assert_close(plain[order], shuffled, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_logits_of_half_precision_are_float32(self, dtype: torch.dtype) -> None:
        model = tiny_model("llama", dtype=dtype)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        logits = adapter_for(model).logits(x)
        assert logits.dtype == torch.float32
        assert torch.equal(logits, model.lm_head(model.model.norm(x)).float())

    def test_rotation_follows_the_positions(self) -> None:
        """Cached cos and sin must not be used for other positions.

        If a tensor of positions was changed in place, the change takes effect from layer 0 on.
        """
        adapter, fresh = adapter_for(build("llama")), adapter_for(build("llama"))
        a = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        first, second = torch.tensor([1, 2, 3]), torch.tensor([9, 2, 70])
        for layer in (0, 1, 2):
            adapter.qkv(layer, a, first)
        assert torch.equal(adapter.query(2, a, second), fresh.query(2, a, second.clone()))
        assert torch.equal(adapter.query(2, a, first), fresh.query(2, a, first.clone()))
        first += 1
        for layer in (0, 1):
            assert torch.equal(adapter.query(layer, a, first), fresh.query(layer, a, first.clone()))


class TestGeometry:
    @pytest.mark.parametrize("name", NAMES)
    def test_dimensions(self, name: str) -> None:
        learned = name in ("opt", "opt_postnorm", "gpt2")
        head_dim = {"qwen3": 24, "opt_postnorm": 16, "gpt2": 16}.get(name, 32)
        g, hidden = adapter_for(tiny_model(name)).geometry, 128 if name in ("qwen2", "opt") else 64
        assert (g.hidden, g.vocab, g.heads, g.kv_heads, g.head_dim) == (hidden, VOCAB, 4, 4 if learned else 2, head_dim)
        expected = (1024, True, 4.0) if learned else (4096, False, 5.0)
        assert (g.max_positions, g.absolute_positions, g.default_alpha) == expected
        assert g.scales == pytest.approx([head_dim**-0.5] * g.layers)

    def test_scales_of_gpt2_options(self) -> None:
        assert adapter_for(build("gpt2-inverse-layer")).geometry.scales == pytest.approx([1 / 4, 1 / 8, 1 / 12])
        assert adapter_for(build("gpt2-unscaled")).geometry.scales == (1.0,) * 3

    @pytest.mark.parametrize(
        ("variant", "windows"),
        [
            ("llama", (None,) * 3),
            ("mistral", (48,) * 3),
            ("mistral-no-window", (None,) * 3),
            ("qwen2", (None,) * 3),
            ("qwen2-sliding", (None, None, 48)),
            ("qwen3-layer-types", (48, None, 48)),
            ("gpt2", (None,) * 3),
        ],
    )
    def test_sliding_windows(self, variant: str, windows: tuple[int | None, ...]) -> None:
        assert adapter_for(build(variant)).geometry.windows == windows

    def test_llama_ignores_a_window_as_transformers_does(self) -> None:
        assert adapter_for(tiny_model("llama", sliding_window=8)).geometry.windows == (None,) * 3
        assert_logits_equal_transformers(tiny_model("llama", sliding_window=8), 0, 2e-5)

    def test_yarn_extends_max_positions(self) -> None:
        rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 4096}
        assert adapter_for(tiny_model("llama", rope_parameters=rope)).geometry.max_positions == 16384


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class TestLoading:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", NAMES)
    def test_saved_folder_equals_the_model(self, name: str, tmp_path: Path) -> None:
        model = tiny_model(name)
        model.save_pretrained(tmp_path)
        loaded = load_model(tmp_path, device="cpu")
        tokens, positions = torch.tensor(tiny_prompt(20)), torch.arange(20)
        assert torch.equal(forward(loaded.adapter, tokens, positions), forward(adapter_for(model), tokens, positions))
        assert (loaded.fingerprint, loaded.name) == (fingerprint(model), str(tmp_path))
        assert loaded.tokenizer is None and loaded.eos_token_ids == frozenset()
        (tmp_path / "model.safetensors").unlink()  # `load_shape` needs only the configuration
        shape = load_shape(tmp_path, device="cpu", dtype="bfloat16")
        half = load_model(tiny_model(name, dtype=torch.bfloat16))
        assert (shape.geometry, shape.dtype) == (loaded.adapter.geometry, torch.bfloat16)
        assert shape.weight_bytes == half.weight_bytes
        assert shape == load_shape(tiny_model(name, dtype=torch.bfloat16))

    def test_reference_model(self) -> None:
        loaded = load_model("reference", device="cpu")
        assert (loaded.name, loaded.adapter.dtype, loaded.adapter.geometry.layers) == ("reference", torch.float32, 8)
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.decode(loaded.tokenizer.encode("He said nothing.")).endswith("said nothing.")
        assert loaded.eos_token_ids == {0}
        assert loaded.weight_bytes == pytest.approx(4 * 6.03e6, rel=0.01)

    def test_weight_bytes_count_tied_heads_once(self) -> None:
        tied, untied = (load_model(tiny_model("llama", tie_word_embeddings=tie)) for tie in (True, False))
        assert untied.weight_bytes - tied.weight_bytes == VOCAB * 64 * 4

    def test_dtype_and_device(self, tmp_path: Path) -> None:
        tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
        assert load_model(tmp_path, device="cpu", dtype="float32").adapter.dtype == torch.float32
        assert load_model(tmp_path, device="cpu", dtype="bfloat16").adapter.dtype == torch.bfloat16
        assert load_model(tmp_path, device="cpu", dtype=torch.float64).adapter.dtype == torch.float64
        cuda = torch.device("cuda")
        source, config = ModelSource("anywhere"), tiny_model("llama", dtype=torch.bfloat16).config
        stated = checkpoint.declared_dtype(source, config)
        assert checkpoint.resolve_dtype("auto", source, stated, cuda) == torch.bfloat16
        with pytest.raises(ConfigError, match=r"dtype='bfloat61' is unknown; did you mean 'bfloat16'\?"):
            load_model(tmp_path, dtype="bfloat61")
        wrong = {"tpu": "is not a device", "xpu": "page-locked through CUDA", "cuda:99": "this machine has"}
        for device, message in wrong.items():
            with pytest.raises(ConfigError, match=message):
                load_model(tmp_path, device=device)

    def test_eos_tokens(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
        assert load_model(folder, device="cpu").eos_token_ids == {7, 9}
        assert load_model(tiny_model("llama", eos_token_id=5)).eos_token_ids == {5}

    def test_loaded_model_keeps_dtype_and_device(self) -> None:
        model = tiny_model("gpt2", dtype=torch.bfloat16).train()
        loaded = load_model(model)
        assert loaded.adapter.dtype == torch.bfloat16
        assert not model.training
        assert loaded.name == "GPT2LMHeadModel"
        for options in ({"device": "cuda"}, {"dtype": "float32"}):
            with pytest.raises(ModelError, match="move it first"):
                load_model(model, **options)

    def test_tokenizer_by_name(self, folder: Path) -> None:
        assert load_model(folder, tokenizer="reference", device="cpu").tokenizer is not None
        with pytest.raises(ModelError, match="does not exist"):
            load_model(folder, tokenizer="./nowhere", device="cpu")


class TestFingerprint:
    def test_does_not_depend_on_files(self, folder: Path, tmp_path: Path) -> None:
        expected = load_model(folder, device="cpu").fingerprint
        assert len(expected) == 64
        model = tiny_model("llama")
        model.save_pretrained(tmp_path / "sharded", max_shard_size="200kB")
        assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
        assert load_model(tmp_path / "sharded", device="cpu").fingerprint == expected
        shutil.move(folder, tmp_path / "elsewhere")
        edit_config(tmp_path / "elsewhere", transformers_version="4.0.0", use_cache=False, _name_or_path="x")
        assert load_model(tmp_path / "elsewhere", device="cpu").fingerprint == expected

    def test_does_not_change_the_model(self) -> None:
        model = tiny_model("llama")
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        assert fingerprint(model) == fingerprint(model)
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())

    @pytest.mark.parametrize("path", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_changes_with_every_element(self, path: str, dtype: torch.dtype) -> None:
        model = tiny_model("llama", dtype=dtype)
        weight, before = model.get_parameter(path).data.view(-1), fingerprint(model)
        for element in (0, len(weight) // 3, len(weight) - 1):
            kept = weight[element].clone()
            # the smallest change, even if bfloat16 would round it away
            weight[element] = torch.nextafter(kept, torch.tensor(100.0, dtype=dtype))
            assert fingerprint(model) != before
            weight[element] = kept
        assert fingerprint(model) == before

    @pytest.mark.parametrize(
        ("name", "overrides"),
        [
            ("llama", {"rms_norm_eps": 1e-5}),
            ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
            ("llama", {"hidden_act": "gelu"}),
            ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}),
            ("mistral", {"sliding_window": 47}),
            ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
            ("opt", {"activation_function": "gelu"}),
            *(("llama", {key: 0.5}) for key in ("swiglu_limit", "norm_eps", "norm_epsilon", "an_entry_of_tomorrow")),
            ("llama", {"use_qk_norm": True}),
        ],
    )
    def test_changes_with_the_configuration(self, name: str, overrides: dict[str, Any]) -> None:
        assert fingerprint(tiny_model(name, **overrides)) != fingerprint(tiny_model(name))

    def test_differs_between_models(self) -> None:
        prints = [fingerprint(tiny_model(name)) for name in NAMES] + [fingerprint(tiny_model("llama", seed=1))]
        assert len(set(prints)) == len(prints)

    def test_does_not_depend_on_the_dtype_of_equal_values(self) -> None:
        """A bfloat16 checkpoint may be calibrated in float32 on a CPU, and then run in bfloat16 on a GPU."""
        exact = fingerprint(tiny_model("llama"))
        half = tiny_model("llama", dtype=torch.bfloat16)
        expected = fingerprint(half)
        assert fingerprint(half.float()) == expected == fingerprint(half.double()) != exact

    def test_does_not_depend_on_strides(self) -> None:
        model = tiny_model("llama")
        before, weight = fingerprint(model), model.lm_head.weight
        weight.data = weight.data.t().contiguous().t()
        assert fingerprint(model) == before

    def test_does_not_depend_on_int_or_float_in_the_configuration(self) -> None:
        # a checkpoint may store 10000 or 10000.0
        whole, real = ({"rope_type": "default", "rope_theta": theta} for theta in (10000, 10000.0))
        assert fingerprint(tiny_model("llama", rope_parameters=whole)) == fingerprint(
            tiny_model("llama", rope_parameters=real)
        )
