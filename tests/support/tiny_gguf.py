"""Write a tiny GGUF file with a random model and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel

from .tiny_models import tiny_model

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
END = "<|endoftext|>"
PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_tiny_gguf(
    path: Path, kind: str = "F32", *, architecture: str = "qwen2", output: bool = False, **config: Any
) -> PreTrainedModel:
    """Write the file and return the model in float32, as it was before quantisation.

    Args:
        kind: GGUF type of the matrices, such as "Q4_1".
        architecture: "qwen2" or "llama". Loaders reorder the rows of "llama" files.
        output: Whether the head has its own weights instead of being tied to the embedding.
        config: Changes to the configuration.
    """
    tokens = [*sorted(ByteLevel.alphabet()), "he", "Ġt", END]
    model = tiny_model(
        architecture, vocab_size=len(tokens), eos_token_id=len(tokens) - 1, bos_token_id=None, rms_norm_eps=2.0**-20,
        tie_word_embeddings=not output, **config,
    )  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    _write_shape(writer, model)
    _write_tokenizer(writer, tokens)
    weights = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if output:
        weights["output.weight"] = "lm_head.weight"
    for layer in range(model.config.num_hidden_layers):
        for name, part in PARTS.items():
            for what in ("weight", "bias"):
                weights[f"blk.{layer}.{name}.{what}"] = f"model.layers.{layer}.{part}.{what}"
    state = model.state_dict()
    for name, own in weights.items():
        if own in state:
            numbers, own_kind = state[own].to(torch.float32).numpy(), gguf.GGMLQuantizationType[kind]
            if kind == "F32" or numbers.ndim == 1:
                writer.add_tensor(name, numbers)
            else:
                writer.add_tensor(name, gguf.quantize(numbers, own_kind), raw_dtype=own_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_tiny_gpt2_gguf(path: Path) -> PreTrainedModel:
    """Write a GPT-2 file whose matrices have the type Q8_0, and return the model before quantisation."""
    tokens = [*sorted(ByteLevel.alphabet()), "he", "Ġt", END]
    model = tiny_model("gpt2", vocab_size=len(tokens), n_inner=None)
    config, writer = model.config, gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    _write_tokenizer(writer, tokens)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, weight in model.named_parameters():
        module, _, what = name.rpartition(".")
        # A Conv1D weight is `[in, out]`, but a matrix in the file is `[out, in]`.
        numbers = (weight.T if module.rpartition(".")[2].startswith("c_") and what == "weight" else weight).float()
        own, kind = f"{names.get_name(module)}.{what}", gguf.GGMLQuantizationType.Q8_0
        if numbers.ndim == 1:
            writer.add_tensor(own, numbers.numpy())
        else:
            writer.add_tensor(own, gguf.quantize(numbers.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_shape(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_name("tiny")
    writer.add_file_type(0)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _write_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(CHAT_TEMPLATE)
