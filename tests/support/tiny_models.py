"""Tiny random models shared by all tests: `tiny_model("llama")`.

Most models have a head dimension of 32, which the C kernels support. Norm gains, biases and QK-norms are not trivial.
Attention scores have a spread of about two nats, and greedy continuations vary. There is no EOS token unless requested.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.initialization import no_init_weights
from transformers.models.auto import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from offload_rt.models.source import find_source

VOCAB = 199

_IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
_ROPE: dict[str, Any] = _IDS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_OPT: dict[str, Any] = _IDS | {
    "hidden_size": 128,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}

CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    # GQA, untied head
    "llama": (LlamaConfig, _ROPE | {"head_dim": 32}),
    # all layers use a sliding window
    "mistral": (MistralConfig, _ROPE | {"head_dim": 32, "sliding_window": 48}),
    # biases of q, k, v; tied head; no sliding window (use_sliding_window=True, max_window_layers=2: layer 2)
    "qwen2": (
        Qwen2Config,
        _ROPE | {"hidden_size": 128, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 48},
    ),
    # QK-norm; head_dim 24, which the C kernels do not support
    "qwen3": (Qwen3Config, _ROPE | {"head_dim": 24, "sliding_window": 48}),
    # learned positions with offset 2; pre-norm
    "opt": (OPTConfig, _OPT),
    # like OPT-350m: post-norm, no final norm, embeddings projected from 40 to 64 and back
    "opt_postnorm": (
        OPTConfig,
        _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 40, "hidden_size": 64},
    ),
    # fused Conv1D; the other variant is scale_attn_by_inverse_layer_idx=True
    "gpt2": (GPT2Config, _IDS | {"n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 1024}),
}
NAMES = tuple(CONFIGS)


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random model on the CPU, in eval mode and without gradients. `overrides` change its configuration.

    The weights depend only on the arguments. They are drawn in float32 and then cast.
    """
    config_class, defaults = CONFIGS[name]
    config = config_class(**(defaults | overrides))
    with no_init_weights():  # `fill` overwrites all weights
        # Create it in its dtype, as from_pretrained does: model.to(dtype) would also round the RoPE frequencies.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    fill(model, seed)
    return model.requires_grad_(False).eval()


def tiny_checkpoint(folder: Path, architecture: str, **config: Any) -> str:
    """Save a random model of `architecture` with the reference model's tokenizer."""
    tiny_model(architecture, vocab_size=2048, **config).save_pretrained(folder)
    for file in Path(find_source("reference").name_or_path).glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Overwrite all parameters with seeded random numbers.

    Matrices map inputs of unit variance to outputs of variance `gain**2`. Gains are around 1, biases around 0.
    """
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for path, module in model.named_modules():
        for kind, weight in module.named_parameters(recurse=False):
            if id(weight) in done:  # a tied head
                continue
            done.add(id(weight))
            noise = torch.randn(weight.shape, generator=generator)
            if kind == "bias":
                noise *= 0.15
            elif kind == "A_log":  # the recurrent state decays slowly: each token keeps 0.6 to 0.95 of it
                noise = 0.4 * noise - 2
            elif weight.dim() == 1:
                noise = (1.6 if path.endswith(("q_norm", "k_norm")) else 1.0) * (1 + 0.3 * noise)
            elif isinstance(module, nn.Conv1d):  # one input channel each
                noise *= 1.2 / weight.shape[-1] ** 0.5
            elif isinstance(module, nn.Embedding):
                noise *= 0.7
            else:
                inputs = 0 if isinstance(module, Conv1D) else 1
                noise -= noise.mean(inputs, keepdim=True)  # otherwise the mean of ReLU and GELU dominates the input
                noise *= _gain(path) / weight.shape[inputs] ** 0.5
            weight.copy_(noise)


def _gain(path: str) -> float:
    """Return a gain that makes attention uneven, and outputs so large that a tied head does not repeat its input."""
    leaf = path.rsplit(".", 1)[-1]
    if leaf in ("q_proj", "k_proj", "c_attn", "q_b_proj", "kv_b_proj"):
        return 1.6
    return 2.0 if leaf in ("o_proj", "out_proj", "down_proj", "fc2", "c_proj") else 1.2


def depth(name: str, layers: int) -> dict[str, int]:
    return {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}


def tiny_prompt(length: int, *, seed: int = 0) -> list[int]:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_greedy(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Check that `tokens` are transformers' greedy continuation of `prompt`."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
