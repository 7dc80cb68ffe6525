"""Compare shapes of plain decoders, computed from config.json, with models on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import tiny_model

from offload_rt.models import shape
from offload_rt.models.plain_shape import plain_shape
from offload_rt.models.source import find_source

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def change_config(folder: Path, **changes: Any) -> None:
    """Change entries in config.json. An ellipsis as the value removes the entry."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "overrides", "changes"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}, {}),
        ("llama", {"head_dim": None, "rope_parameters": LLAMA3}, {"head_dim": ...}),
        ("llama", {}, {"tie_word_embeddings": ...}),
        ("llama", {"num_key_value_heads": 4}, {"num_key_value_heads": ...}),
        ("llama", {}, {"dtype": ..., "torch_dtype": "float16"}),
        ("mistral", {"sliding_window": None}, {}),
        ("qwen2", {"use_sliding_window": False}, {}),
        ("qwen2", {"use_sliding_window": False}, {"sliding_window": 131072, "layer_types": ...}),
        ("qwen3", {"use_sliding_window": False, "tie_word_embeddings": True}, {}),
    ],
)
def test_shape_from_config_equals_the_shape_of_the_model(
    name: str, overrides: dict[str, Any], changes: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: Any
) -> None:
    tiny_model(name, **overrides).save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    assert plain_shape(find_source(tmp_path)) is not None
    plain = shape.load_shape(tmp_path, device="cpu", dtype=dtype)
    monkeypatch.setattr(shape, "plain_shape", lambda source: None)
    assert plain == shape.load_shape(tmp_path, device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}}),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "own.Model"}}),
        ("llama", {"architectures": ["OwnForCausalLM"]}),
        ("llama", {"num_key_value_heads": 3}),
        ("llama", {"hidden_size": "64"}),
        ("llama", {"model_type": "gemma"}),
        ("mistral", {}),  # with sliding windows
        ("mistral", {"sliding_window": ...}),  # the default is a window
        ("qwen2", {"use_sliding_window": True, "sliding_window": 48}),
        ("qwen3", {"head_dim": ...}),
    ],
)
def test_other_models_are_left_to_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    assert plain_shape(find_source(tmp_path)) is None


def test_folders_with_peft_adapters_are_left_to_transformers(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert plain_shape(find_source(tmp_path)) is not None
    (tmp_path / "adapter_config.json").write_text("{}")
    assert plain_shape(find_source(tmp_path)) is None
