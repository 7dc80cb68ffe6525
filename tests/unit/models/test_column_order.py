"""Weights in column order: only where that is faster, and nothing but their order changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import NAMES, tiny_model, tiny_prompt

from offload_rt.models.column_order import order_by_columns
from offload_rt.models.registry import load_model


@pytest.mark.parametrize("name", NAMES)
def test_values_and_logits_stay(name: str) -> None:
    model, reference = tiny_model(name), tiny_model(name)
    order_by_columns(model)
    for (path, weight), original in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(weight, original), path
    ids = torch.tensor([tiny_prompt(20)])
    expected = reference(ids).logits
    # Another order of the same float32 products: the project's bound for logits.
    assert (model(ids).logits - expected).abs().max() < 2e-5 * expected.abs().max()


def test_only_wide_float32_matrices_are_reordered() -> None:
    model = tiny_model("llama")
    order_by_columns(model)
    layer = model.model.layers[0]
    assert layer.mlp.gate_proj.weight.stride() == (1, 96)
    assert model.lm_head.weight.stride(0) == 1
    assert layer.mlp.down_proj.weight.is_contiguous()
    assert model.model.embed_tokens.weight.is_contiguous()
    half = tiny_model("llama", dtype=torch.bfloat16)
    order_by_columns(half)
    assert all(weight.is_contiguous() for weight in half.parameters())


def test_a_tied_head_stays_an_embedding() -> None:
    model = tiny_model("qwen2")
    order_by_columns(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_contiguous()


def test_a_checkpoint_is_reordered_and_a_loaded_model_is_left_alone(tmp_path: Path) -> None:
    mine = tiny_model("llama")
    mine.save_pretrained(tmp_path)
    from_folder, from_memory = load_model(str(tmp_path), device="cpu"), load_model(mine)
    assert all(weight.is_contiguous() for weight in mine.parameters())
    assert from_folder.fingerprint == from_memory.fingerprint
    hidden = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    position = torch.tensor([3])
    q, other = (loaded.adapter.query(0, hidden, position) for loaded in (from_folder, from_memory))
    torch.testing.assert_close(q, other, rtol=1e-5, atol=1e-6)
