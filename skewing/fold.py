"""Fold skewing bases into the weights (paper §4.2, equation 2), and produce the output of the command `skew`.

With q = x W_q + b_q, the skewed query q B_q is x (W_q B_q) + b_q B_q, so weight and bias are multiplied by B_q. Keys
are folded in the same way. The result is an ordinary checkpoint.

Because of rounding, its logits differ from those of the original model. In float32, the difference is about 1e-5 of the
largest logit. In bfloat16 and float16, it is as large as the rounding of the original weights, and changes 1-3 % of the
greedy tokens. The engine therefore uses separate matrices (`SkewArtifact`).

Models with RoPE cannot be folded, because the rotation follows the projection and does not commute with a basis that
mixes rotary planes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import DType, SkewMethod, Source
from ..errors import ArtifactError, ConfigError, InputError, ModelError
from ..models.checkpoint import declared_dtype, read_config, read_tokenizer, read_weights, resolve_device, resolve_dtype
from ..models.linear import packing, refuse_packed
from ..models.loading import LoadedModel, load_model
from ..models.source import find_source
from .artifact import SkewArtifact
from .calibrate import TOKENS, Progress, default_tokens, description, fit, measure, prediction_quality, text_tokens
from .rotation import Moments, SkewBasis, kept_energy, plain_basis

PARTIAL_RATIO: Final = 0.3
"""Fraction of the columns for `SkewReport.energy_kept_plain` and `energy_kept_skewed` (paper §4.3)."""

_ATTENTIONS: Final[Mapping[str, Callable[[Any], list[Any]]]] = {
    "gpt2": lambda model: [block.attn for block in model.transformer.h],
    "opt": lambda model: [layer.self_attn for layer in model.model.decoder.layers],
}
"""For each model type that can be folded, a function that returns the attention modules."""

_PROBE: Final = 256
"""Number of tokens for comparing the logits of the model and its folded copy."""

_PREDICTION_PROBE: Final = 1024
"""Number of tokens for measuring predicted queries."""

Projection = tuple[torch.Tensor, torch.Tensor | None]
"""Weight `[H * d, D]` (outputs first) and bias `[H * d]` of a projection, as views of the parameters."""


def _attentions(model: Any) -> list[Any]:
    """Return the attention modules of a model that can be folded. Raises ModelError for other models."""
    if model.config.model_type in _ATTENTIONS:
        return _ATTENTIONS[model.config.model_type](model)
    raise ModelError(
        f"{type(model).__name__} ({model.config.model_type}) cannot be folded: its queries and keys are rotated by "
        "their positions (RoPE) after the projection, and the skewing basis does not commute with that rotation; "
        f"use the matrices in skew.safetensors instead (foldable: {', '.join(_ATTENTIONS)})"
    )


def _projections(attention: Any) -> tuple[Projection, Projection]:
    if not hasattr(attention, "c_attn"):
        q, k = attention.q_proj, attention.k_proj
        return (q.weight, q.bias), (k.weight, k.bias)
    # Conv1D computes q, k and v with one weight [D, 3 D], the transpose of a Linear weight.
    weight, bias = attention.c_attn.weight.T, attention.c_attn.bias
    first, second = slice(0, attention.embed_dim), slice(attention.embed_dim, 2 * attention.embed_dim)
    return (weight[first], bias[first]), (weight[second], bias[second])


@torch.no_grad()
def fold(model: PreTrainedModel, artifact: SkewArtifact) -> PreTrainedModel:
    """Return a copy of the model with skewed queries and keys. Except for rounding, its logits are unchanged.

    The copy has the same class and dtype, and shares all other parameters with `model`.

    Raises:
        ModelError: The model has no absolute positions, or its weights are packed or offloaded.
        ArtifactError: The shapes of the artifact do not fit the model.
    """
    folded_ids = {
        id(parameter)
        for attention in _attentions(model)
        for name in ("c_attn", "q_proj", "k_proj")
        if (module := getattr(attention, name, None)) is not None
        for parameter in module.parameters()
    }
    refuse_packed(model, "folding writes new numbers into them")
    shared: dict[int, Any] = {id(p): p for p in model.parameters() if id(p) not in folded_ids}
    folded = copy.deepcopy(model, shared)
    attentions = _attentions(folded)
    _check_shapes(artifact, attentions, model)
    # Invert in float64, because the stored float32 bases are inverse to each other only up to rounding.
    query = artifact.query.cpu().double()
    key = torch.linalg.inv(query).mT
    for layer, attention in enumerate(attentions):
        for projection, basis in zip(_projections(attention), (query[layer], key[layer]), strict=True):
            _fold_projection(projection, basis)
    return folded


def _fold_projection(projection: Projection, basis: torch.Tensor) -> None:
    """Multiply the outputs of each head in a projection by the head's basis `[H, d, d]`, in place."""
    weight, bias = projection
    heads, head_dim = basis.shape[:2]
    weight.copy_((basis.mT @ weight.detach().cpu().double().view(heads, head_dim, -1)).flatten(0, 1))
    if bias is not None:
        bias.copy_((bias.detach().cpu().double().view(heads, 1, head_dim) @ basis).flatten())


