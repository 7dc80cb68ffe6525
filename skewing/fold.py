"""Skewing inside the weights (paper §4.2, equation 2) for models with absolute positions, and the `skew` command.

With q = x W_q + b_q, the skewed query q B_q is x (W_q B_q) + b_q B_q: the basis disappears into weight and bias, and so
does B_k on the key's side. What comes out is an ordinary checkpoint whose attention scores, hence logits, are those of
the original. Products are taken in float64 and rounded once to the model's dtype. In float32 that rounding shows at
about 1e-5 of the largest logit. In bfloat16 or float16 it is as large as the rounding of the original weights, but
another one: 1-3 % of greedy tokens change. The runtime itself therefore keeps side matrices (`SkewArtifact`).

With RoPE nothing can be folded: the rotation by the position stands between the projection and the score, and a basis
that mixes rotary planes does not commute with it.
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

from ..config import DType, SkewMethod
from ..errors import ArtifactError, ConfigError, InputError, ModelError
from ..models.checkpoint import read_config, read_tokenizer, read_weights, resolve_device, resolve_dtype
from ..models.loading import LoadedModel, load_model
from ..models.location import locate
from ..models.packed import refuse_packed
from ..models.registry import architectures
from .artifact import SkewArtifact
from .calibrate import TOKENS, Progress, default_tokens, fit, measure, reach, text_tokens
from .rotation import Moments, SkewBasis, kept_energy, plain_basis

PARTIAL_RATIO: Final = 0.3
"""Share of the columns whose energy the report states (paper §4.3)."""

_PROBE: Final = 256
"""Tokens of the text that the report's numbers are measured on."""

Projection = tuple[torch.Tensor, torch.Tensor | None]
"""weight `[H * d, D]` (output first) and bias `[H * d]`, views of the parameters."""


@dataclass(frozen=True)
class _Family:
    """Where a family keeps its query and key projections."""

    layers: Callable[[Any], Any]
    """Model -> its attention modules."""
    modules: tuple[str, ...]
    """Names, in an attention module, of the modules that hold them."""
    projections: Callable[[Any], tuple[Projection, Projection]]
    """Attention module -> projection of the query, of the key."""


def _opt_projections(attention: Any) -> tuple[Projection, Projection]:
    q, k = attention.q_proj, attention.k_proj
    return (q.weight, q.bias), (k.weight, k.bias)


def _gpt2_projections(attention: Any) -> tuple[Projection, Projection]:
    # Conv1D: q, k, v fused in one weight [D, 3 D] that is transposed against Linear's
    weight, bias = attention.c_attn.weight.T, attention.c_attn.bias
    first, second = slice(0, attention.embed_dim), slice(attention.embed_dim, 2 * attention.embed_dim)
    return (weight[first], bias[first]), (weight[second], bias[second])


_FAMILIES: Final[Mapping[str, _Family]] = {
    "opt": _Family(
        lambda model: [layer.self_attn for layer in model.model.decoder.layers], ("q_proj", "k_proj"), _opt_projections
    ),
    "gpt2": _Family(lambda model: [block.attn for block in model.transformer.h], ("c_attn",), _gpt2_projections),
}


@torch.no_grad()
def fold(model: PreTrainedModel, artifact: SkewArtifact) -> PreTrainedModel:
    """A model of the same class and dtype whose queries and keys come out skewed and whose logits equal the original's
    (module docstring: up to rounding). `model` is left alone; parameters other than the query and key projections are
    shared with it, so the copy costs only those.

    Raises ModelError for a model without absolute positions, with packed weights or with its weights elsewhere,
    ArtifactError where the
    artifact's shapes are another model's.
    """
    family = _FAMILIES.get(model.config.model_type)
    if family is None:
        raise ModelError(
            f"{type(model).__name__} ({model.config.model_type}) cannot be folded: its queries and keys are rotated by "
            "their positions (RoPE) after the projection, and the skewing basis does not commute with that rotation; "
            f"use the side matrices in skew.safetensors instead (foldable: {', '.join(sorted(_FAMILIES))})"
        )
    refuse_packed(model, "folding writes new numbers into them")
    own = {
        id(parameter)
        for attention in family.layers(model)
        for name in family.modules
        for parameter in getattr(attention, name).parameters()
    }
    shared: dict[int, Any] = {id(p): p for p in model.parameters() if id(p) not in own}
    folded = copy.deepcopy(model, shared)
    attentions = family.layers(folded)
    _check_shapes(artifact, attentions, model)
    # The stored float32 bases are inverse to each other only up to rounding; the inverse in float64 is exact.
    query = artifact.query.cpu().double()
    key = torch.linalg.inv(query).mT
    for layer, attention in enumerate(attentions):
        for projection, basis in zip(family.projections(attention), (query[layer], key[layer]), strict=True):
            _fold_projection(projection, basis)
    return folded


