"""The contract between the decode loop and a policy.

A `Policy` is immutable and shared by all sequences. A `PolicyState` contains the selection data of one sequence, such
as the scoring keys, accumulated attention or page bounds of its tokens. If a sequence is forked, its state is forked
too. For each sequence, the decode loop calls:

    prefill, layer l      state.on_queries(l, q, k, start)      for each prefill chunk
                          state.on_kv(l, k, v, 0)               the KV of the prompt
    decode, layer l       state.on_kv(l, k, v, N - 1)           the newest KV entry, before layer l attends
                          state.select(l, q, visible)           as soon as the query from `Policy.query_source` exists
                          state.repair(l, q, visible, sel)      with the layer's true query, before it attends
                          state.merge_approximate(l, q, visible, sel, out, lse)
                                                                adds an estimate for tokens that were not selected
                          state.on_attended(l, ...)             only if `wants_weights`

`select`, `repair`, `merge_approximate` and `on_attended` are never called for a layer in `dense_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ..core import Selection, VisibleTokens
from .infinigen.scoring_keys import BatchedKeys
from .rule import Rule

QuerySource = Literal["attention_input", "normed_input", "residual", "query"] | int
"""The input from which the query of layer l for `select` is computed.

"attention_input", "normed_input" and "residual" are available while layer l - 1 runs, and yield a predicted query. An
integer n means that the query is predicted from the input of the n-th decoder layer before layer l. If there are fewer
than n layers without attention between layers l - 1 and l, "normed_input" is used instead. "query" is the true query of
layer l, which leaves no time to prefetch. Layer 0 always gets its true query, which depends only on the embedding.
"""

KeyReader = Callable[[int, range], torch.Tensor]
"""Function (layer, token range) -> keys `[Hkv, n, d]` of the sequence, read from the host pool.