def _check_shapes(artifact: SkewArtifact, attentions: list[nn.Module], model: PreTrainedModel) -> None:
    heads, head_dim = cast("int", attentions[0].num_heads), cast("int", attentions[0].head_dim)
    expected = (len(attentions), heads, head_dim, head_dim)
    if artifact.query.shape != expected:
        raise ArtifactError(
            f"the artifact has matrices {tuple(artifact.query.shape)}, {type(model).__name__} needs {expected} "
            f"[layers, heads, d, d]; it is of another model (fingerprint {artifact.fingerprint})"
        )
    if any(parameter.is_meta for attention in attentions for parameter in attention.parameters()):
        raise ModelError("the model's weights are offloaded (meta tensors); load it whole on one device to fold it")


@dataclass(frozen=True)
class SkewReport:
    """Result of `skew_model`.

    Attributes:
        artifact: Path of the skew artifact.
        folded: Folder of the folded checkpoint, or None if none was written.
        method, calibration, fingerprint: See `SkewArtifact`.
        energy_kept_plain: Fraction of the scores' mean square that 30 % of the columns keep without skewing, averaged
            over layers and KV heads.
        energy_kept_skewed: The same fraction with skewing.
        logit_difference: Largest difference between the logits of the folded and the original model, divided by the
            largest logit. None if there is no folded model.
        predictions: Quality of predicted queries by source (`PredictionQuality`). For hybrid models, integer keys are
            values of the option `ahead` of the policy "infinigen".
    """

    artifact: Path
    folded: Path | None
    method: SkewMethod
    calibration: str
    fingerprint: str
    energy_kept_plain: float
    energy_kept_skewed: float
    logit_difference: float | None
    predictions: dict[Source | int, float]


