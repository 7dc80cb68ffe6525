"""The words every room shares: shapes, chunks, what a token may see, and what a policy chose.

Shape glossary (named axes in every docstring)

    B    sequences of a batch          T    tokens of one call, of one or of many sequences
    D    hidden size                   V    vocabulary
    L    layers                        H    query heads      Hkv  key/value heads      G = H / Hkv
    d    head dimension                r    columns of the scoring keys, r <= d
    N    tokens in a sequence's context, the newest included
    n    tokens of one selection, the same for every KV head

A *token index* counts the slots of one sequence from 0; without eviction it is also the token's position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

CHUNK = 64
"""Token slots of a chunk: the unit of sharing, reference counts and swap to disk."""


@dataclass(frozen=True)
class ModelGeometry:
    """Everything the runtime knows about a model's shape. `scales[l]` multiplies q·k of layer l (once: queries arrive
    unscaled from every adapter); `windows[l]` is the sliding window of layer l in tokens, the newest included, or
    None."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    scales: tuple[float, ...]
    windows: tuple[int | None, ...]
    max_positions: int
    """Positions the model was trained or built for."""
    absolute_positions: bool
    """True where positions are a learned table (OPT, GPT-2): beyond `max_positions` there is nothing to look up."""
    default_alpha: float
    """The threshold that InfiniGen §5.1 uses for this family: 4 for OPT, 5 for Llama."""
    softcap: float | None = None
    """Scaled scores s enter the softmax as c tanh(s / c), with this c."""
    sinks: bool = False
    """Whether layers have attention sinks."""
    chunked: bool = False
    """Whether windows stand instead of sliding: a token sees those of its own chunk, which begins at a position that is
    a multiple of the window."""
    experts: bool = False
    """Whether MLPs are mixtures of experts: which of them run is asked of the device in every step."""

    def __post_init__(self) -> None:
        assert self.heads % self.kv_heads == 0, "query heads must be a multiple of KV heads"
        assert len(self.scales) == self.layers == len(self.windows)

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def sliding(self) -> tuple[int, ...]:
        """The layers that have a sliding window, rising."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is not None)

    def resident(self, layer: int, sinks: int, recent: int) -> tuple[int, int]:
        """(sinks, recent tokens) that stay on the device in a layer, of a policy that keeps `sinks` and `recent`: of a
        sliding layer its whole window, and no more."""
        window = self.windows[layer]
        return (sinks, recent) if window is None else (0, window)

    def window_at(self, layer: int, position: int) -> int | None:
        """How many tokens one at `position` sees in a layer at most, itself included; None: all before it."""
        window = self.windows[layer]
        return position % window + 1 if self.chunked and window is not None else window

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of K and V of `tokens` tokens in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * dtype.itemsize


@dataclass(frozen=True)
class Visible:
    """What the newest token of a sequence may attend to in one layer, as three neighbouring ranges of token indices.
    `sinks` and `recent` are resident (on the device anyway, always attended); `candidates` between them are what a
    policy selects from. The newest token is always the last of `recent`."""

    sinks: range
    candidates: range
    recent: range

    @classmethod
    def of(cls, length: int, *, sinks: int, recent: int, window: int | None, floor: int = 0) -> Visible:
        """Ranges for a context of `length` tokens (N, the newest included). A sliding window of `window` tokens hides
        everything before its start, sinks included, as the model itself does, and everything before `floor`."""
        assert length >= 1 and sinks >= 0 and recent >= 1
        first = 0 if window is None else max(floor, length - window)
        sinks_stop = max(first, min(sinks, length - 1))
        recent_start = max(sinks_stop, length - recent)
        return cls(range(first, sinks_stop), range(sinks_stop, recent_start), range(recent_start, length))

    @property
    def all(self) -> range:
        """Every visible token."""
        return range(self.sinks.start, self.recent.stop)

    @property
    def resident(self) -> int:
        """How many visible tokens are resident."""
        return len(self.sinks) + len(self.recent)


@dataclass(frozen=True)
class Selection:
    """Tokens of one sequence that one layer attends to in one step besides the resident ones.

    tokens: int64 `[Hkv, n]`, token indices within `Visible.candidates`, no duplicates in a row, in any order.
    counts: int32 `[Hkv]`, all the same, on the device: how many of each row are meant. The others are any indices of
        the context; n is then only the most there can be, and nobody has waited for the device. None: all are meant.
    """

    tokens: torch.Tensor
    counts: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """n, tokens per KV head; with `counts` the most there can be."""
        return self.tokens.shape[1]

    def known(self) -> Selection:
        """The same without `counts`: waits for the device where there are any."""
        return self if self.counts is None else Selection(self.tokens[:, : int(self.counts[0])])


@dataclass(frozen=True, eq=False)
class ScatteredRows:
    """Rows that lie anywhere among others: k and v `[R, d]`, of which ids int64 `[Hkv, n]` are meant."""

    k: torch.Tensor
    v: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class KVPart:
    """Rows of one layer of one sequence that lie together on the compute device: k, v `[Hkv, n, d]` (views allowed).
    With counts, int32 `[Hkv]`, only the first rows of each KV head are meant; the others hold anything."""

    k: torch.Tensor
    v: torch.Tensor
    counts: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Hkv and n."""
        kv_heads, n, _ = self.k.shape
        return kv_heads, n

    @property
    def scattered(self) -> ScatteredRows | None:
        """Where the rows are before k and v gather them, if they have to."""
        return None

    def mix(self, weights: torch.Tensor) -> torch.Tensor:
        """The values weighted by `weights` `[Hkv, G, n]`: `[Hkv, G, d]`, in v's dtype."""
        return torch.bmm(weights.to(self.v.dtype), self.v)


@dataclass
class BlockTable:
    """A sequence's hold on chunks of the host pool: ids and two numbers, no tensors.

    chunks: chunk ids in token order; chunk i holds the tokens [64 i, 64 (i + 1)).
    length: tokens whose K and V are complete in every layer.
    windows: of models with sliding layers, the ids of the chunks that hold their rows (`pool.layer_groups`), by place:
        `windows[i]` are those of the tokens [64 i, 64 (i + 1)), one for each group of sliding layers, as long as a
        window can show any of them.
    floor: the first token that sliding layers may see: those before it were forgotten (`sessions.truncate`).
    Only `HostPool` changes a block table.
    """

    chunks: list[int] = field(default_factory=list)
    length: int = 0
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    floor: int = 0

    @property
    def capacity(self) -> int:
        """Token slots held."""
        return len(self.chunks) * CHUNK


@dataclass(frozen=True)
class Prompt:
    """What one request starts from: `id` numbers the requests of an engine, `token_ids` is not empty. Requests with
    different `cache_salt`s share no KV."""

    id: int
    token_ids: tuple[int, ...]
    cache_salt: str = ""

    def __post_init__(self) -> None:
        assert self.token_ids, "the facade refuses empty prompts"


def ranges_of(numbers: Iterable[int]) -> list[range]:
    """Returns `numbers`, which rise, as the fewest ranges that hold exactly them, in order."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def padded_batch(sequences: int) -> int:
    """`sequences` rounded up, so that few batch sizes are captured: to a power of two, from 8 on to whole eights."""
    return -(-sequences // 8) * 8 if sequences > 8 else 1 << (sequences - 1).bit_length()


def bucket(context: int) -> int:
    """`context` tokens rounded up: chunks, and eight sizes between a power of two and the next."""
    step = max(CHUNK, 1 << max(0, (context - 1).bit_length() - 4))
    return -(-context // step) * step
