"""Test RoPE scaling that depends on the sequence length.

`max_model_len` decides whether transformers' frequencies for short or for long texts are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.architectures import LONGROPE, VOCAB, build
from support.tiny_models import tiny_model, tiny_prompt
from transformers import AutoModelForCausalLM

from offload_rt import LLM, ModelError, SamplingParams
from offload_rt.models import registry
from offload_rt.models.loading import load_model
from offload_rt.models.rotary import MAX_CACHED_POSITIONS
from offload_rt.models.shape import load_shape

TRAINED_LENGTH = 64
LONG = LONGROPE | {"short_factor": [1.0, 1.3, 1.1, 1.6], "long_factor": [2.0, 3.0, 5.0, 4.0]}
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {
        "sliding_window": None,
        "rope_parameters": LONG | {"original_max_position_embeddings": TRAINED_LENGTH},
        "original_max_position_embeddings": TRAINED_LENGTH,
        "max_position_embeddings": 512,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": TRAINED_LENGTH,
    },
}
SHORT_LENGTH = 30


@pytest.fixture(scope="module", params=list(KINDS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / str(request.param)
    model = build("Phi3" if request.param == "longrope" else "Llama", torch.float64, **KINDS[request.param])
    model.save_pretrained(folder)
    return folder


def generate_tokens(checkpoint: Path, prompt: list[int], max_model_len: int | None) -> list[int]:
    config: dict[str, Any] = {
        "max_model_len": max_model_len,
        "host_memory": "4MiB",
        "dtype": "float64",
        "verify": "always",
    }
    with LLM(checkpoint, policy="full", **config) as llm:
        return llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].token_ids


def transformers_tokens(checkpoint: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    given = torch.tensor([prompt])
    made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False)
    return [int(token) for token in made[0, len(prompt) :]]


def prompt_of(tokens: int) -> list[int]:
    return [token % VOCAB for token in tiny_prompt(tokens)]


def test_rope_tables_are_cached_for_a_few_position_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill chunks alternate in each layer. Layer 0 always recomputes the tables, as positions may have changed."""
    rotary = load_model(tiny_model("llama")).adapter._rotary
    computed, tables = [], rotary._tables
    monkeypatch.setattr(rotary, "_tables", lambda *given: computed.append(given[2]) or tables(*given))
    chunks = [torch.arange(4) + 4 * i for i in range(MAX_CACHED_POSITIONS)]
    x = torch.randn(2, 4, 32)
    turned = [[rotary.rotation_to(layer, chunk, x)(x) for chunk in chunks] for layer in range(3)]
    assert len(computed) == MAX_CACHED_POSITIONS and all(a.equal(b) for a, b in zip(turned[0], turned[2], strict=True))
    chunks[0].add_(1)
    assert not rotary.rotation_to(0, chunks[0], x)(x).equal(turned[0][0]) and len(computed) == MAX_CACHED_POSITIONS + 1
    rotary.rotation_to(1, torch.arange(4), x)
    assert len(rotary._cached) == MAX_CACHED_POSITIONS
    del computed[:], chunks[1:]
    rotary.rotation_to(1, torch.arange(4), x)
    assert len(rotary._cached) == 2, "tables of freed positions are dropped"


def test_short_texts_equal_transformers(checkpoint: Path) -> None:
    prompt = prompt_of(SHORT_LENGTH)
    expected = transformers_tokens(checkpoint, prompt)
    assert generate_tokens(checkpoint, prompt, TRAINED_LENGTH) == expected
    if checkpoint.name == "longrope":
        assert generate_tokens(checkpoint, prompt, None) != expected, "the frequencies of long texts give other tokens"


def test_unregistered_class_equals_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unregistered class is inspected before its weights are read. This inspection must not change the model."""
    for architecture in ("Phi3ForCausalLM", "LlamaForCausalLM"):
        monkeypatch.delitem(registry._adapters, architecture)
    prompt = prompt_of(SHORT_LENGTH)
    assert generate_tokens(checkpoint, prompt, TRAINED_LENGTH) == transformers_tokens(checkpoint, prompt)


def test_long_texts_equal_transformers_or_are_refused(checkpoint: Path) -> None:
    if checkpoint.name == "dynamic":
        with pytest.raises(
            ModelError, match=f"max_model_len={2 * TRAINED_LENGTH} must be at most {TRAINED_LENGTH}"
        ) as refused:
            load_model(checkpoint, max_model_len=2 * TRAINED_LENGTH)
        assert refused.value.reason == "rope_length"
        return
    prompt = prompt_of(2 * TRAINED_LENGTH)
    assert generate_tokens(checkpoint, prompt, None) == transformers_tokens(checkpoint, prompt)


def test_each_length_has_separate_positions_and_fingerprint(checkpoint: Path) -> None:
    """KV stored with one set of frequencies must not be reused with the other set."""
    short, whole = (load_model(checkpoint, max_model_len=length) for length in (TRAINED_LENGTH, None))
    same = checkpoint.name == "dynamic"
    assert (
        short.adapter.geometry.max_positions
        == TRAINED_LENGTH
        == load_shape(checkpoint, max_model_len=TRAINED_LENGTH).geometry.max_positions
    )
    assert (short.fingerprint == whole.fingerprint) is same
    assert load_shape(checkpoint).geometry == whole.adapter.geometry


def test_loaded_model_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="pass the model's folder or hub id"):
        load_model(AutoModelForCausalLM.from_pretrained(checkpoint))
