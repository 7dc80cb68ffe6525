"""Policy "infinigen": speculate the next layer's query, score every token with compressed skewed keys, fetch those near
the maximum (InfiniGen §4.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import torch

from ...core import ModelGeometry, Selection, Visible
from ...errors import ArtifactError
from ...kernels.h2d_copy import copy_into, to_device
from ...kernels.low_bit import LowBitQuery
from ...kernels.pages import PAGE_TOKENS
from ...kernels.reference import capped
from ...kernels.selection import extend_selection, floor_share
from ...skewing.artifact import SkewArtifact, artifact_bytes
from ...skewing.guess import SOURCES
from ..base import KeyReader, QuerySource
from ..budget import budget_tokens, dense_layers
from ..demand import MemoryDemand
from ..options import InfiniGenOptions
from ..passive import PassiveState
from ..registry import PolicyContext
from .bases import Basis, CalibratedColumns, PromptColumns, kept_columns
from .key_lists import KeyLists, Rule, Spans
from .low_bit_rows import LowBitRows, RowBasis, basis_bytes, row_bytes, row_layout
from .scoring import BITS, PartialKeys, QuantisedKeys, Quantiser, key_bytes
from .scoring_keys import KeyQuery, ScoringKeys


class InfiniGenState(PassiveState):
    """One sequence's scoring keys and the rule that reads them."""

    def __init__(self, policy: InfiniGen, keys: ScoringKeys, tail: LowBitRows | None = None) -> None:
        """With a `tail`, it holds the scoring keys too."""
        self._policy, self._keys, self._tail = policy, keys, tail
        self._asked: LowBitQuery | None = None
        """What the layer's own query asked in `select`, until it asks for the tail."""

    @property
    def scoring_keys(self) -> ScoringKeys:
        """For `KeyLists`."""
        return self._keys

    @property
    def device_bytes(self) -> int:
        """Bytes of scoring keys, and of matrices chosen for this sequence alone, where they lie on the device."""
        return 0 if self._policy.keys_on_host else self._keys.bytes

    @property
    def tail_bytes(self) -> int:
        """Low-bit rows are scoring keys and tail in one."""
        return 0 if self._tail is None else self.device_bytes

    @property
    def host_bytes(self) -> int:
        """The same, where they lie in host memory."""
        return self._keys.bytes if self._policy.keys_on_host else 0

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        """Prompt queries q `[H, m, d]`: they only matter to columns chosen from the prompt."""
        if layer not in self._policy.dense_layers:
            self._keys.observe(layer, q.to(self._policy.keys_device))

    def on_keys(self, layer: int, k: torch.Tensor, start: int) -> None:
        """Keys k `[Hkv, m, d]` enter the scoring keys at slot `start`, skewed once."""
        if layer not in self._policy.dense_layers:
            assert start <= self._keys.length(layer), f"layer {layer} has {self._keys.length(layer)} keys, not {start}"
            self._keys.write(layer, k.to(self._policy.keys_device), start)

    def on_values(self, layer: int, v: torch.Tensor, start: int) -> None:
        """Values v `[Hkv, m, d]` enter the tail, where there is one."""
        if self._tail is not None and layer not in self._policy.dense_layers:
            self._tail.write_values(layer, v.to(self._policy.keys_device), start)

    def on_moved(self, layer: int, source: int, target: int) -> None:
        """The scoring key of a token moves with its rows."""
        self._keys.move(layer, source, target)

    def select(self, layer: int, q: torch.Tensor, visible: Visible) -> Selection:
        """The tokens within alpha of their head's largest score, by the (speculated) query q `[H, d]`; with a `budget`,
        that many tokens instead of those above the threshold."""
        options, candidates = self._policy.options, visible.candidates
        if not candidates:
            kv_heads = self._policy.geometry.kv_heads
            return Selection(torch.empty(kv_heads, 0, dtype=torch.int64, device=q.device))
        query = q.to(self._policy.keys_device)
        if self._policy.rule is not None:
            return self._counted(self._policy.rule, layer, query, visible)
        asked = self._ask(layer, query, candidates)
        if options.budget is None:
            tokens = asked.select(self._policy.alpha, options.max_fraction)
        else:
            tokens = asked.top(budget_tokens(options.budget, visible))
        return Selection((tokens + candidates.start if candidates.start else tokens).to(q.device))

    def _counted(self, rule: Rule, layer: int, q: torch.Tensor, visible: Visible) -> Selection:
        """`select` as of a batch of one."""
        kv_heads, slots = self._policy.geometry.kv_heads, self._keys.length(layer)
        lists = KeyLists(rule, [layer], 1, slots, q.device)
        moved = lists.hold([self._keys], [slots - 1])
        assert moved is not None
        copy_into(moved, lists.tables)
        numbers = Spans.numbers([visible], kv_heads, rule)
        starts, stops, limits = (to_device(torch.tensor(each, dtype=torch.int32), q.device) for each in numbers)
        spans = Spans(starts, stops, limits, slots, numbers[2][0])
        return Selection(*lists.select(layer, q.unsqueeze(1), spans))

    def _ask(self, layer: int, q: torch.Tensor, tokens: range) -> KeyQuery:
        """Of scoring keys, or of the tail's; if it is the layer's own query, the tail need not ask again."""
        if self._tail is None:
            return self._keys.ask(layer, q, tokens)
        asked = self._tail.ask(layer, q, tokens)
        if self._policy.query_source == "query":
            self._asked = asked
        return asked

    def repair(self, layer: int, q: torch.Tensor, visible: Visible, selection: Selection) -> Selection | None:
        """With `max_missed_mass`: the candidates that bring the attention mass outside resident and selected tokens,
        estimated with the true query q `[H, d]` and the scoring keys of all visible tokens, down to it (mean over
        query heads), within `max_fraction`. None where nothing is to be added."""
        options, candidates = self._policy.options, visible.candidates
        limit = max(1, floor_share(options.max_fraction, len(candidates)))
        most = min(limit, len(candidates)) - selection.count
        if options.max_missed_mass is None or most <= 0:
            return None
        assert self._keys.length(layer) >= visible.all.stop, "on_keys comes before repair"
        estimated = self._keys.ask(layer, q.to(self._policy.keys_device), visible.all).scores
        scores = capped(estimated, self._policy.geometry.softcap)
        first = visible.all.start
        attended = torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool, device=scores.device)
        attended[:, candidates.start - first : candidates.stop - first] = False
        attended.scatter_(1, selection.tokens.to(scores.device) - first, True)
        extra = extend_selection(scores, attended, options.max_missed_mass, most)
        return Selection((extra + first).to(q.device)) if extra.shape[1] else None

    def tail(
        self, layer: int, q: torch.Tensor, visible: Visible, selection: Selection
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The estimate of what was not selected, from low-bit rows; None without option `tail`."""
        if self._tail is None or not visible.candidates:
            return None
        query, skip = q.to(self._policy.keys_device), _meant(selection).to(self._policy.keys_device)
        asked, self._asked = self._asked or self._tail.ask(layer, query, visible.candidates), None
        out, lse = self._tail.attend(layer, asked, skip, self._policy.geometry.softcap)
        return out.to(q.device), lse.to(q.device)

    def fork(self, keys: KeyReader) -> InfiniGenState:
        """Shares scoring keys and tail until either side writes."""
        if self._tail is None:
            return InfiniGenState(self._policy, self._keys.fork())
        tail = self._tail.fork()
        return InfiniGenState(self._policy, tail, tail)

    def fork_prefix(self, tokens: int) -> InfiniGenState | None:
        """Shares the pages of low-bit rows, which rows alone decide; scoring keys of one's own are learned anew."""
        if self._tail is None:
            return None
        tail = self._tail.fork(tokens)
        return InfiniGenState(self._policy, tail, tail)

    def check_integrity(self) -> None:
        """Asserts that the scoring keys are consistent and belong to sparse layers."""
        self._keys.check_integrity()
        assert all(self._keys.length(layer) == 0 for layer in self._policy.dense_layers)


class InfiniGen:
    """The policy for one model: options, and the bases of its sparse layers where the scoring keys are: on the compute
    device, or with `keys_on_host` in host memory. There a layer's query goes to the host (4 * H * d bytes) and the
    selected indices come back (paper §6.2); what is selected is the same."""

    name = "infinigen"
    dense_until = 0
    wants_weights = False
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
        """device: that the model computes on. dtype: the model's; scoring is float32 at least.

        Raises ConfigError where an option does not fit the model, ArtifactError where the artifact has other shapes.
        """
        _check(options, geometry, artifact)
        self.alpha = geometry.default_alpha if options.alpha is None else options.alpha
        self.query_source = _settled_source(options, device)
        self.options = replace(options, alpha=self.alpha, source=self.query_source)
        self.geometry = geometry
        self.keys_device, self.keys_on_host = torch.device("cpu") if keys_on_host else device, keys_on_host
        asks = keys_on_host or not (options.budget is options.max_missed_mass is None)
        self.rule = None if device.type != "cuda" or asks else Rule(self.alpha, options.max_fraction)
        """Where selections leave their counts on the device. (A budget's are known, a repair needs them.)"""
        self.sinks, self.recent = options.sinks, options.recent
        self.dense_layers = dense_layers(options.dense_layers, geometry)
        self.wants_queries = options.keys == "partial" and options.columns == "prompt"
        self.lineage = self._lineage(artifact)
        self._correction = self._corrections(artifact, device, dtype)
        own = artifact.to(self.keys_device)
        self._new_tail = None if options.tail == "off" else self._tail_factory(own, dtype)
        self._new_keys = self._keys_factory(own, self.keys_device, dtype) if self._new_tail is None else self._new_tail

    @classmethod
    def build(cls, options: InfiniGenOptions, context: PolicyContext) -> Self:
        """The policy for a model, with the skew artifact that `options.skew` names. Raises as the class does."""
        artifact, on_host = context.artifact(options.skew), context.keys_on_host
        return cls(options, context.geometry, artifact, context.device, context.dtype, keys_on_host=on_host)

    @staticmethod
    def memory_demand(options: InfiniGenOptions, geometry: ModelGeometry, dtype: torch.dtype) -> MemoryDemand:
        """Scoring keys of the layers that select, their bases and corrections, and the artifact these are made of."""
        dense = tuple(sorted(dense_layers(options.dense_layers, geometry)))
        selecting, wide = geometry.layers - len(dense), torch.promote_types(dtype, torch.float32)
        # The artifact comes whole and is cut; queries and keys have a basis each, values one for all heads.
        square = geometry.head_dim**2 * selecting * wide.itemsize
        bases = 2 * geometry.kv_heads * square if options.tail == "off" else selecting * basis_bytes(geometry, wide)
        return MemoryDemand(
            dense,
            options.sinks + options.recent,
            share=max(options.max_fraction, options.budget or 0.0),
            key_bytes=(
                row_bytes(options.tail, geometry)
                if options.tail != "off"
                else float(key_bytes(options.keys, options.partial_ratio, geometry, dtype))
            ),
            key_page=0 if options.tail == "off" else PAGE_TOKENS,
            basis_bytes=bases + artifact_bytes(geometry),
            guess_bytes=2 * geometry.hidden * selecting * dtype.itemsize if options.corrected else 0,
            whole=options.whole,
        )

    def correct_guess(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """The guess `[T, D]` with each channel's slope and offset (`skewing.guess`), unless options forbid it."""
        if layer not in self._correction:
            return attention_input
        slope, offset = self._correction[layer]
        return torch.addcmul(offset, slope, attention_input)

    def _corrections(
        self, artifact: SkewArtifact, device: torch.device, dtype: torch.dtype
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Slope and offset `[D]` of every layer whose guess is to be corrected."""
        guesses = self.options.corrected and self.query_source in SOURCES
        layers = range(self.geometry.layers) if guesses else ()
        source = SOURCES.index(self.query_source) if guesses else 0
        return {
            layer: (artifact.slope[source, layer].to(device, dtype), artifact.offset[source, layer].to(device, dtype))
            for layer in layers
            if layer not in self.dense_layers
        }

    def new_state(self, keys: KeyReader) -> InfiniGenState:
        """An empty state; the full keys are never read."""
        if self._new_tail is None:
            return InfiniGenState(self, self._new_keys())
        tail = self._new_tail()
        return InfiniGenState(self, tail, tail)

    def _lineage(self, artifact: SkewArtifact) -> str:
        """Digest of the options and of what the artifact was made from: they decide what a sparse layer saw, hence its
        tokens' deeper KV. The artifact's numbers are left out, because processors round them differently, and a session
        is to be continued on another one."""
        text = f"{self.options.lineage_text()}\n{artifact.identity}"
        return f"infinigen-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def _tail_factory(self, artifact: SkewArtifact, dtype: torch.dtype) -> Callable[[], LowBitRows]:
        """What makes a sequence's low-bit rows, with the bases they share made once."""
        geometry, compute = self.geometry, torch.promote_types(dtype, torch.float32)
        bases = {
            layer: RowBasis.of(artifact, layer, geometry.scales[layer], compute)
            for layer in range(geometry.layers)
            if layer not in self.dense_layers
        }
        layout = row_layout(self.options.tail, geometry)
        return lambda: LowBitRows(bases, layout, self.keys_device)

    def _keys_factory(
        self, artifact: SkewArtifact, device: torch.device, dtype: torch.dtype
    ) -> Callable[[], ScoringKeys]:
        """What makes a sequence's scoring keys, with the bases they share made once."""
        options, geometry = self.options, self.geometry
        compute = torch.promote_types(dtype, torch.float32)
        kept = kept_columns(options.partial_ratio, geometry.head_dim)
        fixed = options.keys in ("partial", "int8") and options.columns == "calibration"
        cut = slice(0, kept if fixed else geometry.head_dim)
        bases = {
            layer: Basis(
                artifact.query[layer, :, :, cut].to(compute).contiguous(),
                artifact.key[layer, :, :, cut].to(compute).contiguous(),
                geometry.scales[layer],
            )
            for layer in range(geometry.layers)
            if layer not in self.dense_layers
        }
        if options.keys == "partial":
            if fixed:
                return lambda: PartialKeys(CalibratedColumns(bases), dtype, device)
            return lambda: PartialKeys(PromptColumns(bases, kept), dtype, device)
        bits = BITS[options.keys]
        mean, std = artifact.key_mean[..., cut].to(compute), artifact.key_std[..., cut].to(compute)
        quantisers = {layer: Quantiser.fit(basis, mean[layer], std[layer], bits) for layer, basis in bases.items()}
        return lambda: QuantisedKeys(quantisers, bits, device)


def _meant(selection: Selection) -> torch.Tensor:
    """int64 `[Hkv, n]`: the tokens of a selection that are meant, -1 in place of the others."""
    if selection.counts is None:
        return selection.tokens
    place = torch.arange(selection.count, device=selection.tokens.device)
    return selection.tokens.masked_fill(place >= selection.counts.unsqueeze(1), -1)


def _settled_source(options: InfiniGenOptions, device: torch.device) -> QuerySource:
    """What "auto" means where the model computes on `device`."""
    if options.source != "auto":
        return options.source
    return "query" if device.type == "cpu" else "attention_input"


def _check(options: InfiniGenOptions, geometry: ModelGeometry, artifact: SkewArtifact) -> None:
    expected = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.head_dim)
    if tuple(artifact.query.shape) != expected:
        raise ArtifactError(
            f"the skew artifact is for a model of shape {tuple(artifact.query.shape)} (layers, KV heads, head "
            f"dimension twice), this model's is {expected}; make one for this model with 'offload-rt skew'"
        )
