"""Policy "infinigen" (InfiniGen §4.3): fetch only the tokens that are important for the next layer's attention."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch

from ...core import ModelGeometry, Selection, VisibleTokens
from ...errors import ArtifactError
from ...kernels.h2d_copy import copy_into, to_device
from ...kernels.low_bit_sequence import LowBitQuery, NativeQuery
from ...kernels.pages import PAGE_TOKENS
from ...kernels.reference import capped
from ...kernels.selection import extend_selection, select_tokens, selection_limit
from ...skewing.artifact import SkewArtifact, artifact_bytes
from ...skewing.prediction import SOURCES, source_index
from ..base import KeyReader, Policy, PolicyState, QuerySource, source_between
from ..demand import MemoryDemand
from ..options import InfiniGenOptions
from ..registry import PolicyContext
from ..rule import ANY_SCORE, CandidateSpans, Rule, dense_layers
from .approximate_kv import ApproximateBasis, ApproximateKV, approximate_layout, basis_bytes, token_bytes
from .bases import Basis, CalibratedColumns, PromptColumns, stored_columns
from .key_lists import KeyLists
from .scoring import BITS, PartialKeys, QuantisedKeys, Quantiser, key_bytes
from .scoring_keys import ScoringKeys


class InfiniGenState(PolicyState):
    def __init__(self, policy: InfiniGen, keys: ScoringKeys) -> None:
        self._policy, self._keys = policy, keys
        self._approximate = keys if isinstance(keys, ApproximateKV) else None
        """Approximate KV, whose keys are also used to score tokens. None if there is no approximate KV."""
        self._prepared: LowBitQuery | NativeQuery | None = None
        """True query of the current layer, prepared by `select` and used again by `merge_approximate`."""

    @property
    def scoring_keys(self) -> ScoringKeys:
        return self._keys

    @property
    def device_bytes(self) -> int:
        return 0 if self._policy.keys_on_host else self._keys.bytes

    @property
    def approximate_bytes(self) -> int:
        return 0 if self._approximate is None else self.device_bytes

    @property
    def host_bytes(self) -> int:
        return self._keys.bytes if self._policy.keys_on_host else 0

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        if layer not in self._policy.dense_layers:
            self._keys.observe(layer, q.to(self._policy.keys_device))

    def on_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        if layer not in self._policy.dense_layers:
            self._keys.write(layer, k.to(self._policy.keys_device), v, start)

    def on_moved(self, layer: int, source: int, target: int) -> None:
        self._keys.move(layer, source, target)

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select the candidates whose score for query q `[H, d]` is within `alpha` of the largest score of their head.

        If the option `budget` is set, the candidates with the largest scores are selected instead.
        """
        candidates = visible.candidates
        if not candidates:
            kv_heads = self._policy.geometry.kv_heads
            return Selection(torch.empty(kv_heads, 0, dtype=torch.int64, device=q.device))
        query = q.to(self._policy.keys_device)
        if self._policy.rule is not None:
            return self._select_as_batch(self._policy.rule, layer, query, visible)
        alpha, limit = self._policy.selection.alpha, self._policy.selection.limit(visible)
        if self._approximate is None:
            tokens = select_tokens(self._keys.scores(layer, query, candidates), alpha, limit)
        else:
            prepared = self._approximate.query(layer, query, candidates)
            tokens = prepared.select(alpha, limit)
            if self._policy.query_source == "query":
                self._prepared = prepared
        return Selection((tokens + candidates.start if candidates.start else tokens).to(q.device))

    def _select_as_batch(self, rule: Rule, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select tokens as for a batch of one sequence, so that their number stays on the device (in `counts`)."""
        kv_heads, slots = self._policy.geometry.kv_heads, self._keys.length(layer)
        lists = KeyLists(rule, [layer], 1, slots, q.device)
        new_tables = lists.load([self._keys], [slots - 1])
        assert new_tables is not None
        copy_into(new_tables, lists.pointer_tables)
        bounds = CandidateSpans.bounds([visible], kv_heads, rule)
        starts, stops, limits, contexts = (
            to_device(torch.tensor(values, dtype=torch.int32), q.device) for values in bounds
        )
        spans = CandidateSpans(starts, stops, limits, contexts, slots, max(1, bounds[2][0]))
        return Selection(*lists.select(layer, q.unsqueeze(1), spans))

    def repair(self, layer: int, q: torch.Tensor, visible: VisibleTokens, selection: Selection) -> Selection | None:
        """Select additional candidates until the missed attention mass is at most `max_missed_mass`.

        The mass is the mean over query heads, and is estimated from the scoring keys of all visible tokens.
        `max_fraction` limits the total number of selected tokens.
        """
        options, candidates = self._policy.options, visible.candidates
        if options.max_missed_mass is None:
            return None
        max_tokens = selection_limit(len(candidates), options.max_fraction) - selection.count
        if max_tokens <= 0:
            return None
        assert self._keys.length(layer) >= visible.all.stop, "on_kv comes before repair"
        estimated = self._keys.scores(layer, q.to(self._policy.keys_device), visible.all)
        scores = capped(estimated, self._policy.geometry.softcap)
        first = visible.all.start
        attended = torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool, device=scores.device)
        attended[:, candidates.start - first : candidates.stop - first] = False
        attended.scatter_(1, selection.tokens.to(scores.device) - first, True)
        extra = extend_selection(scores, attended, options.max_missed_mass, max_tokens)
        return Selection((extra + first).to(q.device)) if extra.shape[1] else None

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        visible: VisibleTokens,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._approximate is None or not visible.candidates:
            return out, lse
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            prepared = self._approximate.query(layer, q.to(self._policy.keys_device), visible.candidates)
        kv_heads, device = self._policy.geometry.kv_heads, self._policy.keys_device
        exact = out.to(device).unflatten(0, (kv_heads, -1)), lse.to(device).unflatten(0, (kv_heads, -1))
        excluded = selection.tokens if selection.counts is None else _padded_tokens(selection.tokens, selection.counts)
        matrices, softcap = self._approximate.bases[layer], self._policy.geometry.softcap
        merged, total = prepared.merge(exact, excluded.to(device), (matrices.mixing, matrices.unmixing), softcap)
        return merged.flatten(0, 1).to(q.device), total.flatten().to(q.device)

    def fork(self, keys: KeyReader) -> InfiniGenState:
        return InfiniGenState(self._policy, self._keys.fork())

    def fork_prefix(self, tokens: int) -> InfiniGenState | None:
        if self._approximate is None:
            return None
        return InfiniGenState(self._policy, self._approximate.fork(tokens))

    def check_integrity(self) -> None:
        self._keys.check_integrity()
        assert all(self._keys.length(layer) == 0 for layer in self._policy.dense_layers)


class InfiniGen(Policy):
    """Policy "infinigen" for one model.

    With `keys_on_host` (paper §6.2), scoring keys are stored in host memory. Each layer then copies its query to the
    host, and the indices of the selected tokens back to the device.
    """

    name = "infinigen"
    evictable = True

    def __init__(
        self,
        options: InfiniGenOptions,
        geometry: ModelGeometry,
        artifact: SkewArtifact,
        device: torch.device,
        dtype: torch.dtype,
        *,
        keys_on_host: bool = False,
    ) -> None:
        """Create the policy. Scores are computed in float32, or wider if `dtype` is wider.

        Raises:
            ConfigError: If an option does not fit the model.
            ArtifactError: If the artifact belongs to another model or an earlier version.
        """
        _check(options, geometry, artifact)
        self.alpha = geometry.default_alpha if options.alpha is None else options.alpha
        self.query_source = _resolve_source(options, device)
        source = self.query_source if isinstance(self.query_source, str) else options.source
        self.options = replace(options, alpha=self.alpha, source=source)
        self.geometry = geometry
        self.keys_device, self.keys_on_host = torch.device("cpu") if keys_on_host else device, keys_on_host
        self.wants_queries = options.keys == "partial" and options.columns == "prompt"
        needs_counts = keys_on_host or options.max_missed_mass is not None
        alpha = self.alpha if options.budget is None else ANY_SCORE
        self.selection = Rule(alpha, options.max_fraction, options.budget, per_sequence_bases=self.wants_queries)
        self.rule = None if device.type != "cuda" or needs_counts else self.selection
        """Rule for batched selection, or None if each sequence selects separately.

        Sequences select separately on a CPU, if scoring keys are on the host, and with repairs, because repairs need to
        know how many tokens were selected.
        """
        self.sinks, self.recent = options.sinks, options.recent
        self.dense_layers = dense_layers(options.dense_layers, geometry)
        self.provenance_key = self._provenance_key(artifact)
        self._correction = self._corrections(artifact, device, dtype)
        factory = self._keys_factory if options.approximate_kv == "off" else self._approximate_factory
        self._new_keys = factory(artifact.to(self.keys_device), dtype)

    @classmethod
    def build(cls, options: InfiniGenOptions, context: PolicyContext) -> Self:
        artifact, on_host = context.artifact(options.skew), context.keys_on_host
        return cls(options, context.geometry, artifact, context.device, context.dtype, keys_on_host=on_host)

    @staticmethod
    def memory_demand(options: InfiniGenOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        dense = tuple(sorted(dense_layers(options.dense_layers, geometry)))
        guessing, wide = geometry.layers - len(dense), torch.promote_types(dtype, torch.float32)
        # While the policy is built, the complete artifact is in memory. It has one basis per head for queries and keys,
        # and one basis for the values of all heads.
        selecting = len(set(geometry.kv_layers) - set(dense))
        square = geometry.head_dim**2 * selecting * wide.itemsize
        bases = (
            2 * geometry.kv_heads * square
            if options.approximate_kv == "off"
            else selecting * basis_bytes(geometry, wide)
        )
        return MemoryDemand(
            dense,
            options.sinks + options.recent,
            fetched_fraction=max(options.max_fraction, options.budget or 0.0),
            key_bytes=(
                token_bytes(options.approximate_kv, geometry)
                if options.approximate_kv != "off"
                else float(key_bytes(options.keys, options.partial_ratio, geometry, dtype))
            ),
            page_tokens=0 if options.approximate_kv == "off" else PAGE_TOKENS,
            sequence_bytes=selecting * _prompt_basis_bytes(options, geometry, wide),
            basis_bytes=bases + artifact_bytes(geometry),
            correction_bytes=2 * geometry.hidden * guessing * dtype.itemsize if options.corrected else 0,
            always_dense_until=options.always_dense_until,
        )

    def correct_prediction(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """Apply the calibrated slope and offset of each channel to the attention input `[T, D]`.

        If the layer has no correction, the input is returned unchanged. See `skewing.prediction`.
        """
        if layer not in self._correction:
            return attention_input
        slope, offset = self._correction[layer]
        return torch.addcmul(offset, slope, attention_input)

    def _corrections(
        self, artifact: SkewArtifact, device: torch.device, dtype: torch.dtype
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        corrections = {}
        for layer in range(self.geometry.layers):
            source = source_between(self.query_source, self.geometry.between(layer))
            if self.options.corrected and source != "query" and layer not in self.dense_layers:
                s = source_index(source)
                slope, offset = artifact.slope[s, layer], artifact.offset[s, layer]
                corrections[layer] = slope.to(device, dtype), offset.to(device, dtype)
        return corrections

    def new_state(self, keys: KeyReader) -> InfiniGenState:
        return InfiniGenState(self, self._new_keys())

    def _provenance_key(self, artifact: SkewArtifact) -> str:
        # The options and the artifact determine which tokens sparse layers attend to, and thus the KV of deeper layers.
        # The matrices of the artifact are not hashed, because their rounding depends on the processor and a session may
        # continue on another machine.
        text = f"{self.options.provenance_text()}\n{artifact.identity}"
        return f"infinigen-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _approximate_factory(self, artifact: SkewArtifact, dtype: torch.dtype) -> Callable[[], ScoringKeys]:
        geometry, compute = self.geometry, torch.promote_types(dtype, torch.float32)
        bases = {
            layer: ApproximateBasis.of(artifact, layer, geometry, compute)
            for layer in geometry.kv_layers
            if layer not in self.dense_layers
        }
        layout = approximate_layout(self.options.approximate_kv, geometry)
        return lambda: ApproximateKV(bases, layout, self.keys_device)

    def _keys_factory(self, artifact: SkewArtifact, dtype: torch.dtype) -> Callable[[], ScoringKeys]:
        options, geometry, device = self.options, self.geometry, self.keys_device
        compute = torch.promote_types(dtype, torch.float32)
        column_count = stored_columns(options.partial_ratio, geometry.head_dim)
        fixed = options.keys in ("partial", "int8") and options.columns == "calibration"
        columns = slice(0, column_count if fixed else geometry.head_dim)
        bases = {
            layer: Basis(
                artifact.query[layer, :, :, columns].to(compute).contiguous(),
                artifact.key[layer, :, :, columns].to(compute).contiguous(),
                geometry.scales[layer],
            )
            for layer in geometry.kv_layers
            if layer not in self.dense_layers
        }
        if options.keys == "partial":
            if fixed:
                return lambda: PartialKeys(CalibratedColumns(bases), dtype, device)
            return lambda: PartialKeys(PromptColumns(bases, column_count), dtype, device)
        bits = BITS[options.keys]
        mean, std = artifact.key_mean[..., columns].to(compute), artifact.key_std[..., columns].to(compute)
        quantisers = {layer: Quantiser.fit(basis, mean[layer], std[layer], bits) for layer, basis in bases.items()}
        return lambda: QuantisedKeys(quantisers, bits, device)


def _prompt_basis_bytes(options: InfiniGenOptions, geometry: ModelGeometry, dtype: torch.dtype) -> int:
    """Return the size in bytes of one layer's matrices that each sequence has for itself (`PromptColumns`)."""
    if options.keys != "partial" or options.columns != "prompt":
        return 0
    d = geometry.head_dim
    return 2 * geometry.kv_heads * d * stored_columns(options.partial_ratio, d) * dtype.itemsize


def _padded_tokens(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """In each row h of the token indices `[Hkv, n]`, replace all entries except the first `counts[h]` with -1."""
    return tokens.masked_fill(torch.arange(tokens.shape[1], device=tokens.device) >= counts.unsqueeze(1), -1)


def _resolve_source(options: InfiniGenOptions, device: torch.device) -> QuerySource:
    if options.ahead is not None:
        return options.ahead
    if options.source != "auto":
        return options.source
    return "query" if device.type == "cpu" else "attention_input"


def _check(options: InfiniGenOptions, geometry: ModelGeometry, artifact: SkewArtifact) -> None:
    expected = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    if tuple(artifact.query.shape) != expected:
        raise ArtifactError(
            f"the skew artifact has shape {tuple(artifact.query.shape)} (layers, KV heads, head dimension twice), but "
            f"this model needs {expected}; create an artifact for this model with 'offload-rt skew'"
        )
    sources = len(SOURCES) + min(options.ahead or 0, geometry.most_between)
    if options.corrected and len(artifact.slope) < sources:
        raise ArtifactError(
            f"the skew artifact has no correction for ahead={options.ahead}: an earlier version made it; create it "
            "again with 'offload-rt skew'"
        )
