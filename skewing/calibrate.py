"""Calibration: compute a skew artifact with one forward pass over a fixed text (InfiniGen §4.3, "the sample input").

Calibration never uses the user's prompt, because the output of a run must not depend on earlier runs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ..config import SkewMethod, Source
from ..core import KVPart
from ..errors import ArtifactError, InputError, ModelError
from ..models.adapter import ModelAdapter
from ..models.full_attention import keys_and_values, residual_after_attention, slices_of
from ..models.loading import LoadedModel
from ..utils.native_code import cache_folder
from .artifact import VERSION, SkewArtifact
from .prediction import SOURCES, Correction, CorrectionSums, predicted_input
from .prediction_quality import PredictionQuality
from .rotation import BASES, Moments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT: Final = "black_arrow.txt"
"""Calibration text in `offload_rt/data`: R. L. Stevenson, The Black Arrow (1888), public domain."""

TOKENS = 2048
"""Default number of tokens of the calibration text."""

SLICE: Final = 512
"""Number of tokens whose queries, attention and MLP are computed together."""

Progress = Callable[[int, int], None]
"""Callback that gets the number of finished layers and the total number of layers.

Each segment of the text counts all layers again.
"""

Predictions = Callable[[int, Mapping[Source | int, torch.Tensor], torch.Tensor], None]
"""Callback that gets a layer, its predicted attention inputs `[m, D]` by source, and its true inputs `[m, D]`."""

_log = logging.getLogger(__name__)


def calibrate(
    adapter: ModelAdapter,
    token_ids: Sequence[int],
    *,
    method: SkewMethod,
    fingerprint: str,
    calibration: str,
    progress: Progress | None = None,
) -> SkewArtifact:
    """Calibrate the model of `adapter` on the text `token_ids`.

    Args:
        method: Method that computes the bases (`SkewArtifact.method`).
        fingerprint: Fingerprint of the model.
        calibration: Description of the text, for the artifact.

    Raises:
        InputError: The text is empty, or a token is outside the vocabulary.
        ModelError: The queries or keys of the model are not finite.
    """
    moments, correction = measure(adapter, token_ids, progress=progress)
    calibration = description(adapter, token_ids, calibration)
    return fit(moments, correction, method=method, fingerprint=fingerprint, calibration=calibration)


def description(adapter: ModelAdapter, token_ids: Sequence[int], text: str) -> str:
    """Return the value of `SkewArtifact.calibration`, which contains a digest of the tokens. `text` names the text."""
    tokens = hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]
    return f"{text} at positions below {adapter.geometry.max_positions}, tokens {tokens}"


def fit(
    moments: Moments, correction: Correction, *, method: SkewMethod, fingerprint: str, calibration: str
) -> SkewArtifact:
    """Compute the skew artifact from `moments` `[L, Hkv, ...]` and `correction`. See `calibrate`."""
    basis = BASES[method](moments)
    skewed = moments.skewed(basis)
    deviation = skewed.key_covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    return SkewArtifact(
        method=method,
        query=basis.query.float().contiguous(),
        key=basis.key.float().contiguous(),
        key_mean=skewed.key_mean.float(),
        key_std=deviation.float(),
        slope=correction.slope,
        offset=correction.offset,
        fingerprint=fingerprint,
        calibration=calibration,
    )


@torch.no_grad()
def measure(
    adapter: ModelAdapter, token_ids: Sequence[int], *, progress: Progress | None = None
) -> tuple[Moments, Correction]:
    """Return the moments of queries and keys `[L, Hkv, ...]` and the correction of predicted attention inputs.

    Queries and keys are taken after RoPE, without the attention scale. With RoPE, a basis fits only the positions for
    which it was computed. Queries and keys are therefore rotated to positions that are spread over the whole context
    length. The attention of the forward pass uses the real positions. The text is split into segments of at most
    `max_positions` tokens, which all begin at position 0. For errors, see `calibrate`.

    The moments of a KV head include the queries of all layers that use its keys. Moments are 0 for layers that use the
    keys of an earlier layer, and for layers whose head dimension differs from that of full-attention layers. All
    results are on the CPU.
    """
    geometry, limit = adapter.geometry, adapter.geometry.max_positions
    if not token_ids:
        raise InputError("the calibration text is empty; give one of at least a few hundred tokens")
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=adapter.device)
    if int(tokens.min()) < 0 or int(tokens.max()) >= geometry.vocab:
        raise InputError(f"a calibration token is outside the model's vocabulary of {geometry.vocab}")
    segments = torch.split(tokens, limit)
    square = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    query, key = torch.zeros(square, dtype=torch.float64), torch.zeros(square, dtype=torch.float64)
    key_sum = torch.zeros(square[:-1], dtype=torch.float64)
    correction_sums = CorrectionSums(geometry.layers, geometry.hidden, geometry.most_between)
    for number, segment in enumerate(segments):
        for layer, sums in enumerate(_segment_sums(adapter, segment, limit, correction_sums.add)):
            # Keys are scored with the queries of all layers that use them.
            for total, part in zip((query, key, key_sum), sums, strict=True):
                total[geometry.kv_layer(layer)] += part.cpu()
            if progress is not None:
                progress(number * geometry.layers + layer + 1, len(segments) * geometry.layers)
    if not bool(torch.isfinite(query).all() and torch.isfinite(key).all()):
        raise ModelError(f"the model's queries or keys are not finite in {adapter.dtype}; load it with dtype='float32'")
    count, users = len(tokens), torch.ones(geometry.layers, 1, 1, 1, dtype=torch.float64)
    for layer in set(range(geometry.layers)) - set(geometry.kv_layers):
        users[geometry.kv_layer(layer)] += 1
    return Moments(query / (count * geometry.group * users), key / count, key_sum / count), correction_sums.fit()


@torch.no_grad()
def prediction_quality(
    adapter: ModelAdapter, token_ids: Sequence[int], correction: Correction
) -> dict[Source | int, float]:
    """Return the quality of predicted queries for each source of predictions (`PredictionQuality`).

    `token_ids` is a single text that must fit in the model's context length.
    """
    quality = PredictionQuality(adapter, correction)
    tokens = torch.tensor(token_ids, dtype=torch.int64, device=adapter.device)
    for _ in _segment_sums(adapter, tokens, len(token_ids), quality.add):
        pass
    return quality.relative_mass()


def _segment_sums(
    adapter: ModelAdapter, tokens: torch.Tensor, limit: int, predictions: Predictions
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each layer, yield `_sum_moments` over `tokens` `[T]`, at positions that are spread over [0, `limit`).

    `predictions` is called for all layers except the first.
    """
    geometry = adapter.geometry
    slices = slices_of(len(tokens), SLICE)
    positions = torch.arange(len(tokens), device=tokens.device)
    real, spread = ([p[s] for s in slices] for p in (positions, _spread(len(tokens), limit).to(tokens.device)))
    adapter = adapter.for_new_sequence()
    hidden = adapter.embed(tokens, positions)
    adapter.run_stages(-1, hidden, slices)
    kept: dict[int, KVPart] = {}  # KV by layer, for the latest layer and for layers whose KV later layers use
    for layer in range(geometry.layers):
        yield _sum_moments(adapter, layer, (adapter.attention_input(layer, hidden[s]) for s in slices), spread)
        if layer + 1 == geometry.layers:
            return
        next_layer, kv_layer = layer + 1, geometry.kv_layer(layer)
        if kv_layer == layer:
            inputs = (adapter.attention_input(layer, hidden[s]) for s in slices)
            kept = {source: kv for source, kv in kept.items() if source in geometry.shared_kv}
            kept[layer] = _all_rows(keys_and_values(adapter, layer, inputs, real))
        project = adapter.query if kv_layer == layer else adapter.lone_query
        for s, slice_positions in zip(slices, real, strict=True):
            x = adapter.attention_input(layer, hidden[s])
            # Do not bind the queries to a name, so that their memory is freed before the MLP.
            residual = residual_after_attention(
                adapter, layer, hidden[s], project(layer, x, slice_positions), kept[kv_layer], s.stop
            )
            predicted: dict[Source | int, torch.Tensor] = {
                source: predicted_input(adapter, next_layer, source, hidden[s], x, residual) for source in SOURCES
            }
            output = adapter.mlp(layer, residual, tokens[s])
            for stage in adapter.stages(layer):
                ahead = geometry.decoder_layer(next_layer) - stage.layer
                predicted[ahead] = adapter.attention_input(next_layer, output)
                output = stage.run(output)
            predictions(next_layer, predicted, adapter.attention_input(next_layer, output))
            hidden[s] = output  # assigned last, because a predicted attention input may be a view of `hidden`