It is used by measurements and by policies that need the full keys (oracle). Its reads are not counted as transfers.
"""


def source_between(source: QuerySource, between: int) -> QuerySource:
    """Return the query source of a layer that directly follows `between` decoder layers without attention.

    If `source` is an integer greater than `between`, it is replaced with "normed_input".
    """
    return "normed_input" if isinstance(source, int) and source > between else source


class PolicyState:
    """The selection data of a policy for one sequence.

    Subclasses must define `select` and `fork`. All other methods are no-ops by default.
    """

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the scoring keys and other selection data on the device."""
        return 0

    @property
    def approximate_bytes(self) -> int:
        """Size in bytes of the approximate KV that `merge_approximate` reads. `device_bytes` includes it."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Size in bytes of the scoring keys in host memory; 0 if they are on the device."""
        return 0

    @property
    def scoring_keys(self) -> BatchedKeys | None:
        """Scoring keys with which `KeyLists` selects tokens for a whole batch, or None if this is not supported."""
        return None

    def on_queries(self, layer: int, q: torch.Tensor, k: torch.Tensor, start: int) -> None:
        """Observe the queries of one prefill chunk.

        Args:
            q: True queries `[H, m, d]` of the tokens [start, start + m).
            k: Keys `[Hkv, n, d]` of the first n tokens of the sequence, with n >= start + m. The policy must apply the
                causal mask: query i may only see keys up to token start + i.
            start: Token index of the first query.
        """

    def on_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int) -> None:
        """Observe the keys k (after RoPE) and values v that were stored in slots [start, start + m) of the layer.

        k and v are `[Hkv, m, d]`. `start` is at most the number of slots that the layer has. If slots exist already,
        their old tokens have been moved, evicted, or rejected by the verification of drafts.
        """

    def on_moved(self, layer: int, source: int, target: int) -> None:
        """Move the selection data of slot `source` to slot `target`, whose token was evicted.

        Afterwards, the caller calls `on_kv` with a new token for slot `source`. This method is only called if the
        policy is `evictable`.
        """

    def select(self, layer: int, q: torch.Tensor, visible: VisibleTokens) -> Selection:
        """Select the candidates to fetch for this layer, using the predicted or true query q `[H, d]`.

        All candidates must have been passed to `on_kv` before.
        """
        raise NotImplementedError

    def repair(self, layer: int, q: torch.Tensor, visible: VisibleTokens, selection: Selection) -> Selection | None:
        """Choose candidates to fetch in addition to `selection`, using the true query q `[H, d]`. May return None."""
        return None

    def merge_approximate(
        self,
        layer: int,
        q: torch.Tensor,
        visible: VisibleTokens,
        selection: Selection,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge exact attention with an estimate of the attention to the candidates that were not selected.

        Args:
            q: The true query `[H, d]`.
            visible: The tokens that the layer can attend to.
            selection: All selected tokens, including the result of `repair`.
            out: Exact attention output `[H, d]`. May be overwritten.
            lse: Log-sum-exp of the exact attention scores `[H]` (natural log). May be overwritten.

        Returns:
            The merged `out` and `lse`. They are unchanged if the policy ignores tokens that were not selected.
        """
        return out, lse

    def on_attended(self, layer: int, visible: VisibleTokens, tokens: torch.Tensor, weights: torch.Tensor) -> None:
        """Observe the attention weights of a decode step. This is only called for layers that select tokens.

        Args:
            visible: The tokens that the layer can attend to.
            tokens: Attended token indices `[Hkv, n]`, including resident tokens.
            weights: Softmax weights `[Hkv, n]`, summed over the G query heads of each KV head.
        """

    def fork(self, keys: KeyReader) -> PolicyState:
        """Return an independent copy for a fork of the sequence. `keys` reads the keys of the fork."""
        raise NotImplementedError

    def fork_prefix(self, tokens: int) -> PolicyState | None:
        """Return a state that contains only the first `tokens` tokens, for a sequence that shares their KV blocks.

        Return None if the state cannot be shared, or if recomputing it from the KV is just as cheap.
        """
        return None

    def check_integrity(self) -> None: ...


class Policy:
    """A token selection method with fixed options. Subclasses must set the attributes that have no default here."""

    name: str
    """Name by which `LLM(policy=...)` selects the policy."""

    query_source: QuerySource = "query"
    """Input that is projected to the query for `select`."""

    sinks: int
    """Number of tokens at the start of the sequence (attention sinks) that always stay on the device."""

    recent: int
    """Number of most recent tokens, including the newest, that always stay on the device. At least 1."""

    dense_layers: frozenset[int]
    """Layers that attend to all visible tokens."""

    dense_until: int = 0
    """Length in tokens of the longest context in which every layer attends to all tokens.

    0 if only the layers in `dense_layers` ever attend to all tokens.
    """

    wants_weights: bool = False
    """Whether the policy observes attention weights (see `on_attended`)."""

    wants_queries: bool = False
    """Whether the policy observes all prompt queries (`on_queries`). If so, it cannot use cached prefixes."""

    rule: Rule | None = None
    """Rule by which `KeyLists` selects tokens for a whole batch. If None, each sequence selects separately.

    If there is a rule, decode steps use `KeyLists` instead of `on_kv` and `select`, and the host does not need to know
    how many tokens are selected.
    """

    evictable: bool = False
    """Whether the policy supports eviction, which moves and overwrites tokens of a sequence."""

    provenance_key: str
    """KV provenance key: a digest of the policy's name and options, or "exact" for full attention.

    Only requests with the same key can reuse cached KV, because the policy affects the KV of deeper layers.
    """

    def correct_prediction(self, layer: int, attention_input: torch.Tensor) -> torch.Tensor:
        """Return the corrected attention input `[T, D]` for predicting the layer's query."""
        return attention_input

    def new_state(self, keys: KeyReader) -> PolicyState:
        """Return the state of a new, empty sequence. `keys` reads its keys from the host pool."""
        raise NotImplementedError
