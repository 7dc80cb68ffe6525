"""Types that all parts of the package use: model geometry, block tables, visible tokens, selections.

Axes in docstrings

    B    sequences of a batch          T    tokens of one call, of one or of many sequences
    D    hidden size                   V    vocabulary
    L    layers                        H    query heads      Hkv  key/value heads      G = H / Hkv
    d    head dimension                r    columns of the scoring keys, r <= d
    N    tokens in a sequence's context, the newest included
    n    tokens of one selection, the same for every KV head
    P = B * Hkv, the number of lists. A list is the data of one KV head of one sequence: keys, scores, selected tokens.

A *token index* is the index of a token's slot in its sequence. Without eviction it equals the token's position.

A *dense* layer attends to all visible tokens, a *sparse* layer to the tokens that a policy selects and to resident
tokens. *Resident* tokens (sinks and recent tokens, or a sliding window) stay on the device and are never selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # not at run time: the list of sessions needs this module, but no torch

BLOCK_SIZE = 64
"""Tokens per block. Blocks are the unit of sharing, reference counting and storage on disk."""

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class StateShape:
    """Shape of the recurrent state of one decoder layer, for one sequence.

    Attributes:
        layer: Index of the decoder layer.
        after: The last attention layer that is not after the decoder layer, or -1 if there is none.
        conv: Shape (channels, kernel size) of the last inputs of the convolution, which are stored in the model's
            dtype.
        recurrent: Shape of the float32 state, or () if there is none.
    """

    layer: int
    after: int
    conv: tuple[int, int]
    recurrent: tuple[int, ...]

    def sizes(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the sizes in bytes of the float32 state and of the convolution state."""
        recurrent = math.prod(self.recurrent) * FLOAT32_BYTES if self.recurrent else 0
        return recurrent, math.prod(self.conv) * dtype.itemsize

    def bytes(self, dtype: torch.dtype) -> int:
        return sum(self.sizes(dtype))


