"""Tiny random models of supported and unsupported architectures: `architecture("gemma3")`.

The models are smaller than those in `tiny_models`. Their sliding windows have 12 tokens, fewer than any test uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto import AutoModelForCausalLM, AutoModelForImageTextToText

from support.tiny_models import fill

VOCAB = 97
WINDOW = 12


@dataclass(frozen=True)
class Architecture:
    """A tiny model.

    Attributes:
        config: Name of the configuration class without "Config".
        options: Options that differ from the defaults of all tiny models.
        traits: Description of the architecture's special features.
    """

    config: str
    options: dict[str, Any] = field(default_factory=dict)
    traits: str = ""


_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}
_MIMO = _EXPERTS | {"head_dim": 12, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA4_EXPERTS: dict[str, Any] = {
    "attention_k_eq_v": True,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
_GEMMA4_SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 4,
    "final_logit_softcapping": 5.0,
}
_GEMMA4_E2B = _GEMMA4_SMALL | {
    "layer_types": ["sliding_attention", "full_attention"] + 2 * ["sliding_attention"] + 2 * ["full_attention"],
    "use_double_wide_mlp": True,
}
_GEMMA4_E4B = _GEMMA4_SMALL | {
    "num_hidden_layers": 7,
    "layer_types": [*_KINDS, *_KINDS, "full_attention"],
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE = {"image_size": 14, "patch_size": 7}
_IMAGE_TOKEN = {"image_token_index": 90}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def _multimodal(text: dict[str, Any], vision: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"text_config": _COMMON | text, "vision_config": vision, **options}


_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN = _DELTA | {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_QWEN["rope_parameters"]["partial_rotary_factor"] = 0.25
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 24}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
    "shared_intermediate_size": 48,
}
_CONVOLUTIONS = ["conv", "full_attention", "conv"]
# The C kernels support keys with 24 + 8 elements. Keys and values of a head have different widths.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
}
_LATENT_EXPERTS = _LATENT | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_MSCALE = {"mscale": 0.7, "mscale_all_dim": 1.0}

RUNS: dict[str, Architecture] = {
    "llama3": Architecture("Llama", {"rope_parameters": _LLAMA3}, "RoPE of Llama 3.x"),
    "mistral": Architecture("Mistral", {"sliding_window": WINDOW}, "sliding"),
    "ministral": Architecture(
        "Ministral", {"head_dim": 8, "sliding_window": WINDOW, "layer_types": _KINDS}, "full and sliding layers"
    ),
    "mixtral": Architecture("Mixtral", {"num_local_experts": 4, "sliding_window": WINDOW}, "mixture of experts"),
    "qwen2": Architecture("Qwen2", {}, "biases of q, k, v"),
    "qwen3": Architecture("Qwen3", {"head_dim": 12}, "q and k normed"),
    "qwen2_moe": Architecture(
        "Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2}, "mixture of experts"
    ),
    "qwen3_moe": Architecture("Qwen3Moe", _EXPERTS | {"head_dim": 12}, "mixture of experts, q and k normed"),
    "gemma": Architecture("Gemma", {"head_dim": 8}, "scaled embedding"),
    "gemma2": Architecture(
        "Gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "layer_types": _KINDS,
            "final_logit_softcapping": 4.0,
            "attn_logit_softcapping": 1.5,
        },
        "capped scores and logits, full and sliding layers, norms before and after, scaled embedding",
    ),
    "gemma3": Architecture(
        "Gemma3Text",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": WINDOW,
            "layer_types": _KINDS,
            "final_logit_softcapping": 4.0,
        },
        "full and sliding layers with a RoPE each, norms before and after, q and k normed, scaled embedding",
    ),
    "phi": Architecture(
        "Phi", {"partial_rotary_factor": 0.5, "qk_layernorm": True}, "parallel, partial RoPE, q and k normed"
    ),
    "phi3": Architecture("Phi3", {"sliding_window": WINDOW}, "fused q, k, v"),
    "phi4_mini": Architecture("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}, "as Phi-3; partial RoPE"),
    "olmo2": Architecture("Olmo2", {}, "norms after, q and k normed over all heads"),
    "olmo3": Architecture(
        "Olmo3",
        {
            "sliding_window": WINDOW,
            "layer_types": _KINDS,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        "as OLMo 2; full and sliding layers, YaRN in the full ones",
    ),
    "granite": Architecture(
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5},
        "multipliers of embedding, residual, scores and logits",
    ),
    "cohere": Architecture(
        "Cohere", {"logit_scale": 0.3, "use_qk_norm": True}, "parallel, interleaved RoPE, scaled logits"
    ),
    "cohere2": Architecture(
        "Cohere2",
        {"logit_scale": 0.3, "sliding_window": WINDOW, "layer_types": _KINDS},
        "as Cohere; full layers without positions",
    ),
    "starcoder2": Architecture("Starcoder2", {"sliding_window": WINDOW}, "biases, plain MLP"),
    "smollm3": Architecture("SmolLM3", {"no_rope_layers": [1, 0, 1]}, "layers without positions"),
    "glm": Architecture("Glm", {"head_dim": 8}, "interleaved RoPE, partial"),
    "glm4": Architecture("Glm4", {"head_dim": 8}, "as GLM; norms before and after"),
    "gpt_neox": Architecture("GPTNeoX", {"rotary_pct": 0.25}, "fused q, k, v, parallel, partial RoPE"),
    "gpt_neox_sequential": Architecture("GPTNeoX", {"use_parallel_residual": False}, "as GPT-NeoX, not parallel"),
    "falcon": Architecture("Falcon", {}, "fused q, k, v, one KV head, parallel"),
    "falcon_new": Architecture(
        "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "as Falcon; grouped KV heads, two norms"
    ),
    "falcon_sequential": Architecture(
        "Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}, "as Falcon; not parallel, biases"
    ),
    "gpt_oss": Architecture(
        "GptOss",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _KINDS,
        },
        "attention sinks, mixture of experts, full and sliding layers",
    ),
    "ministral3": Architecture(
        "Ministral3",
        {
            "head_dim": 8,
            "rope_parameters": _YARN | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
        },
        "YaRN, attention temperature scaling",
    ),
    "llama4": Architecture(
        "Llama4Text",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW,
            "no_rope_layers": [1, 0, 1],
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "floor_scale": 8,
            "attn_scale": 0.3,
        },
        "chunked layers, full layers without positions, attention temperature scaling, interleaved RoPE, "
        "mixture of experts",
    ),
    "mimo_v2_flash": Architecture(
        "MiMoV2Flash",
        _MIMO | {"sliding_window": WINDOW, "layer_types": _KINDS},
        "keys wider than values, full and sliding layers with their own numbers of KV heads, attention sinks and "
        "scaled values, mixture of experts",
    ),
    "gemma4": Architecture(
        "Gemma4Text",
        _GEMMA4 | {"final_logit_softcapping": 5.0},
        "full and sliding layers with head dimensions of their own, norms before and after, q, k and v normed, "
        "scaled layers, partial RoPE",
    ),
    "gemma4_moe": Architecture(
        "Gemma4Text",
        _GEMMA4 | _GEMMA4_EXPERTS,
        "as Gemma 4; full layers with equal K and V and fewer KV heads, mixture of experts beside an MLP",
    ),
    "gemma4_e2b": Architecture(
        "Gemma4Text",
        _GEMMA4 | _GEMMA4_E2B,
        "as Gemma 4; an embedding of each token in every layer, later layers use keys and values of earlier ones and "
        "have wider MLPs",
    ),
    "gemma4_e4b": Architecture("Gemma4Text", _GEMMA4 | _GEMMA4_E4B, "as Gemma 4 E2B, with equal MLPs"),
    "gemma3_multimodal": Architecture(
        "Gemma3",
        _multimodal({"head_dim": 8, "sliding_window": WINDOW, "layer_types": _KINDS}, _VISION, **_IMAGE_TOKEN),
        "language model: Gemma 3's, tied head",
    ),
    "gemma4_multimodal": Architecture(
        "Gemma4",
        _multimodal(
            _GEMMA4 | {"final_logit_softcapping": 5.0, "use_bidirectional_attention": "vision", "pad_token_id": 0},
            _VISION | {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 64},
            audio_config=None,
            **{f"{kind}_token_id": VOCAB for kind in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")},
        ),
        "language model: Gemma 4's",
    ),
    "gemma4_e2b_multimodal": Architecture(
        "Gemma4",
        _multimodal(
            _GEMMA4 | _GEMMA4_E2B | {"use_bidirectional_attention": "vision", "pad_token_id": 0},
            _VISION | {"head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 64},
            audio_config=None,
            **{f"{kind}_token_id": VOCAB for kind in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")},
        ),
        "language model: Gemma 4 E2B's",
    ),
    "llava": Architecture(
        "Llava",
        _multimodal(
            {"model_type": "llama", "rope_parameters": _LLAMA3},
            {"model_type": "clip_vision_model", **_VISION, **_IMAGE},
            **_IMAGE_TOKEN,
        ),
        "language model: Llama's",
    ),
    "mistral3": Architecture(
        "Mistral3",
        _multimodal(
            {"model_type": "mistral", "sliding_window": WINDOW},
            {"model_type": "pixtral", **_VISION, **_IMAGE},
            **_IMAGE_TOKEN,
        ),
        "language model: Mistral's",
    ),
    "qwen2_vl": Architecture(
        "Qwen2VL",
        _multimodal({"rope_parameters": _MROPE}, {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}),
        "language model: RoPE in three sections with equal positions",
    ),
    "qwen2_5_vl": Architecture(
        "Qwen2_5_VL",
        _multimodal(
            {"rope_parameters": _MROPE},
            {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16},
        ),
        "language model: as Qwen2-VL's",
    ),
    "granite_attention": Architecture(
        "GraniteMoeHybrid",
        _GRANITE
        | _MAMBA
        | {"layer_types": ["full_attention"] * 3, "num_local_experts": 0, "position_embedding_type": "rope"},
        "as Granite; layers of attention alone",
    ),
    "qwen3_next": Architecture("Qwen3Next", _QWEN | _SHARED, "gated delta rule, output gate, mixture of experts"),
    "qwen3_5": Architecture("Qwen3_5Text", _QWEN, "gated delta rule, output gate, partial RoPE"),
    "qwen3_5_multimodal": Architecture(
        "Qwen3_5",
        _multimodal(
            _QWEN, {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
        ),
        "language model: as Qwen 3.5's",
    ),
    "qwen3_5_moe": Architecture("Qwen3_5MoeText", _QWEN | _SHARED, "as Qwen 3.5; mixture of experts"),
    "qwen3_5_moe_multimodal": Architecture(
        "Qwen3_5Moe",
        _multimodal(
            _QWEN | _SHARED,
            {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16},
        ),
        "language model: as Qwen 3.5's; mixture of experts",
    ),
    "granite_hybrid": Architecture(
        "GraniteMoeHybrid",
        _GRANITE
        | _MAMBA
        | {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": None,
        },
        "Mamba-2, no positions, multipliers, mixture of experts with a shared MLP",
    ),
    "lfm2": Architecture("Lfm2", {"layer_types": _CONVOLUTIONS, "block_multiple_of": 8}, "short convolutions"),
    "lfm2_moe": Architecture(
        "Lfm2Moe",
        _EXPERTS | {"layer_types": _CONVOLUTIONS, "num_dense_layers": 1},
        "short convolutions, mixture of experts",
    ),
    "lfm3": Architecture(
        "Lfm3",
        {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": WINDOW,
        },
        "short convolutions, full and sliding layers, output gate, norms before and after",
    ),
    "falcon_h1": Architecture(
        "FalconH1",
        {
            "mamba_d_ssm": 64,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.8,
            "ssm_out_multiplier": 0.9,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.0],
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            **_MAMBA,
        },
        "Mamba-2 beside attention in every layer, multipliers",
    ),
    "nemotron_h": Architecture(
        "NemotronH",
        {
            "layers_block_type": [
                "linear_attention",
                "full_attention",
                "moe",
                "linear_attention",
                "full_attention",
                "mlp",
            ],
            "num_hidden_layers": 6,
            "head_dim": 32,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
        "one mixer per layer (Mamba-2, attention, MLP or experts), no positions",
    ),
    "olmo_hybrid": Architecture("OlmoHybrid", _DELTA, "gated delta rule; as OLMo 2"),
    "bamba": Architecture(
        "Bamba", {"attn_layer_indices": [1], "num_hidden_layers": 3, **_MAMBA}, "Mamba-2, partial RoPE"
    ),
    "deepseek_v2": Architecture(
        "DeepseekV2",
        _LATENT_EXPERTS
        | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "rope_parameters": _YARN | _MSCALE},
        "latent attention, interleaved RoPE, YaRN, mixture of experts in groups with shared experts",
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3",
        _LATENT_EXPERTS | {"kv_lora_rank": 16, "rope_parameters": _YARN | _MSCALE},
        "as DeepSeek V2; low-rank queries",
    ),
    "glm4_moe_lite": Architecture(
        "Glm4MoeLite", {k: v for k, v in _LATENT_EXPERTS.items() if k != "first_k_dense_replace"}, "as DeepSeek V3"
    ),
    "mistral4": Architecture(
        "Mistral3",
        _multimodal(
            _LATENT_EXPERTS
            | {
                "model_type": "mistral4",
                "rope_parameters": _YARN
                | _MSCALE
                | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3},
            },
            {"model_type": "pixtral", **_VISION, **_IMAGE},
            **_IMAGE_TOKEN,
        ),
        "language model: Mistral 4's, as DeepSeek V3; attention temperature scaling",
    ),
    "minicpm3": Architecture(
        "MiniCPM3",
        _LATENT | {"scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 16},
        "latent attention, multipliers of embedding, residual and logits",
    ),
    "youtu": Architecture("Youtu", _LATENT, "latent attention, interleaved RoPE"),
    "kimi_linear": Architecture(
        "KimiLinear",
        {k: v for k, v in _LATENT_EXPERTS.items() if k not in ("n_routed_experts", "first_k_dense_replace")}
        | {
            "q_lora_rank": None,
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
        "Kimi Delta Attention; latent attention without positions, mixture of experts",
    ),
    "opt": Architecture("OPT", _OPT, "learned positions"),
    "gpt2": Architecture("GPT2", {"n_inner": 48}, "learned positions, fused q, k, v"),
}
"""Supported architectures by short name."""

RECURRENT = (
    "qwen3_next", "qwen3_5", "qwen3_5_multimodal", "qwen3_5_moe", "qwen3_5_moe_multimodal", "granite_hybrid", "lfm2",
    "lfm2_moe", "lfm3", "falcon_h1", "nemotron_h", "olmo_hybrid", "bamba", "kimi_linear",
)  # fmt: skip
"""Hybrid models in `RUNS`."""

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "minicpm3", "youtu", "kimi_linear")
"""Models with multi-head latent attention in `RUNS`."""

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 512,
}

REFUSED: dict[str, tuple[Architecture, str, str]] = {
    "bloom": (Architecture("Bloom"), "alibi", "ALiBi: positions are a bias on attention scores"),
    "falcon_rw": (Architecture("Falcon", {"alibi": True}), "alibi", "ALiBi, if `alibi` is set"),
    "phi3_long": (
        Architecture("Phi3", {"rope_parameters": LONGROPE}),
        "rope_length",
        "a loaded model with RoPE `longrope` or `dynamic`: pass the folder or hub id instead",
    ),
    "gemma3_bidirectional": (
        Architecture("Gemma3Text", {"head_dim": 8, "use_bidirectional_attention": True}),
        "bidirectional",
        "attends to later tokens",
    ),
    "minimax": (Architecture("MiniMax", {"head_dim": 8}), "layer_type", "layers of linear attention"),
    "mamba": (Architecture("Mamba"), "modules", "no attention"),
    "jamba": (
        Architecture("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}),
        "recurrent",
        "Mamba-1: transformers cannot continue its state by several tokens at once",
    ),
}
"""Unsupported architectures by short name: the model, its `ModelError.reason`, and the explanation."""


def architecture(name: str, *, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Return the random model `name` of `RUNS` in eval mode."""
    kind = RUNS[name]
    return build(kind.config, dtype, **(kind.options | overrides))


def default_skeleton(name: str, **options: Any) -> PreTrainedModel:
    """Return a model with the class of `name` and transformers' default configuration, without memory for weights."""
    kind = RUNS[name]
    config = getattr(transformers, f"{kind.config}Config")(**options)
    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = _auto_class(kind.options).from_config(config, dtype=torch.bfloat16)
    return model


def _auto_class(options: dict[str, Any]) -> Any:
    # transformers also builds a text model from Qwen 3.5's multimodal configuration.
    return AutoModelForImageTextToText if "text_config" in options else AutoModelForCausalLM


def build(config_name: str, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    common = {} if "text_config" in options else _COMMON
    config = getattr(transformers, f"{config_name}Config")(**(common | options))
    with torch.random.fork_rng(devices=[]), no_init_weights():
        model: PreTrainedModel = _auto_class(options).from_config(config, dtype=dtype, attn_implementation="eager")
    model.tie_weights()
    fill(model, 0)
    return model.requires_grad_(False).eval()