def _fold_projection(projection: Projection, basis: torch.Tensor) -> None:
    """Multiplies the outputs of each head by its basis `[H, d, d]`, in place."""
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
    """What `skew_model` made and how good it is.

    artifact: the file with the side matrices; folded: the folded checkpoint, None under RoPE.
    energy_kept_plain, energy_kept_skewed: share of the scores' mean square that 30 % of the columns keep without and
        with skewing, mean over layers and KV heads, on a text that was not calibrated on.
    logit_difference: largest difference of the folded model's logits over the largest logit, on that text.
    """

    artifact: Path
    folded: Path | None
    method: SkewMethod
    calibration: str
    fingerprint: str
    energy_kept_plain: float
    energy_kept_skewed: float
    logit_difference: float | None


def skew_model(
    model: str,
    out: Path | str,
    *,
    method: SkewMethod = "svd",
    calibration: str | None = None,
    calibration_tokens: int = TOKENS,
    positions: int | None = None,
    dtype: DType = "auto",
    progress: Progress | None = None,
) -> SkewReport:
    """Calibrates `model` (a shipped name, folder or hub id, loaded in `dtype`) and writes `out/skew.safetensors`; for a
    model with absolute positions also `out/folded/`, an ordinary checkpoint with its tokenizer.

    calibration: the text to calibrate on; None takes the one that ships with the package. `positions`: context length
    to calibrate for (`calibrate`). Raises ModelError, ConfigError, MemoryLimitError as `load_model` does, ConfigError
    for a token count below 1, InputError for a text that cannot be tokenised or a folder that cannot be written.
    """
    if calibration_tokens < 1:
        raise ConfigError(f"calibration_tokens={calibration_tokens} must be at least 1")
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {str(out)!r}: {error.strerror}") from error
    network, loaded = _load(model, dtype)
    ids, name = _calibration_tokens(loaded, calibration, calibration_tokens)
    moments, correction = measure(loaded.adapter, ids, positions=positions, progress=progress)
    name = f"{name} at positions below {reach(loaded.adapter, positions)}"
    artifact = fit(moments, correction, method=method, fingerprint=loaded.fingerprint, calibration=name)
    artifact.save(out / "skew.safetensors")
    probe = _probe_tokens(loaded, calibration_tokens)
    on_probe, _ = measure(loaded.adapter, probe, positions=positions)
    plain = _energy(on_probe, plain_basis(moments))
    skewed = _energy(on_probe, SkewBasis(artifact.query.double(), artifact.key.double()))
    folded, difference = None, None
    if loaded.adapter.geometry.absolute_positions:
        folded = out / "folded"
        difference = _write_folded(network, artifact, loaded, probe, folded)
    return SkewReport(
        artifact=out / "skew.safetensors",
        folded=folded,
        method=method,
        calibration=artifact.calibration,
        fingerprint=loaded.fingerprint,
        energy_kept_plain=plain,
        energy_kept_skewed=skewed,
        logit_difference=difference,
    )


def _load(model: str, dtype: DType) -> tuple[PreTrainedModel, LoadedModel]:
    """The transformers model, which folding changes, and the same as the runtime sees it."""
    location = locate(model)
    config, device = read_config(location, architectures()), resolve_device("auto")
    network = read_weights(location, config, device, resolve_dtype(dtype, location, config, device))
    return network, load_model(network, tokenizer=read_tokenizer(location))


def _calibration_tokens(loaded: LoadedModel, text: str | None, count: int) -> tuple[list[int], str]:
    if text is None:
        return default_tokens(loaded.tokenizer, loaded.adapter.geometry.vocab, count)
    if loaded.tokenizer is None:
        raise InputError(f"{loaded.name} has no tokenizer, so it cannot be calibrated on a text; leave the text out")
    return text_tokens(loaded.tokenizer, text, count, "a given text")


def _probe_tokens(loaded: LoadedModel, calibrated: int) -> list[int]:
    """Tokens after those that `default_tokens` calibrates on; the last of the text where it has no more."""
    count = min(_PROBE, loaded.adapter.geometry.max_positions)
    ids, _ = default_tokens(loaded.tokenizer, loaded.adapter.geometry.vocab, calibrated + count)
    return ids[-count:]


def _energy(moments: Moments, basis: SkewBasis) -> float:
    """Energy that 30 % of the columns keep, mean over layers and KV heads, for people."""
    columns = max(1, round(PARTIAL_RATIO * moments.query.shape[-1]))
    return round(float(kept_energy(moments, basis, columns).mean()), 4)


@torch.no_grad()
def _write_folded(
    network: PreTrainedModel, artifact: SkewArtifact, loaded: LoadedModel, probe: list[int], folder: Path
) -> float:
    """Folds, saves with the tokenizer, and returns the largest logit difference over the largest logit."""
    folded = fold(network, artifact)
    ids = torch.tensor([probe], device=network.device)
    expected, found = (m(ids, use_cache=False).logits.float() for m in (network, folded))
    folded.save_pretrained(folder)
    if loaded.tokenizer is not None:
        loaded.tokenizer.save_pretrained(folder)
    return float(f"{(found - expected).abs().max() / expected.abs().max():.2g}")