def skew_model(
    model: str,
    out: Path | str,
    *,
    method: SkewMethod = "balanced",
    calibration: str | None = None,
    calibration_tokens: int = TOKENS,
    dtype: DType = "auto",
    progress: Progress | None = None,
) -> SkewReport:
    """Calibrate `model` and write `out/skew.safetensors`.

    For OPT and GPT-2, except for GGUF files and packed weights, also write `out/folded/`, an ordinary checkpoint with
    its tokenizer.

    Args:
        model: Name of a shipped model, folder or hub id.
        out: Output folder. It is created if missing.
        method: Method that computes the bases (`SkewArtifact.method`).
        calibration: Calibration text. None uses the text in the package.
        calibration_tokens: Number of tokens to calibrate on.
        dtype: See `EngineConfig`.
        progress: Called after every layer.

    Raises:
        ModelError, MemoryLimitError: The model cannot be loaded (`load_model`).
        ConfigError: The model cannot be loaded, or `calibration_tokens` is below 1.
        InputError: The text cannot be tokenized, or the folder cannot be written.
    """
    if calibration_tokens < 1:
        raise ConfigError(f"calibration_tokens={calibration_tokens} must be at least 1")
    out = _made_folder(out)
    network, loaded = _load(model, dtype)
    ids, name = _calibration_tokens(loaded, calibration, calibration_tokens)
    moments, correction = measure(loaded.adapter, ids, progress=progress)
    name = description(loaded.adapter, ids, name)
    artifact = fit(moments, correction, method=method, fingerprint=loaded.fingerprint, calibration=name)
    artifact.save(out / "skew.safetensors")
    probe = _probe_tokens(loaded, calibration_tokens, _PROBE)
    probe_moments, _ = measure(loaded.adapter, probe)
    plain = _energy(probe_moments, plain_basis(moments))
    skewed = _energy(probe_moments, SkewBasis(artifact.query.double(), artifact.key.double()))
    folded = None if network is None else out / "folded"
    prediction_probe = _probe_tokens(loaded, calibration_tokens, _PREDICTION_PROBE)
    return SkewReport(
        artifact=out / "skew.safetensors",
        folded=folded,
        method=method,
        calibration=artifact.calibration,
        fingerprint=loaded.fingerprint,
        energy_kept_plain=plain,
        energy_kept_skewed=skewed,
        logit_difference=None if network is None else _write_folded(network, artifact, loaded, probe, out / "folded"),
        predictions=prediction_quality(loaded.adapter, prediction_probe, correction),
    )


def _made_folder(out: Path | str) -> Path:
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {str(out)!r}: {error.strerror}") from error
    return Path(out)


def _load(model: str, dtype: DType) -> tuple[PreTrainedModel | None, LoadedModel]:
    """Load the model. Also return transformers' model if its weights can be folded."""
    source = find_source(model)
    config, device = read_config(source), resolve_device("auto")
    if config.model_type not in _ATTENTIONS or source.gguf is not None or packing(config) is not None:
        return None, load_model(model, dtype=dtype)
    network = read_weights(source, config, device, resolve_dtype(dtype, source, declared_dtype(source, config), device))
    return network, load_model(network, tokenizer=read_tokenizer(source))


def _calibration_tokens(loaded: LoadedModel, text: str | None, count: int) -> tuple[list[int], str]:
    if text is None:
        return default_tokens(loaded.tokenizer, loaded.adapter.geometry.vocab, count)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.name} has no tokenizer, so it cannot be calibrated on a text; leave the text out")
    return text_tokens(loaded.tokenizer, text, count, "a given text")


def _probe_tokens(loaded: LoadedModel, calibrated: int, count: int) -> list[int]:
    """Return the `count` tokens after the calibration tokens, or the last tokens of the text if it is too short."""
    count = min(count, loaded.adapter.geometry.max_positions)
    ids, _ = default_tokens(loaded.tokenizer, loaded.adapter.geometry.vocab, calibrated + count)
    return ids[-count:]


def _energy(moments: Moments, basis: SkewBasis) -> float:
    columns = max(1, round(PARTIAL_RATIO * moments.query.shape[-1]))
    return round(float(kept_energy(moments, basis, columns).mean()), 4)


@torch.no_grad()
def _write_folded(
    network: PreTrainedModel, artifact: SkewArtifact, loaded: LoadedModel, probe: list[int], folder: Path
) -> float:
    """Fold the model and save it with its tokenizer. Return `SkewReport.logit_difference`."""
    folded = fold(network, artifact)
    ids = torch.tensor([probe], device=network.device)
    expected, actual = (m(ids, use_cache=False).logits.float() for m in (network, folded))
    folded.save_pretrained(folder)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(folder)
    return float(f"{(actual - expected).abs().max() / expected.abs().max():.2g}")