@dataclass(frozen=True)
class RowShape:
    """Shape of the K and V vectors that one layer stores for each token.

    Attributes:
        kv_heads: Hkv.
        head_dim: d.
        planes: Number of vectors per KV head: 2 (K and V), or 1 if the keys contain the values
            (`ModelGeometry.value_dim`).
    """

    kv_heads: int
    head_dim: int
    planes: int = 2

    def bytes(self, dtype: torch.dtype) -> int:
        return self.planes * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class ModelGeometry:
    """Dimensions of a model. `layers` counts only attention layers; hybrid models have other decoder layers in between.

    Attributes:
        kv_heads: Hkv of full-attention layers.
        head_dim: d of full-attention layers.
        scales: For each layer, the factor by which q·k is multiplied. Adapters return unscaled queries.
        windows: For each layer, the length of the sliding window in tokens, including the newest token. None for full
            attention.
        max_positions: Number of positions that the model was trained for.
        absolute_positions: Whether positions come from a learned table (OPT, GPT-2), which ends at `max_positions`.
        default_alpha: Selection threshold of InfiniGen §5.1 for this family: 4 for OPT, 5 for Llama.
        softcap: Value c of logit soft-capping: scaled scores s become c tanh(s / c) before the softmax. None disables
            it.
        sinks: Whether layers have learned attention sinks, which add to the softmax denominator.
        chunked: Whether attention is chunked instead of sliding. Windows then begin at multiples of their length, and a
            token attends only to earlier tokens in the same window.
        experts: Whether MLPs are mixtures of experts.
        states: Recurrent states per sequence (hybrid models).
        attention_at: For each attention layer, its index among the decoder layers. Empty if all decoder layers have
            attention.
        depth: Number of decoder layers. 0 if all decoder layers have attention.
        window_rows: Shape of KV in sliding layers. None if it is the same as in full-attention layers. `head_dim` must
            be a multiple of the head dimension in this shape.
        value_dim: With latent attention, the first `value_dim` elements of a key are the value. Only keys are stored,
            and the model reads the first `value_dim` elements of attention outputs. None for other models.
        kv_from: For each layer, the layer whose K and V it attends to: itself, or an earlier layer with the same window
            and scale (Gemma 4 E2B). Empty if every layer stores its K and V.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    scales: tuple[float, ...]
    windows: tuple[int | None, ...]
    max_positions: int
    absolute_positions: bool
    default_alpha: float
    softcap: float | None = None
    sinks: bool = False
    chunked: bool = False
    experts: bool = False
    states: tuple[StateShape, ...] = ()
    attention_at: tuple[int, ...] = ()
    depth: int = 0
    window_rows: RowShape | None = None
    value_dim: int | None = None
    kv_from: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads must be a multiple of KV heads"
        if (own := self.window_rows) is not None:
            assert own.planes == self.planes == 2, "a layer whose keys contain the values has no other row shape"
            assert self.heads % own.kv_heads == 0 == self.head_dim % own.head_dim
            assert 0 < len(self.sliding) < self.layers, "a single row shape is stated by kv_heads and head_dim"
        assert len(self.scales) == self.layers == len(self.windows)
        assert not self.attention_at or len(self.attention_at) == self.layers <= self.depth
        for layer, source in enumerate(self.kv_from):
            assert source <= layer and self.kv_from[source] == source, "KV is shared by later layers"
            assert (self.windows[layer], self.scales[layer]) == (self.windows[source], self.scales[source])

    @property
    def group(self) -> int:
        """G, the number of query heads per KV head in full-attention layers."""
        return self.heads // self.kv_heads

    @property
    def planes(self) -> int:
        return 2 if self.value_dim is None else 1

    @property
    def full_rows(self) -> RowShape:
        return RowShape(self.kv_heads, self.head_dim, self.planes)

    @property
    def window_ratio(self) -> int:
        """Head dimension of full-attention layers divided by that of sliding layers."""
        return 1 if self.window_rows is None else self.head_dim // self.window_rows.head_dim

    def rows(self, layer: int) -> RowShape:
        return self.full_rows if self.window_rows is None or self.windows[layer] is None else self.window_rows

    @property
    def sliding(self) -> tuple[int, ...]:
        return tuple(layer for layer, window in enumerate(self.windows) if window is not None)

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose K, V and policy state `layer` uses."""
        return self.kv_from[layer] if self.kv_from else layer

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.layers) if self.kv_layer(layer) == layer)

    @cached_property
    def shared_kv(self) -> frozenset[int]:
        """Layers whose K and V are also used by later layers."""
        return frozenset(source for layer, source in enumerate(self.kv_from) if source != layer)

    @cached_property
    def layer_of_window(self) -> dict[int | None, int]:
        """For each window length, one layer that has it. Visible tokens depend only on the window length."""
        return {window: layer for layer, window in enumerate(self.windows)}

    def decoder_layer(self, layer: int) -> int:
        """Return the index of an attention layer among the decoder layers."""
        return self.attention_at[layer] if self.attention_at else layer

    def between(self, layer: int) -> int:
        """Return the number of decoder layers between the attention layers `layer` - 1 and `layer`."""
        return self.decoder_layer(layer) - self.decoder_layer(layer - 1) - 1 if layer else 0

    @cached_property
    def most_between(self) -> int:
        return max(self.between(layer) for layer in range(self.layers))

    def keeps_state(self, layer: int) -> bool:
        """Return whether attention layer `layer`, or a decoder layer between it and the next, has recurrent state."""
        return any(state.after == layer for state in self.states)

    def state_bytes(self, dtype: torch.dtype) -> int:
        return sum(state.bytes(dtype) for state in self.states)

    def resident(self, layer: int, sinks: int, recent: int) -> tuple[int, int]:
        """Return how many tokens at the start and how many at the end of a sequence are resident in `layer`."""
        window = self.windows[layer]
        return (sinks, recent) if window is None else (0, window)

    def window_at(self, layer: int, position: int) -> int | None:
        """Return how many tokens a token at `position` attends to, including itself. None means all tokens."""
        window = self.windows[layer]
        return position % window + 1 if self.chunked and window is not None else window

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Return the size in bytes of the K and V of `tokens` tokens in all layers."""
        return tokens * sum(self.rows(layer).bytes(dtype) for layer in self.kv_layers)


@dataclass(frozen=True)
class VisibleTokens:
    """Tokens that the newest token of a sequence can attend to in one layer, as three adjacent ranges of indices.

    The tokens in `sinks` and `recent` are resident and always attended to. A policy selects from the `candidates`
    between them. The newest token is the last token in `recent`.
    """

    sinks: range
    candidates: range
    recent: range

    @classmethod
    def of(cls, length: int, *, sinks: int, recent: int, window: int | None, floor: int = 0) -> VisibleTokens:
        """Return the ranges for a context of `length` tokens, including the newest token.

        In a layer with a sliding `window`, tokens outside the window or before `floor` are not visible.
        """
        assert length >= 1 and sinks >= 0 and recent >= 1
        first = 0 if window is None else max(floor, length - window)
        sinks_stop = max(first, min(sinks, length - 1))
        recent_start = max(sinks_stop, length - recent)
        return cls(range(first, sinks_stop), range(sinks_stop, recent_start), range(recent_start, length))

    @cached_property
    def all(self) -> range:
        return range(self.sinks.start, self.recent.stop)

    @cached_property
    def resident(self) -> int:
        return len(self.sinks) + len(self.recent)


@dataclass(frozen=True)
class Selection:
    """Tokens that one layer of one sequence attends to in one step, in addition to the resident tokens.

    Attributes:
        tokens: int64 `[Hkv, n]`, distinct token indices within `VisibleTokens.candidates`, in any order.
        counts: int32 `[Hkv]` on the device: only the first `counts[h]` entries of `tokens[h]` are valid. All heads have
            the same count. None means that all entries are valid.
    """

    tokens: torch.Tensor
    counts: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """Number n of tokens per KV head. If `counts` is not None, this is only an upper bound."""
        return self.tokens.shape[1]

    def known(self) -> Selection:
        """Return the selection without padding. This may wait for the device."""
        return self if self.counts is None else Selection(self.tokens[:, : int(self.counts[0])])


@dataclass(frozen=True)
class KVPart:
    """KV entries of one layer of one sequence on the compute device: k and v `[Hkv, n, d]`, which may be views.

    If `counts` (int32 `[Hkv]`) is not None, only the first `counts[h]` entries of KV head h are valid. If the keys
    contain the values, v is the same tensor as k (`ModelGeometry.value_dim`).
    """

    k: torch.Tensor
    v: torch.Tensor
    counts: torch.Tensor | None = None

    @classmethod
    def of(cls, planes: torch.Tensor, dim: int = 0, counts: torch.Tensor | None = None) -> KVPart:
        """Return views of `planes` along dimension `dim`: K is at index 0, and V is at index 1.

        If this dimension has only one element, v is k.
        """
        k = planes.select(dim, 0)
        return cls(k, k if planes.shape[dim] == 1 else planes.select(dim, 1), counts)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> KVPart:
        """Apply `function` to k and v. If v is k, `function` is called once."""
        k = function(self.k)
        return KVPart(k, k if self.v is self.k else function(self.v), self.counts)

    def between(self, start: int, stop: int | None = None) -> KVPart:
        """Return views of the entries [start, stop), or of all entries from `start` on. `counts` must be None."""
        assert self.counts is None
        return self.map(lambda rows: rows[:, start:stop])

    @property
    def shape(self) -> tuple[int, int]:
        """Number of KV heads, and number of entries per KV head."""
        kv_heads, n, _ = self.k.shape
        return kv_heads, n

    @property
    def runs(self) -> list[KVPart]:
        """The entries as a list of parts that are each contiguous in memory."""
        return [self]

    def mix(self, weights: torch.Tensor) -> torch.Tensor:
        """Return `weights @ v` `[Hkv, G, d]` in the dtype of v, for weights `[Hkv, G, n]`."""
        return weights.to(self.v.dtype).bmm(self.v)


@dataclass
class BlockTable:
    """Blocks of the host KV cache that a sequence uses. Only `HostPool` changes a block table.

    Attributes:
        ids: Block ids in token order. Block i holds the tokens [64 i, 64 (i + 1)).
        length: Number of tokens whose K and V are complete in every layer.
        windows: Blocks of sliding layers. `windows[i]` has the block ids for the tokens [64 i, 64 (i + 1)), one for
            each group of sliding layers (`layer_groups`). Blocks that are outside of all windows are removed.
        floor: First token that sliding layers attend to. In a truncated conversation, this is the first token after the
            truncated part.
    """

    ids: list[int] = field(default_factory=list)
    length: int = 0
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    floor: int = 0

    @property
    def capacity(self) -> int:
        return len(self.ids) * BLOCK_SIZE


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request. `id` is unique within the engine. Prompts share KV only if their `cache_salt` is equal."""

    id: int
    token_ids: tuple[int, ...]
    cache_salt: str = ""

    def __post_init__(self) -> None:
        assert self.token_ids, "LLM refuses empty prompts"


def ranges_of(numbers: Iterable[int]) -> list[range]:
    """Convert ascending numbers to as few ranges as possible."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def padded_batch(sequences: int) -> int:
    """Round a batch size up to a power of two or a multiple of 8, so that only few CUDA graphs are captured."""
    return -(-sequences // 8) * 8 if sequences > 8 else 1 << (sequences - 1).bit_length()


def bucket(context: int) -> int:
    """Round a context length up to one of eight values per power of two, so that only few CUDA graphs are captured.

    All values are multiples of `BLOCK_SIZE`.
    """
    step = max(BLOCK_SIZE, 1 << max(0, (context - 1).bit_length() - 4))
    return -(-context // step) * step