def _all_rows(slices: Iterable[KVPart]) -> KVPart:
    parts = list(slices)
    return KVPart(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))


def _sum_moments(
    adapter: ModelAdapter, layer: int, inputs: Iterable[torch.Tensor], positions: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the float64 sums of q q^T `[Hkv, d, d]`, k k^T `[Hkv, d, d]` and k `[Hkv, d]` over tokens of one layer.

    `inputs` yields the layer's attention inputs `[m, D]` slice by slice.
    """
    geometry = adapter.geometry
    key_sum = torch.zeros(geometry.kv_heads, geometry.head_dim, dtype=torch.float64, device=adapter.device)
    query, key = (key_sum.new_zeros(geometry.kv_heads, geometry.head_dim, geometry.head_dim) for _ in range(2))
    if geometry.rows(layer) != geometry.full_rows:
        return query, key, key_sum
    for x, slice_positions in zip(inputs, positions, strict=True):
        q = adapter.query(layer, x, slice_positions).reshape(geometry.kv_heads, -1, geometry.head_dim).double()
        query += q.mT @ q
        if geometry.kv_layer(layer) != layer:
            continue
        k = adapter.key_value(layer, x, slice_positions)[0].double()
        key += k.mT @ k
        key_sum += k.sum(1)
    return query, key, key_sum


def _spread(count: int, limit: int) -> torch.Tensor:
    """Return one position from each of `count` equal sections of [0, limit), ascending int64 `[count]`."""
    # Positions are random, because a regular step could coincide with the period of a rotary plane.
    draw = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ((torch.arange(count) + draw) * limit / count).long().clamp_max(limit - 1)


def default_tokens(tokenizer: PreTrainedTokenizerBase | None, vocab: int, count: int) -> tuple[list[int], str]:
    """Return up to `count` token ids of the calibration text in the package, and a description of them.

    Without a tokenizer, the ids are fixed pseudo-random numbers. Calibration is then less accurate.
    """
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        ids: list[int] = torch.randint(vocab, (count,), generator=generator).tolist()
        return ids, f"{count} pseudo-random tokens (the model has no tokenizer)"
    text = files("offload_rt").joinpath("data", TEXT).read_text(encoding="utf-8")
    return text_tokens(tokenizer, text, count, TEXT)


def text_tokens(tokenizer: PreTrainedTokenizerBase, text: str, count: int, name: str) -> tuple[list[int], str]:
    """Return the first `count` tokens of `text`, including special tokens, and a description that contains `name`."""
    # Tokenize only the beginning of a long text. 64 additional tokens are needed, because the cut changes the tokens
    # before it.
    characters, margin = 8 * count, 64
    ids: list[int] = list(tokenizer(text[:characters], verbose=False)["input_ids"])
    while len(ids) < count + margin and characters < len(text):
        characters *= 2
        ids = list(tokenizer(text[:characters], verbose=False)["input_ids"])
    ids = ids[:count]
    return ids, f"first {len(ids)} tokens of {name}"


def cached_artifact(loaded: LoadedModel, method: SkewMethod, progress: Progress | None = None) -> SkewArtifact:
    """Return the model's artifact for the calibration text in the package, from the user's cache folder.

    If it is missing or damaged, the model is calibrated and the artifact is stored.
    """
    path = cache_path(loaded, method)
    if path.exists():
        try:
            return SkewArtifact.load(path, loaded.fingerprint)
        except ArtifactError as error:
            _log.warning("calibrating again: %s", error)
    ids, name = default_tokens(loaded.tokenizer, loaded.adapter.geometry.vocab, TOKENS)
    artifact = calibrate(
        loaded.adapter,
        ids,
        method=method,
        fingerprint=loaded.fingerprint,
        calibration=name,
        progress=progress,
    )
    try:
        artifact.save(path)
    except OSError as error:
        _log.warning("the skew artifact is not cached, the next start calibrates again: %s", error)
    return artifact


def cache_path(loaded: LoadedModel, method: SkewMethod) -> Path:
    text = "text" if loaded.tokenizer is not None else "random"
    geometry = loaded.adapter.geometry
    between = f"-{geometry.most_between}" if geometry.most_between else ""  # number of additional corrections
    name = f"{loaded.fingerprint}-{method}-{text}{TOKENS}-{geometry.max_positions}{between}-v{VERSION}.safetensors"
    return cache_folder() / "skew" / name
