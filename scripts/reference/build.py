"""Model, optimizer and loss of the reference training, with a CPU-optimized attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from config import ReferenceShape, TrainConfig
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

_auto: Any = AutoModelForCausalLM  # untyped in transformers


def blocked_causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention in blocks of queries. The result equals full causal attention up to rounding.

    `query` is `[B, H, N, d]`, `key` and `value` are `[B, Hkv, N, d]`, and the result is `[B, N, H, d]`.
    """
    # On a CPU, torch's fused kernel is slower, especially in the backward pass. A plain product would also compute the
    # masked half above the diagonal.
    batch, heads, n, d = query.shape
    groups = heads // key.shape[1]
    query = query * (d**-0.5 if scaling is None else scaling)
    block = max(64, n // 8)
    flat_k, flat_v = key.flatten(0, 1), value.flatten(0, 1)
    outputs = []
    for begin in range(0, n, block):
        end = min(begin + block, n)
        q = query[:, :, begin:end].reshape(len(flat_k), groups * (end - begin), d)
        scores = torch.bmm(q, flat_k[:, :end].transpose(1, 2)).view(-1, groups, end - begin, end)
        above = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).triu(begin + 1)
        weights = torch.softmax(scores.masked_fill_(above, -torch.inf), -1)
        out = torch.bmm(weights.view(len(flat_k), -1, end), flat_v[:, :end])
        outputs.append(out.view(batch, heads, end - begin, d))
    return torch.cat(outputs, 2).transpose(1, 2), None


def grow(model: PreTrainedModel, shape: ReferenceShape) -> PreTrainedModel:
    """Increase the number of layers without changing any logit (similar to stacking, Gong et al. 2019).

    The new layers are evenly spaced copies of existing layers whose output projections are set to zero. Raises
    ValueError if the shapes differ in more than the number of layers, or if the model is an OPT model.
    """
    config, body = shape.config(), cast(Any, model).model
    same = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "ffn_dim",
        "num_attention_heads",
        "num_key_value_heads",
    )
    different = [name for name in same if getattr(model.config, name, None) != getattr(config, name, None)]
    old = model.config.num_hidden_layers
    if not different and old == shape.layers:
        return model
    if config.model_type != "llama" or different or shape.layers < old:
        raise ValueError(
            f"--init-from needs a checkpoint of the preset's shape, with {shape.layers} layers (Llama: or fewer); "
            f"this one has {old} layers and differs in {different or 'nothing else'}"
        )
    grown: PreTrainedModel = _auto.from_config(config)
    new_at = {(i + 1) * shape.layers // (shape.layers - old + 1) for i in range(shape.layers - old)}
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("model.layers.")}
    source = -1
    for i in range(shape.layers):
        source = max(source, 0) if i in new_at else source + 1
        for name, value in body.layers[source].state_dict().items():
            zero = i in new_at and name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            weights[f"model.layers.{i}.{name}"] = torch.zeros_like(value) if zero else value.clone()
    grown.load_state_dict(weights)
    return grown


def build_model(config: TrainConfig, init_from: Path | None) -> PreTrainedModel:
    """Create a float32 model initialised from the seed, or load `init_from` and grow it to the configured shape."""
    torch.manual_seed(config.seed)
    if init_from is None:
        fresh: PreTrainedModel = _auto.from_config(config.shape.config(), dtype=torch.float32)
        return fresh
    model: PreTrainedModel = _auto.from_pretrained(init_from, dtype=torch.float32, use_safetensors=True)
    return grow(model, config.shape)


def build_optimizer(model: PreTrainedModel, config: TrainConfig) -> torch.optim.AdamW:
    """Create an AdamW optimizer (Loshchilov and Hutter 2019) that does not apply weight decay to vectors and
    embeddings.
    """
    inside = [p for name, p in model.named_parameters() if p.ndim >= 2 and "embed" not in name]
    outside = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    groups = [{"params": inside, "weight_decay": config.weight_decay}, {"params": outside, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, fused=True)


def weighted_loss(
    model: PreTrainedModel, ids: torch.Tensor, weights: torch.Tensor, first_position: int = 0
) -> torch.Tensor:
    """Return the mean next-token cross-entropy for `ids` `[B, N]`.

    The loss of each token is scaled by `weights` `[B, N]`.
    """
    positions = torch.arange(first_position, first_position + ids.shape[1], device=ids.device)[None]
    hidden = model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    logits = cast(Any, model).lm_head(hidden[:, :-1]).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (losses * weights[:, 1:].flatten()).mean()
